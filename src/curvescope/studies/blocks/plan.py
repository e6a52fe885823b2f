"""What the blocks cost, and cheaper ones: fewer tokens first, then probes."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.plan import Cost, Plan
from curvescope.studies.blocks.study import SMALL, Config, chosen_blocks

OF_BLOCK = 1 / 3  # of a product of the whole operator: nothing outside the block is differentiated


def cost(cfg: Config, problem: Problem) -> Cost:
    """Traces of all blocks together, and what each block has of its own."""
    chosen = chosen_blocks(cfg, problem)
    own = sum(cfg.num_small_probes if b.size < SMALL else cfg.num_norm_probes for b in chosen["norm"])
    own += cfg.max_products * len(chosen["extremes"])
    own += cfg.num_density_probes * cfg.num_steps * len(chosen["density"])
    pieces = 1 + sum(len(chosen[kind]) for kind in ("norm", "extremes", "density"))
    num = len(cfg.operators)
    return Cost(num * pieces, num * (cfg.num_trace_probes + OF_BLOCK * own))


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 256, "num_trace_probes": 12, "num_norm_probes": 6},
        {"tokens": 128, "num_trace_probes": 8, "num_norm_probes": 4, "num_small_probes": 3},
        {"tokens": 64, "num_trace_probes": 8, "num_norm_probes": 3, "num_small_probes": 2},
        {"tokens": 32, "num_trace_probes": 6, "num_norm_probes": 2, "num_small_probes": 2},
    ),
)

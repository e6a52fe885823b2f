"""What the blocks cost, and cheaper ones: fewer tokens first, then probes."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.plan import Cost, Plan
from curvescope.studies.blocks.study import SMALL, Config, chosen_blocks

OF_BLOCK = 1 / 3  # of a product of the whole operator: nothing outside the block is differentiated


def cost(cfg: Config, problem: Problem) -> Cost:
    """Traces and ends of all blocks together, and what each block has of its own."""
    chosen = chosen_blocks(cfg, problem)
    own = sum(_own(cfg, block.size) for block in chosen["norm"])
    own += cfg.max_products * len(chosen["extremes"])
    own += cfg.num_density_probes * cfg.num_steps * len(chosen["density"])
    together = cfg.num_trace_probes + cfg.num_sharp_steps
    pieces = 1 + (cfg.num_sharp_steps > 0) + sum(len(chosen[k]) for k in ("norm", "extremes", "density"))
    num = len(cfg.operators)
    return Cost(num * pieces, num * (together + OF_BLOCK * own))


def _own(cfg: Config, size: int) -> int:
    """Products of one block: its matrix where that is small, else probes and a basis."""
    if size <= cfg.max_exact:
        return size
    return cfg.num_sharp_steps + (cfg.num_small_probes if size < SMALL else cfg.num_norm_probes)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 256, "num_trace_probes": 12, "num_norm_probes": 6, "num_sharp_steps": 10},
        {
            "tokens": 128, "num_trace_probes": 8, "num_norm_probes": 4, "num_small_probes": 4,
            "num_sharp_steps": 10,
        },
        {
            "tokens": 64, "num_trace_probes": 8, "num_norm_probes": 3, "num_small_probes": 3,
            "num_sharp_steps": 8,
        },
        {
            "tokens": 32, "num_trace_probes": 6, "num_norm_probes": 3, "num_small_probes": 3,
            "num_sharp_steps": 6,
        },
    ),
)  # fmt: skip

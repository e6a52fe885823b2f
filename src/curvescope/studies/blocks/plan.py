"""What the blocks cost, and cheaper ones: fewer tokens first, then probes."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan, Step
from curvescope.studies.blocks.study import SMALL, Config, chosen_blocks
from curvescope.studies.steps import Part, eigenvalues, lanczos, own_probes, probed, together

OF_BLOCK = 1 / 3  # of a product of the whole operator: nothing outside the block is differentiated


def cost(cfg: Config, problem: Problem) -> Cost:
    """Traces and ends of all blocks together, and what each block has of its own."""
    chosen = chosen_blocks(cfg, problem)
    own = sum(_own(cfg, problem.model.size_of(block)) for block in chosen["norm"])
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


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same step by step."""
    chosen, found = chosen_blocks(cfg, problem), []
    for name in cfg.operators:
        whole = Part(problem, name, cfg.blocks)
        parts = {kind: [whole._replace(space=(b.name,)) for b in some] for kind, some in chosen.items()}
        found.append(probed("traces", whole, cfg.num_trace_probes))
        if cfg.num_sharp_steps:
            found.append(lanczos("ends", whole, cfg.num_sharp_steps))
        few = [part for part, b in zip(parts["norm"], chosen["norm"], strict=True) if b.size < SMALL]
        many = [part for part in parts["norm"] if part not in few]
        how = cfg.num_sharp_steps, cfg.max_exact
        found += own_probes("small blocks", few, cfg.num_small_probes, *how)
        found += own_probes("blocks", many, cfg.num_norm_probes, *how)
        found += [
            eigenvalues("eigenvalues", p, 1 if p.psd else 2, cfg.max_products) for p in parts["extremes"]
        ]
        if parts["density"]:
            products = cfg.num_density_probes * cfg.num_steps * len(parts["density"])
            found.append(together("densities", parts["density"], products, basis=cfg.num_steps + 1))
    return found


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
    steps,
)  # fmt: skip

"""What a comparison costs, the first side standing for all, and cheaper ones: fewer tokens, then probes."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.plan import Cost, Plan
from curvescope.studies.compare.settings import Config
from curvescope.studies.compare.study import chosen_blocks

OF_BLOCK = 1 / 3  # of a product of the whole operator: nothing outside the block is differentiated


def cost(cfg: Config, problem: Problem) -> Cost:
    """H, H_o and H_f of the whole, and H of every block, on every side."""
    sizes = chosen_blocks(cfg, problem).values()
    each = cfg.num_block_probes + cfg.num_block_steps
    own = sum(size if size <= max(cfg.max_exact, each) else each for size in sizes)
    density = cfg.num_density_probes * cfg.num_density_steps
    whole = 3 * cfg.num_probes + 2 * (cfg.num_steps + density)
    size = problem.model.size_of(*problem.space())
    if size <= max(cfg.max_exact, cfg.num_probes + cfg.num_steps):
        whole = 5 * size
    sides = len(cfg.asked())
    return Cost(sides * (1 + len(sizes)), sides * (whole + OF_BLOCK * own), graphs=sides * (3 + len(sizes)))


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 128},
        {"tokens": 128, "num_probes": 6, "num_steps": 16, "num_density_probes": 2, "num_block_probes": 3},
        {
            "tokens": 64, "num_probes": 4, "num_steps": 12, "num_density_probes": 2, "num_density_steps": 12,
            "num_block_probes": 3, "num_block_steps": 6,
        },
        {
            "tokens": 32, "num_probes": 3, "num_steps": 8, "num_density_probes": 0, "num_block_probes": 2,
            "num_block_steps": 4,
        },
    ),
)  # fmt: skip

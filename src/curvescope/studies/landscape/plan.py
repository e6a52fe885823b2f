"""What the study costs, and smaller ones: fewer samples whose curvature is measured first."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan
from curvescope.studies.landscape.study import Config

ALONE = 4.0  # what a sample's own product costs more than its share of a product of all of them
POINT = 0.3  # what losses at a point cost, in products


def cost(cfg: Config, problem: Problem) -> Cost:
    """Products of single samples, of the mean Hessian, and losses at points, in products over all data."""
    there = max(1, -(-cfg.tokens // cfg.seq_len))
    share = min(1.0, cfg.num_curved / there)
    own = cfg.num_probes + cfg.dimension + 2  # and the gradients, twice
    points = 2 * cfg.num_pairs * (len(cfg.radii) + 1)
    power = cfg.num_norms * cfg.num_steps * (len(cfg.radii) + 2) / max(cfg.num_curved, 1)
    each = ALONE * (own + power) + cfg.max_products + POINT * points
    return Cost(4 + len(cfg.radii), share * each)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks


PLAN = Plan(
    blocks,
    cost,
    (
        {"num_curved": 32, "num_pairs": 6, "max_products": 20, "num_norms": 3},
        {
            "tokens": 4096, "num_curved": 24, "num_pairs": 4, "max_products": 16, "num_norms": 2,
            "dimension": 2,
        },
        {
            "tokens": 2048, "num_curved": 16, "num_pairs": 3, "num_probes": 3, "max_products": 12,
            "num_norms": 2, "num_steps": 5, "dimension": 1,
        },
        {
            "tokens": 1024, "num_curved": 8, "num_pairs": 2, "num_probes": 3, "max_products": 8,
            "num_norms": 1, "num_steps": 4, "dimension": 1,
        },
    ),
)  # fmt: skip

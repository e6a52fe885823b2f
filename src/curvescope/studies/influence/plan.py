"""What the study costs, and smaller ones: shorter systems first, then fewer data and trainings."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan
from curvescope.studies.influence.study import MOST_PROBES, Config, last_layer

TRAINED = {"MLP": (4.0, 1.6), "Transformer": (12.0, 3.9)}  # seconds: at first, and for a sequence left out
GRADIENT = 0.7  # in products


def cost(cfg: Config, problem: Problem) -> Cost:
    """Most products of the mean diagonal and of a system for each query and damping; gradients; trainings."""
    queries, dampings = len(cfg.query) or cfg.num_queries, 1 + len(cfg.other_dampings)
    size = problem.space(*(cfg.blocks or last_layer(problem))).size
    diagonal = min(size, max(cfg.num_probes, MOST_PROBES))
    products = diagonal + queries * (dampings * cfg.max_products + 2 * GRADIENT)
    seconds = sum(first + cfg.num_removed * each for first, each in map(TRAINED.__getitem__, cfg.cases))
    pieces = 1 + queries + len(cfg.cases) * (2 + cfg.num_removed)
    return Cost(pieces, products, graphs=1 + queries, seconds=seconds)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks or ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"max_products": 300},
        {"max_products": 100, "num_removed": 10},
        {"tokens": 256, "max_products": 50, "num_removed": 6, "num_queries": 1},
        {"tokens": 128, "max_products": 20, "num_removed": 4, "num_queries": 1},
    ),
)

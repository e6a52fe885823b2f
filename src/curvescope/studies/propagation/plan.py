"""What the sources cost, and cheaper ones: fewer tokens first, then probes."""

from __future__ import annotations

from curvescope.models.sources import find_sources
from curvescope.problem import Problem
from curvescope.runs.plan import Cost, Plan
from curvescope.studies.propagation.shares import HESSIAN
from curvescope.studies.propagation.study import TWICE, Config, asked_ends, layer_slices

SOURCE = 1.0  # products of the Hessian that one of a single source takes
EACH = 0.1  # and what each adds when all of them are asked for at once


def cost(cfg: Config, problem: Problem) -> Cost:
    """Shares of all sources together, eigenvalues of each, and the map."""
    count, size = len(find_sources(problem.model)) + 1, problem.space().size
    exact = size <= cfg.max_exact
    vectors = size if exact else cfg.num_probes
    layers, asked = len(layer_slices(problem)), asked_ends(cfg, problem)
    coupling = cfg.num_map_probes * layers
    steps = cfg.num_steps * (len(asked) + (TWICE - 1) * (HESSIAN in asked))
    products = vectors * (2 + SOURCE + EACH * count) + SOURCE * steps + coupling
    return Cost(1 + len(asked) + (coupling > 0 and layers > 1), products)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 128},
        {"tokens": 64, "num_probes": 6},
        {"tokens": 64, "num_probes": 4, "num_steps": 6, "num_map_probes": 1},
        {"tokens": 32, "num_probes": 4, "num_steps": 4, "num_map_probes": 1},
        {"tokens": 32, "num_probes": 2, "num_steps": 0, "num_map_probes": 0},
    ),
)

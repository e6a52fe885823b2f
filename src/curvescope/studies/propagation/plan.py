"""What the sources cost, and cheaper ones: fewer tokens first, then probes."""

from __future__ import annotations

from curvescope.models.sources import find_sources
from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan, Step
from curvescope.studies.propagation.shares import HESSIAN, OUTER, TOGETHER
from curvescope.studies.propagation.study import TWICE, Config, asked_ends, layer_slices
from curvescope.studies.steps import Part, probed

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


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same step by step."""
    size, layers = problem.space().size, layer_slices(problem)
    exact = size <= cfg.max_exact
    vectors, columns = (size, size) if exact else (cfg.num_probes, max(1, TOGETHER // size))
    found = [
        Step(f"shares, {name}", kind, vectors, columns=min(columns, vectors), made=1)
        for name, kind in (("H", "hessian"), ("GGN", "ggn"), ("sources", "sources"))
    ]
    kinds = {HESSIAN: "hessian", OUTER: "ggn"}
    for name in asked_ends(cfg, problem):
        count = cfg.num_steps * (TWICE if name == HESSIAN else 1)
        found.append(Step(f"eigenvalues of {name}", kinds.get(name, "source"), count, basis=count + 1))
    if cfg.num_map_probes and len(layers) > 1:
        found.append(probed("couplings", Part(problem, "hessian"), cfg.num_map_probes, times=len(layers)))
    return found


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
    steps,
)

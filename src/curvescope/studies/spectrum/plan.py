"""What a spectrum costs, and smaller ones: fewer tokens first, then probes and steps."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan, Step
from curvescope.studies.spectrum.study import OPERATORS, Config, mapped
from curvescope.studies.steps import Part, density, eigenvalues, probed

PIECES = 4  # of each operator


def cost(cfg: Config, problem: Problem) -> Cost:
    """Density, eigenvalues, traces and map of every operator."""
    columns = len(mapped(problem.space(*cfg.blocks).in_blocks().slices, cfg))
    density = cfg.num_probes * cfg.num_steps
    each = density + cfg.max_products + cfg.num_trace_probes + cfg.num_map_probes * columns
    return Cost(len(OPERATORS) * PIECES, len(OPERATORS) * each)


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same in the order in which it is done, of eigenvalues as many products as they usually take."""
    columns = len(mapped(problem.space(*cfg.blocks).in_blocks().slices, cfg))
    found = []
    for name in OPERATORS:
        part = Part(problem, name, cfg.blocks)
        k = cfg.num_eigenvalues if part.psd else 2 * cfg.num_eigenvalues
        found += [
            density("density", part, cfg.num_probes, cfg.num_steps),
            eigenvalues("eigenvalues", part, k, cfg.max_products),
            probed("traces", part, cfg.num_trace_probes),
            probed("block map", part, cfg.num_map_probes, times=columns),
        ]
    return found


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 256, "num_probes": 3, "num_trace_probes": 24, "num_map_probes": 2, "max_products": 250},
        {
            "tokens": 128, "num_probes": 2, "num_steps": 30, "num_eigenvalues": 2, "num_trace_probes": 16,
            "num_map_probes": 1, "max_products": 120,
        },
        {
            "tokens": 64, "num_probes": 2, "num_steps": 20, "num_eigenvalues": 1, "num_trace_probes": 12,
            "num_map_probes": 1, "max_products": 60,
        },
        {
            "tokens": 64, "num_probes": 1, "num_steps": 20, "num_eigenvalues": 1, "num_trace_probes": 8,
            "num_map_probes": 1, "max_products": 40,
        },
        {
            "tokens": 32, "num_probes": 1, "num_steps": 16, "num_eigenvalues": 1, "num_trace_probes": 6,
            "num_map_probes": 1, "max_products": 30,
        },
    ),
    steps,
)  # fmt: skip

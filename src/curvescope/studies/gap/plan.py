"""What the gap costs, and cheaper ones: fewer tokens first, then probes and draws."""

from __future__ import annotations

from dataclasses import replace

from curvescope.algorithms.columns import columns_at_once
from curvescope.problem import Problem
from curvescope.runs.plan import Cost, Plan, Step
from curvescope.studies.checkpoints import checkpoint_names
from curvescope.studies.gap.pair import ALL, Effort
from curvescope.studies.gap.study import Config, chosen_blocks, replaces
from curvescope.studies.gap.targets import KINDS
from curvescope.studies.steps import Part, own_probes, together

OF_BLOCK = 0.6  # of a product of the whole operator


def cost(cfg: Config, problem: Problem) -> Cost:
    """Every block at every checkpoint, the whole model with other targets, and draws of targets."""
    points = len(checkpoint_names(cfg, cfg.checkpoints))
    blocks = [problem.model.size_of(*problem.space(block)) for block in chosen_blocks(cfg, problem)]
    of_blocks = sum(_products(cfg, "", size) for size in blocks)
    size = problem.model.size_of(*problem.space())
    whole = _products(cfg, ALL, size)
    other = len(KINDS) if replaces(cfg, problem) else 0
    without = _products(replace(cfg, num_density_probes=0), ALL, size)
    products = points * (OF_BLOCK * of_blocks + whole) + other * without + 2 * cfg.num_draws
    pairs = points * (1 + len(blocks)) + other
    return Cost(pairs + (other > 0), products, graphs=3 * pairs + cfg.num_draws)


def _products(cfg: Config, block: str, size: int) -> int:
    """Of H, H_o and H_f of one block."""
    effort = cfg.effort(block)
    if size <= effort.max_exact:
        return 5 * size
    density = effort.num_density_probes * effort.num_density_steps
    return 3 * effort.num_probes + 2 * (effort.num_steps + density)


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same step by step: the whole at every checkpoint, blocks, other targets, draws."""
    points = len(checkpoint_names(cfg, cfg.checkpoints))
    found = _pairs("the whole", cfg.effort(ALL), problem, [()], points)
    if chosen := [(block,) for block in chosen_blocks(cfg, problem)]:
        found += _pairs("blocks", cfg.effort(""), problem, chosen, points)
    if replaces(cfg, problem):
        without = cfg.effort(ALL)._replace(num_density_probes=0)
        found += _pairs("other targets", without, problem, [()], len(KINDS))
        draws = max(cfg.num_draws, 2)
        found.append(Step("draws of targets", "functional", 2 * draws, columns=2, made=draws))
    return found


def _pairs(
    what: str, effort: Effort, problem: Problem, spaces: list[tuple[str, ...]], times: int
) -> list[Step]:
    """`measure_pair` of every space, so many times."""
    found = []
    for kind in ("hessian", "ggn", "functional"):
        parts = [Part(problem, kind, space) for space in spaces]
        half = kind == "functional"
        some = [] if half or not effort.num_density_probes else [_densities(what, parts, effort)]
        some += own_probes(what, parts, effort.num_probes, 0 if half else effort.num_steps, effort.max_exact)
        found += [
            step._replace(products=times * step.products, made=times if i == 0 else 0)
            for i, step in enumerate(some)
        ]
    return found


def _densities(what: str, parts: list[Part], effort: Effort) -> Step:
    products = effort.num_density_probes * effort.num_density_steps * len(parts)
    widths = [columns_at_once(part.operator) for part in parts]
    columns = min(effort.num_density_probes, *widths)
    basis = effort.num_density_steps + 1
    return together(f"density of {what}", parts, products, columns=columns, basis=basis)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 64},
        {"tokens": 64, "num_probes": 3, "num_density_probes": 2, "num_draws": 4},
        {"tokens": 32, "num_probes": 3, "num_steps": 8, "num_density_probes": 2, "num_draws": 2},
        {"tokens": 32, "num_probes": 2, "num_steps": 6, "num_density_probes": 0, "num_draws": 0},
    ),
    steps,
)

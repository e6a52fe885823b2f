"""What the gap costs, and cheaper ones: fewer tokens first, then probes and draws."""

from __future__ import annotations

from dataclasses import replace

from curvescope.problem import Problem
from curvescope.runs.plan import Cost, Plan
from curvescope.studies.checkpoints import checkpoint_names
from curvescope.studies.gap.pair import ALL
from curvescope.studies.gap.study import Config, chosen_blocks, replaces
from curvescope.studies.gap.targets import KINDS

OF_BLOCK = 0.6  # of a product of the whole operator


def cost(cfg: Config, problem: Problem) -> Cost:
    """Every block at every checkpoint, the whole model with other targets, and draws of targets."""
    points = len(checkpoint_names(cfg, cfg.checkpoints))
    blocks = [problem.space(block).size for block in chosen_blocks(cfg, problem)]
    of_blocks = sum(_products(cfg, "", size) for size in blocks)
    whole = _products(cfg, ALL, problem.space().size)
    other = len(KINDS) if replaces(cfg, problem) else 0
    without = _products(replace(cfg, num_density_probes=0), ALL, problem.space().size)
    products = points * (OF_BLOCK * of_blocks + whole) + other * without + 2 * cfg.num_draws
    pairs = points * (1 + len(blocks)) + other
    return Cost(pairs + (other > 0), products, graphs=3 * pairs + cfg.num_draws)


def _products(cfg: Config, block: str, size: int) -> int:
    """Of H, G and H_f of one block."""
    effort = cfg.effort(block)
    if size <= effort.max_exact:
        return 5 * size
    density = effort.num_density_probes * effort.num_density_steps
    return 3 * effort.num_probes + 2 * (effort.num_steps + density)


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
)

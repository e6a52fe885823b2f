"""What growing sinks costs, and cheaper sweeps: fewer blocks first, then texts, probes and steps."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan
from curvescope.studies.sinks.moved import groups
from curvescope.studies.sinks.study import Config, prepare

FIRST = 1.5  # products of the whole that one on a part of the data, with its own graph, takes more


def cost(cfg: Config, problem: Problem) -> Cost:
    """Products over all tokens: one on a text counts as its share of them."""
    sweep = prepare(problem, cfg, [])
    spectra, looks = len(sweep.ways), len(sweep.last) * len(groups(problem))
    each = cfg.num_probes * cfg.num_steps + cfg.ggn_steps + FIRST * cfg.texts
    products = spectra * each + looks * cfg.block_steps / cfg.texts
    return Cost(len(sweep.pieces()), products, graphs=spectra)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"block_steps": 0},
        {"block_steps": 0, "num_probes": 4, "num_steps": 8, "ggn_steps": 6},
        {"block_steps": 0, "num_probes": 3, "num_steps": 8, "ggn_steps": 6, "tokens": 96},
        {"block_steps": 0, "num_probes": 2, "num_steps": 8, "ggn_steps": 4, "tokens": 96, "texts": 2},
        {"block_steps": 0, "num_probes": 2, "num_steps": 6, "ggn_steps": 4, "tokens": 64, "texts": 2},
    ),
)

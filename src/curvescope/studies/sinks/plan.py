"""What growing sinks costs, and cheaper sweeps: fewer blocks first, then texts, probes and steps."""

from __future__ import annotations

from curvescope.problem import Problem
from curvescope.runs.plan import Cost, Plan
from curvescope.studies.sinks.moved import GROUPS
from curvescope.studies.sinks.study import Config

FIRST = 1.5  # products of the whole that one on a part of the data, with its own graph, takes more


def cost(cfg: Config, problem: Problem) -> Cost:
    """Products over all tokens: one on a text counts as its share of them."""
    spectra = len(cfg.ways) + 1
    each = cfg.num_probes * cfg.num_steps + cfg.ggn_steps + FIRST * cfg.texts
    blocks = (len(cfg.hows) + 1) * len(GROUPS) * cfg.block_steps / cfg.texts
    return Cost(spectra, spectra * each + blocks)


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

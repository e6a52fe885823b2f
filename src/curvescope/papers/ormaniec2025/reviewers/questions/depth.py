"""Question 1. Do the growth orders of one layer survive depth, skips, heads, W_O and low-rank values?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from curvescope.papers.ormaniec2025.reviewers.answers import PAPER, Answer, answer, same_orders
from curvescope.papers.ormaniec2025.reviewers.measure import Sweep, sweep
from curvescope.papers.ormaniec2025.reviewers.setting import SMALL, WIDTH, Config, transformer
from curvescope.papers.ormaniec2025.reviewers.slopes import exponents

QUESTION = "Do the orders of one layer survive depth, residual streams, heads, W_O, low-rank values?"
SCALES = {"2 layers, no skips, all see all": (0.01, 0.02, 0.04)}
"""Scales of a case whose tokens become equal: they differ by σ³, which must stay above rounding."""

ORDERS = {("H_o", "W_Q"): 6, ("H_o", "W_K"): 6, ("H_o", "W_V"): 2, ("H", "W_Q"): 5, ("H", "W_K"): 5,
          ("H", "W_V"): 2}  # fmt: skip
"""The paper's exponents of σ for one layer under cross-entropy; those of W_K follow by symmetry."""

CASES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "2 layers": {"n_layers": 2},
    "4 layers": {"n_layers": 4},
    "2 layers, no skips, causal": {"n_layers": 2, "residual": False},
    "2 layers, no skips, all see all": {"n_layers": 2, "residual": False, "causal": False},
    "2 heads": {"n_heads": 2},
    "4 heads": {"n_heads": 4},
    "W_O = identity": {},
    "values of rank 1": {"d_head": 1},
    "values of rank 2": {"d_head": 2},
}
CLAIMS = {
    "the orders of one layer survive depth": ("one layer", "2 layers", "4 layers"),
    "they survive without skips, causal": ("2 layers, no skips, causal",),
    "they survive without skips, all tokens seeing all": ("2 layers, no skips, all see all",),
    "they survive several heads": ("2 heads", "4 heads"),
    "they do not depend on W_O": ("W_O = identity",),
    "they survive value maps of low rank": ("values of rank 1", "values of rank 2"),
}


def make(case: str, seed: int) -> nn.Module:
    """The network of a case."""
    module = transformer(seed, **CASES[case])
    if case == "W_O = identity":
        with torch.no_grad():
            module.get_parameter("L0.W_O").copy_(torch.eye(WIDTH, dtype=torch.float64))
    return module


def pieces(cfg: Config) -> dict[str, Callable[[], Sweep]]:
    """A sweep over small σ for every case."""
    options = {"seeds": cfg.count, "sequences": cfg.sequences}
    return {
        f"depth.{case}": partial(sweep, partial(make, case), SCALES.get(case, SMALL), "L*.W_[QKV]", **options)
        for case in CASES
    }


def orders(case: str, found: Sweep) -> dict[str, tuple[np.ndarray, float]]:
    """Slopes over seeds and the paper's exponent, by block and part."""
    return {
        f"{case}: {part}({block})": (exponents(found.sigma, found.curve(part, block)), power)
        for (part, role), power in ORDERS.items()
        for block in found.blocks
        if block.endswith(role)
    }


def answers(found: Mapping[str, Sweep]) -> list[Answer]:
    """A verdict for each thing that is added to a layer."""
    rows = []
    for claim, cases in CLAIMS.items():
        slopes: dict[str, tuple[np.ndarray, float]] = {}
        for case in cases:
            slopes |= orders(case, found[f"depth.{case}"])
        worst, words, verdict = same_orders(slopes)
        expected = "H_o: Q, K 6, V 2; H: Q, K 5, V 2"
        rows.append(answer(1, claim, expected, worst, verdict, measured=words, source=PAPER))
    return rows

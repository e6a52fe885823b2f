"""Question 4. σ over six decades: where regimes change, and with which exponents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from curvescope.papers.ormaniec2025.reviewers.answers import (
    FAILS,
    HOLDS,
    OURS,
    PAPER,
    Answer,
    answer,
    is_order,
)
from curvescope.papers.ormaniec2025.reviewers.measure import Sweep, sweep, sweep_of
from curvescope.papers.ormaniec2025.reviewers.networks import ARCHITECTURES
from curvescope.papers.ormaniec2025.reviewers.setting import (
    Config,
    addition_batch,
    embedded,
    problem,
    transformer,
)
from curvescope.papers.ormaniec2025.reviewers.slopes import (
    Mean,
    Regime,
    exponents,
    mean_of,
    ratio_of,
    regimes,
)
from curvescope.problem import Problem
from curvescope.runs.shown import OPEN

QUESTION = "Six decades of σ: where do regimes change?"
CASES = ("softmax", "softmax, Pre-LN", "linear attention", "MLP")
BLOCKS = {"MLP": ("W_1", "U")}
EPS = 1e-12  # of the LayerNorms: with 1e-5 there is one more regime, below σ ≈ √ε, where they scale nothing
LAWS: tuple[tuple[str, str, str, float, str], ...] = (
    ("softmax", "H", "L0.W_Q", 5, PAPER),
    ("softmax", "H_o", "L0.W_Q", 6, PAPER),
    ("softmax", "H", "L0.W_V", 2, PAPER),
    ("softmax, Pre-LN", "H", "L0.W_Q", 0, PAPER),
    ("softmax, Pre-LN", "H", "L0.W_V", 0, PAPER),
    ("linear attention", "H", "L0.W_Q", 6, PAPER),
    ("MLP", "H", "W_1", 2, PAPER),
)
"""The paper's exponents by setting, part and block; with Pre-LN nothing grows."""

FAR = 20.0
TAILS = {"L0.W_Q": -1, "L0.W_V": -2}  # of H with Pre-LN for σ ≥ FAR: the stream passes what attention adds


def _network(case: str, seed: int) -> nn.Module:
    changes: dict[str, dict[str, Any]] = {
        "softmax": {},
        "softmax, Pre-LN": {"norm": "pre", "norm_eps": EPS},
        "linear attention": {"attention": "linear", "d_ff": 0, "residual": False},
    }
    return ARCHITECTURES["MLP"](seed) if case == "MLP" else transformer(seed, **changes[case])


def _squared(sequences: int, seed: int, sigma: float) -> Problem:
    """Linear attention alone, without skips, under squared error, as the paper has it."""
    batch = addition_batch(sequences, "onehot_next")
    X = sigma * embedded(batch, seed)
    return problem(_network("linear attention", seed), X, batch.targets, batch.weights, "mse_mean")


def pieces(cfg: Config) -> dict[str, Callable[[], Sweep]]:
    """Six decades for every setting."""
    found: dict[str, Callable[[], Sweep]] = {}
    for case in CASES:
        blocks = BLOCKS.get(case, ("L0.W_[QKVO]",))
        if case == "linear attention":
            at = partial(_squared, cfg.sequences)
            found[f"regime.{case}"] = partial(sweep_of, at, cfg.decades, *blocks, seeds=cfg.count)
        else:
            options = {"seeds": cfg.count, "sequences": cfg.sequences}
            found[f"regime.{case}"] = partial(sweep, partial(_network, case), cfg.decades, *blocks, **options)
    return found


def found_in(one: Sweep, part: str, block: str) -> list[list[Regime]]:
    """The regimes of a block, seed by seed."""
    return [regimes(one.sigma, curve) for curve in one.curve(part, block)]


def answers(found: Mapping[str, Sweep]) -> list[Answer]:
    """For each exponent: from which σ to which it is the slope, and what comes before and after."""
    rows = []
    for case, part, block, power, source in LAWS:
        one = found[f"regime.{case}"]
        what = f"{case}, {part}({block.removeprefix('L0.')})"
        rows.append(judge(what, power, source, one.sigma, found_in(one, part, block)))
    return [*rows, *(tail(found["regime.softmax, Pre-LN"], block, power) for block, power in TAILS.items())]


def tail(one: Sweep, block: str, power: float) -> Answer:
    """Verdict on the power of a block of H for large σ."""
    slope = mean_of(exponents(one.sigma, one.curve("H", block), low=FAR))
    verdict = HOLDS if is_order(slope, power) else OPEN if slope.low <= power <= slope.high else FAILS
    claim = f"softmax, Pre-LN, H({block.removeprefix('L0.')}) ~ σ^{power:g} for σ from {FAR:g} to 100"
    return answer(4, claim, f"σ^{power:g}", slope, verdict, source=OURS)


def judge(what: str, power: float, source: str, sigma: np.ndarray, curves: list[list[Regime]]) -> Answer:
    """Verdict on one power for all σ, from the regimes of every seed: those nearest to the power decide."""
    claim, expected = f"{what} ~ σ^{power:g} over six decades", f"σ^{power:g}"
    if not all(curves):
        none = Mean(math.nan, math.nan, math.nan)
        return answer(4, claim, expected, none, OPEN, measured="a seed without a regime", source=source)
    nearest = [min(own, key=lambda regime: abs(regime.slope - power)) for own in curves]
    slope = mean_of(np.array([regime.slope for regime in nearest]))
    begin, end = (ratio_of(np.array([getattr(r, side) for r in nearest])) for side in ("low", "high"))
    whole = begin.value <= sigma[0] * 1.001 and end.value >= sigma[-1] * 0.999
    words = f"slope {slope} for σ from {begin.value:.2g} to {end.value:.2g}{_others(curves, nearest)}"
    if not is_order(slope, power):
        verdict = FAILS
    else:
        verdict = HOLDS if whole else f"holds with σ from {begin.value:.2g} to {end.value:.2g}"
    return answer(4, claim, expected, slope, verdict, measured=words, source=source)


def _others(curves: list[list[Regime]], nearest: list[Regime]) -> str:
    """The slopes of the other regimes, if every seed has one before or after."""
    words = ""
    for when, side in (("before", 0), ("after", -1)):
        others = [own[side] for own in curves]
        if all(other is not near for other, near in zip(others, nearest, strict=True)):
            words += f"; {when} it {mean_of(np.array([other.slope for other in others]))}"
    return words


def caption_of(case: str) -> str:
    """Which architecture and loss a setting has."""
    return {
        "softmax": "softmax: one layer, one head, width 4, ReLU feed-forward of width 5, skips, no norm, "
        "cross-entropy",
        "softmax, Pre-LN": f"Pre-LN: the same with LayerNorms in front, ε = {EPS:g}",
        "linear attention": "linear attention: one layer without softmax, skips and feed-forward, squared "
        "error of one-hot digits",
        "MLP": "MLP: three layers of width 4 on the last six tokens, cross-entropy",
    }[case]

"""A statement and what was measured of it; verdicts come from the numbers, by rules that stand here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.attention.hessian import AttentionCurvature
from curvescope.closed_form.block_matrix import Pair
from curvescope.closed_form.bounds import growth
from curvescope.core.parts import HALVES, SYMBOLS, Half
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.runs.shown import FAILS, HOLDS

SLOPE = "holds as a slope for small scores, as a bound beyond"
CORRECTED = "holds with a correction"
VERDICTS = (HOLDS, SLOPE, CORRECTED, FAILS)
OURS = "ours"  # where a statement stands that is not of the paper

STEP = 1.001  # of the difference that gives a local slope
Slopes = dict[tuple[Pair, Half], float]


@dataclass(frozen=True)
class Statement(Result):
    """One row: what is claimed and what came out, over several random instances."""

    statement: str
    where: str
    claimed: float
    measured: float  # the mean over instances
    low: float  # the least of them
    high: float  # the largest
    verdict: str
    note: str


@dataclass(frozen=True)
class Group(Result):
    """The statements on one subject, and the arrays of its figure."""

    title: str
    rows: list[Statement]
    curves: dict[str, np.ndarray]


def state(
    statement: str,
    where: str,
    claimed: float,
    values: Sequence[float] | np.ndarray | float,
    *,
    tolerance: float,
    note: str = "",
    verdict: str | None = None,
) -> Statement:
    """A row; without a verdict from elsewhere it holds if every value is within `tolerance` of the claim."""
    found = np.atleast_1d(np.asarray(values, dtype=float))
    near = bool((np.abs(found - claimed) <= tolerance).all())
    return Statement(
        statement,
        where,
        float(claimed),
        float(found.mean()),
        float(found.min()),
        float(found.max()),
        (HOLDS if near else FAILS) if verdict is None else verdict,
        note,
    )


def slope_verdict(
    claimed: float, near: np.ndarray, far: np.ndarray, *, bound_ratio: float, tolerance: float
) -> str:
    """What a growth law is: a slope everywhere, a slope for small scores and a bound beyond, or neither.

    Args:
        near: slopes where scores are small.
        far: slopes at larger scales.
        bound_ratio: the largest ‖block‖ over a bound that grows with exactly the claimed exponent.
    """
    if np.abs(near - claimed).max() > tolerance:
        return FAILS
    if np.abs(far - claimed).max() <= tolerance:
        return HOLDS
    return SLOPE if bound_ratio <= 1 + 1e-9 else FAILS


class Head(NamedTuple):
    """One attention head on one sequence, and the loss's gradient at its output."""

    X: Tensor  # (L, d)
    W_Q: Tensor  # (d, d_K)
    W_K: Tensor
    W_V: Tensor  # (d, d_V)
    G: Tensor  # (L, d_V)


def make_head(seed: int, L: int = 6, d: int = 4, d_K: int = 3, d_V: int = 3) -> Head:
    """Standard normal entries."""
    source = generator(seed)
    shapes = (L, d), (d, d_K), (d, d_K), (d, d_V), (L, d_V)
    return Head(*(torch.randn(*shape, generator=source, dtype=torch.float64) for shape in shapes))


def local_slopes(at: Callable[[float], AttentionCurvature], scale: float) -> Slopes:
    """d log ‖block‖_F / d log scale of a curvature `at(scale)`, by pair and part; NaN where it is zero."""
    low, high = at(scale / STEP), at(scale * STEP)
    return {
        (pair, part): log_slope(float(low.frobenius(pair, part)), float(high.frobenius(pair, part)))
        for pair in growth.PAIRS
        for part in HALVES
    }


def log_slope(low: float, high: float, step: float = STEP) -> float:
    """Slope between two values whose arguments are `step`² apart; NaN if one is not positive."""
    return math.log(high / low) / (2 * math.log(step)) if low > 0 and high > 0 else math.nan


def exponent(before: float, after: float, factor: float) -> float:
    """The power p in after = factor^p · before."""
    return math.log(after / before) / math.log(factor)


def name(pair: Pair, part: Half) -> str:
    """H_o(Q, K)."""
    return f"{SYMBOLS[part]}({pair[0]}, {pair[1]})"

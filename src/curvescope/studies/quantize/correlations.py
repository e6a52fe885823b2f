"""Predictors of what rounding does, and their rank correlations with what was measured, over blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.intervals import median_interval
from curvescope.algorithms.estimates.ranks import Correlation, difference, rank_correlation
from curvescope.studies.quantize.rounding import NEAREST

if TYPE_CHECKING:
    from curvescope.studies.quantize.study import Quantized

PREDICTORS = {
    "error": "‖δ‖²",
    "trace": "tr(GGN) ‖δ‖² / 2n",
    "second order": "½ δᵀHδ",
    "both orders": "gᵀδ + ½ δᵀHδ",
}


class Row(NamedTuple):
    """One rank correlation, over blocks that are rounded to the nearest points."""

    bits: int
    predictor: str
    correlation: Correlation


def predicted(result: Quantized, predictor: str, bit: int, method: str = NEAREST) -> np.ndarray:
    """What a predictor says of every block, at the number of bits at this place: (B,)."""
    found = []
    for one in result.blocks.values():
        effects, size = one.at(method), one.size[one.methods.index(method), bit]
        said = {
            "error": size,
            "trace": one.trace / one.weights * size / 2,
            "second order": effects.second[bit].mean(),
            "both orders": effects.predicted[bit].mean(),
        }
        found.append(said[predictor])
    return np.array(found)


def increases(result: Quantized, bit: int, method: str = NEAREST) -> np.ndarray:
    """The measured increase of the loss by every block: (B,)."""
    return np.array([one.at(method).measured[bit].mean() for one in result.blocks.values()])


def rows(result: Quantized) -> Iterator[Row]:
    """All of them."""
    for i, bits in enumerate(result.together.bits):
        truth = increases(result, i)
        for predictor in PREDICTORS:
            said = predicted(result, predictor, i)
            found = rank_correlation(said, truth, draws=result.draws, seed=result.seed)
            yield Row(int(bits), predictor, found)


def better(result: Quantized, one: str, other: str, bit: int) -> Correlation:
    """ρ of one predictor less that of another."""
    a, b = (predicted(result, name, bit) for name in (one, other))
    return difference(a, b, increases(result, bit), draws=result.draws, seed=result.seed)


def relative_error(result: Quantized, bit: int) -> Correlation:
    """Median over blocks of |predicted − measured| / |measured|, with its interval by order statistics.

    Blocks without any change, 0 by 0, are left out: `count` is that of the others.
    """
    truth, said = increases(result, bit), predicted(result, "both orders", bit)
    moved = (truth != 0) | (said != 0)
    with np.errstate(divide="ignore"):
        each = np.abs(said - truth)[moved] / np.abs(truth)[moved]
    middle = float(np.median(each)) if len(each) else np.nan
    return Correlation(middle, *median_interval(each), len(each), len(each))

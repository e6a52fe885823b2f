"""What is said about influence, next to retraining; every verdict is computed from an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin
from curvescope.studies.influence.correlations import gain, over_queries, slope
from curvescope.studies.influence.retraining import GGN_NAME, GRADIENTS, HESSIAN, KFAC_NAME

if TYPE_CHECKING:
    from curvescope.studies.influence.study import Comparison, Influence

OURS: Origin = ("ours", "ours")
NEAR, AGAIN = "trained on from the minimum", "trained again from the same start"
MARGIN = 0.05  # of ρ, within which two methods rank alike
WITHIN = 1.25  # a factor within which a size is right


def judge(result: Influence) -> list[Claim]:
    """All claims, small model after small model."""
    how: dict[str, Any] = {"draws": result.draws, "seed": result.seed}
    return [claim for name, one in result.comparisons.items() for claim in _case(name, one, how)]


def _case(name: str, one: Comparison, how: dict[str, Any]) -> list[Claim]:
    exact = one.predicted[GGN_NAME]
    found = [
        _ranks(f"influence ranks leave-one-out, {words}: {name}", over_queries(exact, measured, **how))
        for words, measured in ((NEAR, one.near), (AGAIN, one.again))
    ]
    for other, words in (
        (GRADIENTS, "the inverse of the GGN ranks leave-one-out better than gradients alone"),
        (None, "the Hessian's inverse ranks leave-one-out better than the GGN's"),
    ):
        pair = (exact, one.predicted[other]) if other else (one.predicted[HESSIAN], exact)
        found.append(_better(f"{words}: {name}", gain(*pair, one.near, **how)))
    lost = gain(exact, one.predicted[KFAC_NAME], one.near, **how)
    found.append(_alike(f"K-FAC's inverse ranks leave-one-out as the exact one does: {name}", lost))
    for method in (GGN_NAME, HESSIAN):
        words = f"the size of the change is right with the {method}: {name}"
        found.append(_size(words, slope(one.predicted[method], one.near, **how), one.near.size))
    return found


def _ranks(words: str, one: Correlation) -> Claim:
    verdict = HOLDS if one.low > 0 else FAILS if one.high < 0 else OPEN
    return Claim(words, "ρ > 0", f"ρ = {one.words}", verdict, *OURS)


def _better(words: str, one: Correlation) -> Claim:
    verdict = HOLDS if one.low > 0 else FAILS if one.high < 0 else OPEN
    return Claim(words, "better", f"ρ larger by {one.words}", verdict, *OURS)


def _alike(words: str, lost: Correlation) -> Claim:
    """It holds if less than the margin is lost, and fails if more is; by the interval."""
    verdict = HOLDS if lost.high < MARGIN else FAILS if lost.low > MARGIN else OPEN
    return Claim(words, f"ρ smaller by less than {MARGIN:g}", f"ρ smaller by {lost.words}", verdict, *OURS)


def _size(words: str, ratio: Correlation, cells: int) -> Claim:
    """Of so many cells, of which those without any change are left out."""
    inside = ratio.low > 1 / WITHIN and ratio.high < WITHIN
    outside = ratio.high < 1 / WITHIN or ratio.low > WITHIN
    verdict = HOLDS if inside else FAILS if outside else OPEN
    measured = f"median of measured / predicted = {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    measured += f", {cells - ratio.count} of {cells} without any change" if ratio.count < cells else ""
    known = bool(np.isfinite([ratio.value, ratio.low, ratio.high]).all())
    return Claim(words, f"within a factor of {WITHIN:g}", measured, verdict if known else OPEN, *OURS)

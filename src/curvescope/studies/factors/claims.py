"""What is said about approximations of curvature; every verdict is computed from an interval, or a count."""

from __future__ import annotations

import math
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.intervals import mean_interval
from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin
from curvescope.studies.factors.correlations import gain, over_methods
from curvescope.studies.factors.distances import MEASURES
from curvescope.studies.factors.matrices import BLOCKS, DIAGONAL, EKFAC_NAME, GGN, IDENTITY, KFAC_NAME

if TYPE_CHECKING:
    from curvescope.studies.factors.study import Factors

OURS: Origin = ("ours", "ours")
ROUNDING = 1e-9
QUERIES_KEYS, OTHERS = ("*.W_[QK]",), ("*.W_V", "*.W_1", "*.W_2")
WORDS = {
    "frobenius": "the relative error from the GGN",
    "angle": "the angle from the GGN",
    "divergence": "the divergence from the GGN",
    "lost": "the lost decrease",
    "frobenius_hessian": "the relative error from the Hessian",
    "angle_hessian": "the angle from the Hessian",
}
FINAL, STEP = "the optimizer's loss", "the best single step"


class Mean(NamedTuple):
    """A mean over seeds with Student's 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """`+0.31 [+0.05, +0.52]`."""
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def mean_of(values: np.ndarray) -> Mean:
    """Of one number for each seed: (S,)."""
    n = len(values)
    if not np.isfinite(values).all():
        return Mean(float(values.mean()), math.nan, math.nan)
    stderr = values.std(ddof=1) / math.sqrt(n)
    low, high = mean_interval(np.array(values.mean()), np.array(stderr), n - 1)
    return Mean(float(values.mean()), float(low), float(high))


def judge(result: Factors) -> list[Claim]:
    """All claims: about distances, then about what they predict."""
    found = [*_nearer(result), _between(result), *_grow(result), *_queries_keys(result)]
    for measure in MEASURES:
        for outcome in outcomes(result):
            words = f"{WORDS[measure]} predicts {outcome}"
            found.append(_above(words, "ρ > 0", "ρ = ", correlation(result, measure, outcome)))
    for outcome in outcomes(result):
        for measure in ("lost", "frobenius_hessian"):
            words = f"{WORDS[measure]} predicts {outcome} better than the relative error from the GGN"
            one = better(result, measure, "frobenius", outcome)
            found.append(_above(words, "better", "ρ larger by ", one))
    return found


def outcomes(result: Factors) -> list[str]:
    """What is predicted: single steps, and runs where there are any."""
    return [STEP, FINAL] if result.tuned else [STEP]


def correlation(result: Factors, measure: str, outcome: str) -> Correlation:
    """ρ over approximations of a distance with an outcome, which is worse where it is larger."""
    return over_methods(*pair(result, measure, outcome), draws=result.draws, seed=result.seed)


def better(result: Factors, measure: str, other: str, outcome: str) -> Correlation:
    """How much larger ρ is for one distance than for another."""
    x, y = pair(result, measure, outcome)
    return gain(x, pair(result, other, outcome)[0], y, draws=result.draws, seed=result.seed)


def pair(result: Factors, measure: str, outcome: str) -> tuple[np.ndarray, np.ndarray]:
    """Distances and outcomes, (S, C, M) each: minus the decrease; the last loss, with the mean distance."""
    x = result.distance(measure)
    if outcome == STEP:
        return x, -result.decrease
    return x.mean(axis=1, keepdims=True), result.final[:, None]


def _above(words: str, said: str, label: str, one: Correlation | Mean) -> Claim:
    """It holds where the interval is above zero, and fails where it is below."""
    verdict = HOLDS if one.low > 0 else FAILS if one.high < 0 else OPEN
    return Claim(words, said, f"{label}{one.words}", verdict, *OURS)


def _nearer(result: Factors) -> list[Claim]:
    """EK-FAC against K-FAC: from the GGN in every block, where it is a theorem, and from the Hessian."""
    names = result.approximations
    if not {KFAC_NAME, EKFAC_NAME} <= set(names):
        return []
    E, K = names.index(EKFAC_NAME), names.index(KFAC_NAME)
    found = []
    for measure, matrix in (("frobenius", "GGN"), ("frobenius_hessian", "Hessian")):
        d = result.parts[:, :, MEASURES.index(measure)]
        nearer = d[:, :, E] <= d[:, :, K] + ROUNDING
        words = f"EK-FAC is nearer to the {matrix} than K-FAC in every block at every checkpoint"
        measured = f"in {int(nearer.sum())} of {nearer.size}"
        found.append(Claim(words, "all", measured, HOLDS if nearer.all() else FAILS, *OURS))
    return found


def _between(result: Factors) -> Claim:
    """Whether the blocks of the GGN hold less than half of its squared norm."""
    share = mean_of(result.between[:, :, 0].mean(axis=1))
    verdict = HOLDS if share.low > 0.5 else FAILS if share.high < 0.5 else OPEN
    measured = f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}] of ‖H_o‖²"
    return Claim("most of the GGN lies between blocks", "more than a half", measured, verdict, *OURS)


def _grow(result: Factors) -> list[Claim]:
    """Whether angles at the end of training are larger than at its beginning."""
    found = []
    for name in result.approximations:
        measure, matrix = ("angle_hessian", "Hessian") if name == GGN else ("angle", "GGN")
        if name == IDENTITY:
            continue
        own = result.of(measure, name)
        words = f"{name} moves away from the {matrix} in training"
        found.append(_above(words, "further", "degrees more: ", mean_of(own[:, -1] - own[:, 0])))
    return found


def _queries_keys(result: Factors) -> list[Claim]:
    """Whether blocks of queries and keys are further from theirs than those of values and feed-forward."""

    def mean(m: int, globs: tuple[str, ...]) -> np.ndarray:
        some = [i for i, name in enumerate(result.blocks) if any(fnmatch(name, glob) for glob in globs)]
        return result.parts[:, :, MEASURES.index("angle"), m][..., some].mean(axis=(1, 2))

    found = []
    for m, name in enumerate(result.approximations):
        if name in (IDENTITY, DIAGONAL, BLOCKS, GGN):
            continue
        words = f"{name} is further from the GGN in queries and keys than in values and feed-forward"
        gap = mean_of(mean(m, QUERIES_KEYS) - mean(m, OTHERS))
        found.append(_above(words, "further", "degrees more: ", gap))
    return found


def table(result: Factors) -> list[dict[str, Any]]:
    """Every correlation of a distance with an outcome."""
    found = []
    for measure in MEASURES:
        for outcome in outcomes(result):
            one = correlation(result, measure, outcome)
            row = {"distance": measure, "outcome": outcome, "rho": one.value}
            found.append(row | {"low": one.low, "high": one.high})
    return found

"""What a way changed, against the unchanged model on the same texts and with the same probes.

Differences are of logarithms, so an effect is a factor. On one text it has an error: of an eigenvalue the
residuals, of the bulk the interval over paired probes and what the last Lanczos steps still moved. Over texts
it has a 95 % interval of its own, which holds the differences between texts: the first says what is noise of
the probes, the second what holds on other texts of the kind. Texts have probes of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.studies.sinks.lines import EARLIER, Ends, Split
from curvescope.studies.sinks.ways import UNCHANGED

if TYPE_CHECKING:
    from curvescope.studies.sinks.study import Sinks

Quantity = Literal["lambda_max", "lambda_min", "ggn_lambda_max", "bulk_width", "outliers", "stretch"]
QUANTITIES: dict[Quantity, str] = {
    "lambda_max": "λ_max of H",
    "bulk_width": "bulk width of H",
    "outliers": "outliers of H",
    "stretch": "stretch of H: λ_max / bulk width",
    "ggn_lambda_max": "λ_max of the GGN",
    "lambda_min": "λ_min of H",
}


class Effect(NamedTuple):
    """Factors against the unchanged model."""

    texts: np.ndarray  # (X,)
    errors: np.ndarray  # (X,) relative: a factor is within texts · exp(± error)
    mean: float  # geometric
    low: float  # ends of the 95 % interval over texts; nan for one text
    high: float

    @property
    def direction(self) -> int:
        """1: more, −1: less; 0: neither is sure.

        Sure is what the interval over texts says, or every text beyond its own error.
        """
        logs = np.log(self.texts)
        more = self.low > 1 or (logs > self.errors).all()
        less = self.high < 1 or (-logs > self.errors).all()
        return int(more) - int(less)


def effect(result: Sinks, name: str, quantity: Quantity) -> Effect:
    """Of a way at a strength, by the name of its measurement."""
    before, after = _logs(result, UNCHANGED, quantity), _logs(result, name, quantity)
    change = after[0] - before[0]  # (X, P), or (X, 1)
    errors = after[1] + before[1] + _noise(change) + _unsettled(result, name, quantity)
    errors = errors * (name != UNCHANGED)  # against itself
    logs = change.mean(1)
    mean, low, high = interval(logs)
    return Effect(np.exp(logs), errors, float(np.exp(mean)), float(np.exp(low)), float(np.exp(high)))


def interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95 % interval by Student's t; not known from one sample."""
    mean, count = float(samples.mean()), len(samples)
    if count < 2:
        return mean, float("nan"), float("nan")
    half = student(count - 1) * float(samples.std(ddof=1)) / np.sqrt(count)
    return mean, mean - half, mean + half


def thresholds(result: Sinks) -> np.ndarray:
    """τ of every text (X,): a share of the unchanged model's largest |λ|."""
    ends = result.moved[UNCHANGED].hessian.ends()
    return result.threshold * np.maximum(np.abs(ends.top), np.abs(ends.bottom))


def ends(result: Sinks, name: str) -> Ends:
    """Of the Hessian."""
    return result.moved[name].hessian.ends()


def ggn_ends(result: Sinks, name: str) -> Ends:
    """Of the GGN; its lower end is zero, which few steps do not find."""
    return result.moved[name].ggn.ends()


def split(result: Sinks, name: str, *, earlier: int = 0) -> Split:
    """Bulk and outliers of the Hessian, (X, P) each."""
    return result.moved[name].hessian.split(thresholds(result), earlier=earlier)


def _logs(result: Sinks, name: str, quantity: Quantity) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms (X, P) or (X, 1), and relative errors that are no noise of probes (X,)."""
    if quantity in ("bulk_width", "outliers"):
        found = _of_split(split(result, name), quantity)
        return np.log(found), np.zeros(len(found))
    if quantity == "stretch":
        top, error = _logs(result, name, "lambda_max")
        return top - _logs(result, name, "bulk_width")[0], error
    found = ggn_ends(result, name) if quantity == "ggn_lambda_max" else ends(result, name)
    lower = quantity == "lambda_min"
    values, errors = (-found.bottom, found.bottom_error) if lower else (found.top, found.top_error)
    with np.errstate(invalid="ignore", divide="ignore"):  # an end that is not there has no logarithm
        return np.log(values)[:, None], errors / np.abs(values)


def _of_split(found: Split, quantity: Quantity) -> np.ndarray:
    return found.width if quantity in ("bulk_width", "stretch") else found.outliers


def _noise(change: np.ndarray) -> np.ndarray:
    """Half the 95 % interval of the mean over paired probes (X,); zero for what has no probes."""
    count = change.shape[1]
    if count < 2:
        return np.zeros(len(change))
    return student(count - 1) * change.std(axis=1, ddof=1) / np.sqrt(count)


def _unsettled(result: Sinks, name: str, quantity: Quantity) -> np.ndarray:
    """How much the last steps moved the change of bulk or outliers (X,)."""
    if quantity not in ("bulk_width", "outliers", "stretch"):
        return np.zeros(len(result.moved[name].loss))
    changes = [
        np.log(_of_split(split(result, name, earlier=e), quantity))
        - np.log(_of_split(split(result, UNCHANGED, earlier=e), quantity))
        for e in (0, EARLIER)
    ]
    return np.abs(changes[0] - changes[1]).mean(1)

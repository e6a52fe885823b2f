"""What the checks look at: everything that was measured of one model on one set of data."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from curvescope.algorithms import Sharpness
from curvescope.studies.diagnose.checks import limits
from curvescope.studies.diagnose.measured.curvature import BlockEnds, Parts, Rows, Whole
from curvescope.studies.diagnose.measured.depth import Depth
from curvescope.studies.diagnose.measured.heads import Heads
from curvescope.studies.diagnose.measured.samples import Samples


class Seen(NamedTuple):
    """The finished measurements; what was not asked for is None."""

    whole: Whole
    rows: Rows
    parts: Parts
    samples: Samples
    heads: Heads
    depth: Depth
    sharpness: Sharpness
    blocks: BlockEnds | None = None
    learning_rate: float | None = None

    @property
    def top(self) -> float:
        """λ_max of the Hessian."""
        return float(self.whole.lines.ends().top[0])

    @property
    def learned(self) -> bool:
        """Whether the loss is below that of equal probabilities; False where that is not known."""
        return self.whole.loss < limits.LEARNED * self.whole.uniform

    @property
    def spread(self) -> float:
        """Relative standard error of λ_max over the choice of data: its spread over parts, over √K."""
        return batch_spread(self.parts)[0] / math.sqrt(max(len(self.parts.top), 1))


def batch_spread(parts: Parts) -> tuple[float, float]:
    """Standard deviation of λ_max over K parts, relative to its mean, and the standard error of that.

    For normal values the error is 1/√(2 (K − 1)) of it.
    """
    count, mean = len(parts.top), float(parts.top.mean())
    if count < 2 or not mean > 0:
        return math.nan, math.nan
    value = float(parts.top.std(ddof=1)) / mean
    return value, value / math.sqrt(2 * (count - 1))


def by_layer(names: list[str], values: np.ndarray) -> dict[int, np.ndarray]:
    """Sums of columns (…, B) over the weight matrices of each layer."""
    found: dict[int, np.ndarray] = {}
    for i, name in enumerate(names):
        front, _, role = name.partition(".")
        if front[:1] == "L" and front[1:].isdigit() and role.rpartition(".")[2].startswith("W_"):
            found[int(front[1:])] = found.get(int(front[1:]), 0.0) + values[..., i]
    return dict(sorted(found.items()))

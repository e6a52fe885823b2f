"""How the exact spectrum of one-dimensional attention moves: one thing varied, everything else as it was.

Only norms and angle of w_Q and w_K matter, not their directions. Tokens and targets are independent normal
numbers; seeds are draws of them, the same at every value.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import cos, radians, sin
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.spectra import ExactSpectrum, attention_1d_outputs, attention_1d_spectrum
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.studies.exact_spectra.pairing import condition_number, pairing

if TYPE_CHECKING:
    import pandas as pd

NORM_Q, NORM_K, BOTH, ANGLE = "‖w_Q‖", "‖w_K‖", "‖w_Q‖ = ‖w_K‖", "angle"
VALUE, LENGTH, TARGET, OUTLIER = "w_V", "length", "targets", "outlier token"
BIAS, LARGE_BIAS = "first-token bias", "first-token bias, large first token"
LARGE = 4.0  # size of a large first token


class Setting(NamedTuple):
    """What is varied, with the values that everything has otherwise."""

    norm_Q: float = 2.0
    norm_K: float = 2.0
    angle: float = 60.0  # degrees between w_Q and w_K
    w_V: float = 1.0
    length: int = 16
    target: float = 1.0  # standard deviation of the targets
    outlier: float = 1.0  # what the second token is multiplied by
    bias: float = 0.0  # added to the scores of the first token
    first: float | None = None  # the first token; random where it is not given


AXES: dict[str, tuple[str, ...]] = {
    NORM_Q: ("norm_Q",),
    NORM_K: ("norm_K",),
    BOTH: ("norm_Q", "norm_K"),
    ANGLE: ("angle",),
    VALUE: ("w_V",),
    LENGTH: ("length",),
    TARGET: ("target",),
    OUTLIER: ("outlier",),
    BIAS: ("bias",),
    LARGE_BIAS: ("bias",),
}
VALUES: dict[str, tuple[float, ...]] = {
    NORM_Q: tuple(np.geomspace(0.02, 200, 13)),
    NORM_K: tuple(np.geomspace(0.02, 200, 13)),
    BOTH: tuple(np.geomspace(0.02, 20, 13)),
    ANGLE: tuple(np.linspace(0, 180, 13)),
    VALUE: tuple(np.geomspace(0.01, 100, 13)),
    LENGTH: (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128),
    TARGET: tuple(np.geomspace(0.01, 100, 13)),
    OUTLIER: tuple(np.geomspace(1, 100, 13)),
    BIAS: tuple(np.linspace(0, 12, 13)),
    LARGE_BIAS: tuple(np.linspace(0, 12, 13)),
}


@dataclass(frozen=True)
class Sweeps(Result):
    """Columns: a row is one value of what is varied, with one draw of tokens and targets."""

    varied: list[str]
    value: np.ndarray
    seed: np.ndarray
    bulk: np.ndarray  # |b|
    outlier_low: np.ndarray
    outlier_mid: np.ndarray
    outlier_high: np.ndarray
    ggn_lambda_max: np.ndarray
    condition: np.ndarray  # max |λ| / min |λ| over eigenvalues that are not zero
    pairing: np.ndarray  # of the three outliers
    first_mass: np.ndarray  # mean attention on the first token
    loss: np.ndarray

    @property
    def size(self) -> np.ndarray:
        """The largest |outlier|."""
        return np.maximum(np.abs(self.outlier_low), np.abs(self.outlier_high))

    def of(self, varied: str) -> Sweeps:
        """The rows of one thing that is varied."""
        return self._at(np.array(self.varied) == varied)

    def medians(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Values of what is varied, and the median of a column over seeds at each."""
        column, values = getattr(self, name), np.unique(self.value)
        return values, np.array([np.median(column[self.value == one]) for one in values])

    def _at(self, keep: np.ndarray) -> Sweeps:
        index = np.flatnonzero(keep)
        taken: dict[str, Any] = {
            name: column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]
            for name, column in self._columns().items()
        }
        return Sweeps(**taken)

    def _columns(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_frame(self) -> pd.DataFrame:
        """One row per value and seed."""
        import pandas as pd

        return pd.DataFrame(self._columns())


def sweep(varied: str, *, d_K: int, seeds: range) -> Sweeps:
    """One thing varied over its values, for each seed."""
    rows = []
    for value in VALUES[varied]:
        one = Setting(first=LARGE if varied == LARGE_BIAS else None)
        one = one._replace(**dict.fromkeys(AXES[varied], value))
        rows += [(value, seed, *_measured(one, d_K, seed)) for seed in seeds]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Sweeps([varied] * len(rows), *columns)


def joined(parts: list[Sweeps]) -> Sweeps:
    """All rows, in order."""
    names = [name for part in parts for name in part.varied]
    columns = [f.name for f in fields(Sweeps)][1:]
    return Sweeps(names, *(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def _measured(one: Setting, d_K: int, seed: int) -> tuple[float, ...]:
    """The columns of one row, after value and seed."""
    source, L = generator(seed, 2), int(one.length)
    x, y = (torch.randn(128, generator=source, dtype=torch.float64)[:L] for _ in range(2))
    x = x * torch.where(torch.arange(L) == 1, one.outlier, 1.0)
    x = x if one.first is None else torch.where(torch.arange(L) == 0, one.first, x)
    w_Q, w_K, w_V = _weights(one, d_K)
    bias = torch.where(torch.arange(L) == 0, one.bias, 0.0).double()
    f = attention_1d_outputs(x, w_Q, w_K, w_V, score_bias=bias)
    H, ggn = (
        attention_1d_spectrum(x, w_Q, w_K, w_V, targets=one.target * y, score_bias=bias, part=part)
        for part in ("hessian", "ggn")
    )
    scores = (w_Q @ w_K) / d_K**0.5 * torch.outer(x, x) + bias
    mass = float(torch.softmax(scores, 1)[:, 0].mean())
    return (*_of_spectrum(H, ggn), mass, float((f - one.target * y).square().mean()))


def _of_spectrum(H: ExactSpectrum, ggn: ExactSpectrum) -> tuple[float, ...]:
    values = (abs(H.bulk[0]), *H.outliers, ggn.eigenvalues[-1])
    return (*map(float, values), condition_number(H.eigenvalues), pairing(H.outliers))


def _weights(one: Setting, d_K: int) -> tuple[Tensor, Tensor, Tensor]:
    """w_Q along the first axis, w_K at an angle in the plane of the first two."""
    w_Q, w_K = torch.zeros(2, d_K, dtype=torch.float64)
    w_Q[0] = one.norm_Q
    w_K[0], w_K[1] = one.norm_K * cos(radians(one.angle)), one.norm_K * sin(radians(one.angle))
    return w_Q, w_K, w_Q.new_tensor([one.w_V])

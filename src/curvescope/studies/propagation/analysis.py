"""How much of the Hessian each source is: traces, norms and shares from vectors that all of them see.

With H = Σ_s A_s over the GGN and the sources of the functional Hessian, ‖H‖² = Σ_s ⟨A_s, H⟩, so that

    share of s = ⟨A_s, H⟩ / ‖H‖²,    Σ_s share = 1.

A share is negative where a source takes away what others bring. For random signs v, E⟨A_s v, H v⟩ = ⟨A_s, H⟩,
E vᵀ A_s v = tr A_s and E‖A_s v‖² = ‖A_s‖². For a small problem v goes through all unit vectors: nothing is
estimated then. A source that is nothing but rounding, by Vᵀ A_s V, which is symmetric unless it is, is zero
up to what was found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import column_dots
from curvescope.algorithms.estimates.intervals import mean_interval, positive_interval
from curvescope.algorithms.sums import is_rounding
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import probes
from curvescope.operators import GGN, FunctionalSources, Hessian
from curvescope.problem import Problem

HESSIAN, OUTER = "H", "GGN"
TOGETHER = 2**22  # entries of vectors that are multiplied at once


@dataclass(frozen=True)
class Number:
    """An estimate, its standard error and its 95 % interval; all equal where it is exact."""

    value: float
    stderr: float
    low: float
    high: float


@dataclass(frozen=True)
class Shares(Result):
    """Samples of P vectors for H, the GGN and every source; `residual` says how well the sources add up."""

    names: list[str]  # H, GGN, then the sources
    forms: np.ndarray  # (P, S) vᵀ A_s v
    squares: np.ndarray  # (P, S) ‖A_s v‖²
    inner: np.ndarray  # (P, S) ⟨A_s v, H v⟩
    residual: float  # ‖H V − Σ A_s V‖ / ‖H V‖ of the worst of the batches V of these vectors
    exact: bool  # all unit vectors: sums over P, not means
    ends: np.ndarray | None = None  # (S, 2) λ_min and λ_max, where exact
    rounding: np.ndarray | None = None  # (S,) whether it is nothing but rounding; None in older results

    def is_zero(self, name: str) -> bool:
        """Whether H, the GGN or a source is nothing but rounding."""
        return self.rounding is not None and bool(self.rounding[self.names.index(name)])

    def trace(self, name: str) -> Number:
        """tr A_s."""
        return self._shown(name, self._trace(name), signed=True)

    def norm(self, name: str) -> Number:
        """‖A_s‖."""
        return self._shown(name, self._norm(name), signed=False)

    def _shown(self, name: str, found: Number, *, signed: bool) -> Number:
        """What was found, or zero up to it."""
        if not self.is_zero(name):
            return found
        size = float(np.nanmax(np.abs([found.value, found.low, found.high])))
        return Number(0.0, size, -size if signed else 0.0, size)

    def _trace(self, name: str) -> Number:
        samples = self.forms[:, self.names.index(name)]
        if self.exact:
            total = float(samples.sum())
            return Number(total, 0.0, total, total)
        mean, stderr = samples.mean(), samples.std(ddof=1) / np.sqrt(len(samples))
        low, high = mean_interval(np.asarray(mean), np.asarray(stderr), len(samples) - 1)
        return Number(float(mean), float(stderr), float(low), float(high))

    def _norm(self, name: str) -> Number:
        squared = self.squares[:, self.names.index(name)]
        if self.exact:
            root = float(np.sqrt(squared.sum()))
            return Number(root, 0.0, root, root)
        mean, stderr = squared.mean(), squared.std(ddof=1) / np.sqrt(len(squared))
        low, high = positive_interval(np.asarray(mean), np.asarray(stderr), len(squared) - 1)
        root = float(np.sqrt(mean))
        error = float(stderr) / (2 * root) if root else 0.0
        return Number(root, error, float(np.sqrt(low)), float(np.sqrt(high)))

    def share(self, *names: str) -> Number:
        """⟨A_s, H⟩ / ‖H‖² of these together, its error by leaving out one vector after the other."""
        chosen = [self.names.index(name) for name in names if not self.is_zero(name)]
        top, bottom = self.inner[:, chosen].sum(axis=1), self.squares[:, self.names.index(HESSIAN)]
        value = float(top.sum() / bottom.sum()) if bottom.sum() else 0.0
        count = len(top)
        if self.exact or count < 2 or not bottom.sum():
            return Number(value, 0.0 if self.exact else np.nan, *(2 * [value if self.exact else np.nan]))
        without = (top.sum() - top) / (bottom.sum() - bottom)
        stderr = float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))
        low, high = mean_interval(np.asarray(value), np.asarray(stderr), count - 1)
        return Number(value, stderr, float(low), float(high))


def measure_shares(problem: Problem, *, num_probes: int, max_exact: int, seed: int) -> Shares:
    """Products of H, the GGN and all sources with the same vectors."""
    H, G, S = Hessian(problem), GGN(problem), FunctionalSources(problem)
    n, names = H.shape[0], [HESSIAN, OUTER, *S]
    exact = n <= max_exact
    count, width = (n, n) if exact else (num_probes, max(1, TOGETHER // n))
    kind = {"dtype": problem.dtype, "device": problem.device}
    sums: list[np.ndarray] = []
    uneven = np.zeros((2, len(names)))
    residual, ends = 0.0, None
    for first in track(range(0, count, width), "shares"):
        some = min(width, count - first)
        V = torch.eye(n, **kind) if exact else probes(n, some, first=first, seed=seed, **kind)
        products = [H @ V, G @ V, *S.products(V).values()]
        sums.append(_sums(V, products))
        residual = max(residual, _residual(products))
        uneven += np.array([_uneven(V, A) for A in products]).T
        ends = np.array([_ends(A) for A in products]) if exact else None
    forms, squares, inner = np.concatenate(sums, axis=1)
    rounding = np.array([is_rounding(np.array([size]), lost) for lost, size in np.sqrt(uneven.T)])
    if ends is not None:
        ends[rounding] = 0.0
    return Shares(names, forms, squares, inner, residual, exact, ends, rounding)


def _sums(V: Tensor, products: list[Tensor]) -> np.ndarray:
    """vᵀ A v, ‖A v‖² and ⟨A v, H v⟩ for every column v and every A, H the first: (3, columns, A)."""
    found = [
        torch.stack([column_dots(V, AV), column_dots(AV, AV), column_dots(products[0], AV)])
        for AV in products
    ]
    return torch.stack(found, dim=-1).double().cpu().numpy()


def _uneven(V: Tensor, AV: Tensor) -> tuple[float, float]:
    """Squares of ‖K − Kᵀ‖ / 2 and ‖K‖ of K = Vᵀ A V."""
    K = (V.T @ AV).double()
    return float(((K - K.T) / 2).square().sum()), float(K.square().sum())


def _residual(products: list[Tensor]) -> float:
    """‖H V − Σ A V‖ / ‖H V‖, H the first."""
    rest = products[0].double()
    size = float(rest.norm())
    for AV in products[1:]:
        rest = rest - AV
    return float(rest.norm()) / size if size else 0.0


def _ends(A: Tensor) -> tuple[float, float]:
    values = torch.linalg.eigvalsh((A + A.T).double() / 2)
    return float(values[0]), float(values[-1])

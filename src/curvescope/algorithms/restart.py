"""Search for extreme eigenpairs: Lanczos with full reorthogonalisation, thick restarts and locking.

A sweep runs Lanczos from a random vector, orthogonal to the eigenvectors locked so far, and restarts from
its best Ritz vectors whenever the basis is full. When what it wants has converged, it locks those vectors
and another sweep looks for something better outside them. One Krylov space holds one copy of a repeated
eigenvalue, so copies come one sweep at a time. The search ends when a sweep has found nothing better and
it is improbable that it overlooked something.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import norms, summing_dtype, to_numpy
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import track
from curvescope.core.seeds import probes

Which = Literal["LA", "SA", "LM", "BE"]

MISSED = 1e-3  # accepted probability that the last sweep overlooked an eigenvalue
SHORTEST = 30  # products of a last sweep that is judged by its length
SAFETY = 0.3  # of the tolerance, for residuals that are estimated
BREAKDOWN = 50.0  # roundings
CHUNK = 2**20  # columns of the basis rotated at once


def choose(values: np.ndarray, k: int, which: Which, bonus: np.ndarray | float = 0.0) -> np.ndarray:
    """Positions of the k wanted values, best first; `bonus` counts in favour of a value.

    BE takes ⌈k/2⌉ from the high end and ⌊k/2⌋ from the low end.
    """
    high = np.argsort(-(values + bonus), kind="stable")
    low = np.argsort(values - bonus, kind="stable")
    if which == "LA":
        return high[:k]
    if which == "SA":
        return low[:k]
    if which == "LM":
        return np.argsort(-(np.abs(values) + bonus), kind="stable")[:k]
    top = high[: k - k // 2]
    return np.concatenate([top, low[~np.isin(low, top)][: k // 2]])


def thresholds(values: np.ndarray, which: Which) -> list[tuple[int, float]]:
    """What an eigenvalue must exceed to displace one of `values`: (1, t) if λ > t, (−1, t) if −λ > t."""
    if which == "LA":
        return [(1, values.min())]
    if which == "SA":
        return [(-1, (-values).min())]
    if which == "LM":
        return [(1, np.abs(values).min()), (-1, np.abs(values).min())]
    ascending = np.sort(values)
    low, high = ascending[: len(values) // 2], ascending[len(values) // 2 :]
    return [(1, high.min())] + ([(-1, (-low).min())] if len(low) else [])


def rotate(rows: Tensor, S: np.ndarray) -> None:
    """Overwrite the first p rows of a basis (m, n) by Sᵀ rows for S (m, p), without a second copy of it."""
    R = torch.as_tensor(np.ascontiguousarray(S.T)).to(rows.dtype).to(rows.device)
    for start in range(0, rows.shape[1], CHUNK):
        part = rows[:, start : start + CHUNK]
        part[: R.shape[0]] = R @ part


def gram(rows: Tensor, others: Tensor) -> np.ndarray:
    """rows @ othersᵀ for (k, n) and (k, n) in float64, some columns at a time.

    A float32 product of long rows is wrong by 2e-4 when their entries differ much in size.
    """
    total = np.zeros((rows.shape[0], others.shape[0]))
    wide = summing_dtype(rows.device)
    for start in range(0, rows.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        total += to_numpy(rows[:, part].to(wide) @ others[:, part].to(wide).T)
    return total


class Search:
    """State of one search. `rows` holds the locked vectors, the basis of the sweep, and the next vector."""

    def __init__(
        self,
        op: LinearOperator,
        *,
        k: int,
        which: Which,
        tol: float,
        max_basis: int,
        max_products: int,
        seed: int,
        v0: Tensor | None = None,
    ):
        self.op, self.n, self.k = op, op.shape[0], k
        self.which: Which = which
        self.tol, self.max_basis, self.max_products = tol, min(max_basis, self.n), max_products
        self.seed, self.v0 = seed, v0
        options = {"dtype": op.dtype, "device": op.device}
        self.rows = torch.empty(self.max_basis + 1, self.n, **options)
        self.H = torch.zeros(self.max_basis, self.max_basis, **options)  # upper triangle of the projection
        self.beta = torch.zeros(self.max_basis, **options)
        self.locked = np.zeros(0)  # Ritz values of the locked vectors
        self.scale, self.products, self.sweeps, self.longest = 0.0, 0, 0, 0
        self.verified = False
        self._begin()

    def run(self) -> None:
        """Search until nothing better is found or the products are used up."""
        for _ in track(range(self.max_products), "eigenpairs"):
            self._step()
            if self._check_is_due() and self._check():
                return

    def _begin(self) -> None:
        """Start a sweep from a random vector outside the locked ones."""
        if self.sweeps == 0 and self.v0 is not None:
            v = self.v0.clone()
        else:
            options = {"dtype": self.op.dtype, "device": self.op.device}
            v = probes(self.n, 1, seed=self.seed, first=self.sweeps, kind="gaussian", **options)[:, 0]
        locked = self.rows[: len(self.locked)]
        for _ in range(2):
            v = v - locked.T @ (locked @ v)
            v = v / norms(v)
        self.rows[len(self.locked)] = v
        self.count, self.kept, self.began = 0, 0, self.products
        self.sweeps += 1

    def _step(self) -> None:
        """One product: a new column of the projection and the next basis vector."""
        last = len(self.locked) + self.count
        basis = self.rows[: last + 1]
        w = self.op @ self.rows[last]
        first_pass = basis @ w
        w = torch.addmv(w, basis.T, first_pass, alpha=-1)
        second_pass = basis @ w
        w = torch.addmv(w, basis.T, second_pass, alpha=-1)
        self.H[: self.count + 1, self.count] = (first_pass + second_pass)[len(self.locked) :]
        self.beta[self.count] = norms(w)
        tiny = torch.finfo(w.dtype).tiny
        self.rows[last + 1] = w / self.beta[self.count].clamp_min(tiny)
        self.count += 1
        self.products += 1

    @property
    def _full(self) -> bool:
        return len(self.locked) + self.count == self.max_basis

    def _check_is_due(self) -> bool:
        """Reading the projection waits for the device, so it is done after 1, 2, 4, 8, 16, 24, … steps."""
        new = self.count - self.kept
        return self._full or self.products == self.max_products or new in (1, 2, 4) or new % 8 == 0

    def _check(self) -> bool:
        """Decide what to do with the sweep; True when the search is over."""
        theta, S, residual, exhausted = self._ritz()
        found = self._wanted(theta)
        enough = len(self.locked) + self.count >= self.k
        settled = enough and len(found) and bool((residual[found] <= SAFETY * self.tol * self.scale).all())
        spent = self.products == self.max_products
        if exhausted or settled or spent:
            self._lock(found, theta, S)
            if settled and not (self.sweeps == 1 and self.v0 is not None):
                self.longest = max(self.longest, self.products - self.began)
            self.verified = (exhausted and not len(found)) or len(self.locked) == self.n
            if not (self.verified or spent):
                self._begin()
            return self.verified or spent
        if not len(found) and self._nothing_missed(theta, residual):
            self.verified = True
            return True
        if self._full:
            self._restart(theta, S)
        return False

    def _ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Ritz values and vectors of the sweep, their residuals, and whether its Krylov space is exhausted.

        The residual of a Ritz vector V s is β |s_m|. A small β inside the basis ends it there.
        """
        H, beta = to_numpy(self.H[: self.count, : self.count]), to_numpy(self.beta[: self.count])
        if not (np.isfinite(H).all() and np.isfinite(beta).all()):
            raise CurvescopeError(
                "a product of the operator is not finite", hint="look for nan or inf in op @ v"
            )
        size = max(self.scale, np.abs(H).max(), beta[self.kept :].max())
        small = max(0.1 * SAFETY * self.tol, BREAKDOWN * torch.finfo(self.op.dtype).eps) * size
        ended = np.flatnonzero(beta[self.kept :] <= small)
        if len(ended):
            self.count = self.kept + int(ended[0]) + 1
        H = np.triu(H[: self.count, : self.count])
        theta, S = np.linalg.eigh(H + np.triu(H, 1).T)
        self.scale = max(self.scale, float(np.abs(theta).max()))
        exhausted = len(ended) > 0 or len(self.locked) + self.count == self.n
        return theta, S, beta[self.count - 1] * np.abs(S[-1]), exhausted

    def _wanted(self, theta: np.ndarray) -> np.ndarray:
        """Positions of the Ritz values that belong to the k best, locked ones included; ties stay locked."""
        bonus = np.zeros(len(self.locked) + len(theta))
        bonus[: len(self.locked)] = self.tol * self.scale
        best = choose(np.concatenate([self.locked, theta]), self.k, self.which, bonus)
        return best[best >= len(self.locked)] - len(self.locked)

    def _lock(self, found: np.ndarray, theta: np.ndarray, S: np.ndarray) -> None:
        """Move the found Ritz vectors to the locked ones and let go of those that they displace."""
        before = len(self.locked)
        rotate(self.rows[before : before + self.count], S[:, found])
        values = np.concatenate([self.locked, theta[found]])
        bonus = np.where(np.arange(len(values)) < before, self.tol * self.scale, 0.0)
        stay = np.sort(choose(values, self.k, self.which, bonus))
        for place, source in enumerate(stay):
            if place != source:
                self.rows[place] = self.rows[int(source)]
        self.locked = values[stay]

    def _restart(self, theta: np.ndarray, S: np.ndarray) -> None:
        """Keep the wanted Ritz vectors, half of the others, and the vector the sweep would go on with."""
        first, room = len(self.locked), self.count
        wanted = max(1, self.k - first)
        keep = choose(theta, min(room - 2, wanted + (room - wanted) // 2), self.which)
        rotate(self.rows[first : first + room], S[:, keep])
        self.rows[first + len(keep)] = self.rows[first + room]
        self.H.zero_()
        self.H.diagonal()[: len(keep)] = torch.as_tensor(theta[keep]).to(self.H.dtype).to(self.H.device)
        self.count = self.kept = len(keep)

    def _nothing_missed(self, theta: np.ndarray, residual: np.ndarray) -> bool:
        """Whether a sweep that found nothing better shows that nothing better is there.

        It does when, at each end that matters, the outermost Ritz value has converged; or when an
        eigenvalue above the threshold t would have shown by now: after j steps from a random vector the
        probability that the largest Ritz value stays ε (t − λ_min) below t is at most
        1.648 √n exp(−√ε (2j − 1)) (Kuczyński and Woźniakowski 1992, theorem 4.2); or when the sweep has
        had as many products as the longest sweep that found something.
        """
        if self.longest and self.products - self.began >= max(self.longest, SHORTEST):
            return True
        steps = self.count if self.kept == 0 else 0
        margin = self.tol * self.scale
        for sign, threshold in thresholds(self.locked, self.which):
            ends = sign * theta
            if residual[ends.argmax()] <= SAFETY * margin:
                continue
            span = threshold + margin - ends.min()
            gap = (threshold + margin - ends.max()) / span if span > 0 else 0.0
            if 1.648 * math.sqrt(self.n) * math.exp(-math.sqrt(max(gap, 0.0)) * (2 * steps - 1)) > MISSED:
                return False
        return True

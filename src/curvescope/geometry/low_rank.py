"""Low-rank matrices A Bᵀ that are never multiplied out: singular triples, eigenvalues, norms.

A and B are d × h and e × h with h small. QR of both and the SVD of the h × h core R_A R_Bᵀ give the singular
triples of A Bᵀ; its eigenvalues other than 0 are those of the h × h matrix Bᵀ A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError


@dataclass(frozen=True, eq=False)
class Factored:
    """The matrix A Bᵀ (d, e). `noise`, the relative precision of the entries, decides what is zero."""

    A: Tensor  # (d, h)
    B: Tensor  # (e, h)
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.A.dim() != 2 or self.B.dim() != 2 or self.A.shape[1] != self.B.shape[1]:
            raise ShapeError(
                f"expected factors (d, h) and (e, h), got {tuple(self.A.shape)} and {tuple(self.B.shape)}",
                hint="the matrix is A @ B.T",
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(d, e)."""
        return self.A.shape[0], self.B.shape[0]

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        return low_rank_svd(self.A[None], self.B[None], noise=self.noise)[0]

    @property
    def singular_values(self) -> Tensor:
        """Non-zero singular values in descending order: (r,), r ≤ h."""
        return self._svd[1]

    @property
    def left(self) -> Tensor:
        """Left singular vectors as columns (d, r)."""
        return self._svd[0]

    @property
    def right(self) -> Tensor:
        """Right singular vectors as columns (e, r): the matrix is left diag(s) rightᵀ."""
        return self._svd[2]

    @property
    def rank(self) -> int:
        """Number of singular values that are not zero to working precision."""
        return len(self.singular_values)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of a square A Bᵀ, from the h × h matrix Bᵀ A: complex (h,), largest first.

        The others, d − h of them, are 0.
        """
        if self.shape[0] != self.shape[1]:
            raise ShapeError(f"expected a square matrix, got {self.shape}")
        values = torch.linalg.eigvals(self.B.T @ self.A)
        return values[values.abs().argsort(descending=True, stable=True)]

    @property
    def frobenius(self) -> float:
        """√Σ s²."""
        return float(self.singular_values.norm())

    @property
    def energy_share(self) -> Tensor:
        """s²/Σ s²: (r,)."""
        square = self.singular_values.square()
        return square / square.sum()

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of s²/Σ s²: r for equal singular values, 1 for a single one, 0 for none."""
        p = self.energy_share
        return float(torch.exp(-torch.special.xlogy(p, p).sum())) if len(p) else 0.0

    def coverage(self, *, energy: bool = True) -> Tensor:
        """Share of the first 1, …, r singular values in the sum of s² (of s without `energy`): (r,)."""
        size = self.singular_values.square() if energy else self.singular_values
        return size.cumsum(0) / size.sum()

    def num_for(self, share: float, *, energy: bool = True) -> int:
        """Number of leading singular values that reach a share of their sum."""
        if not 0 < share <= 1:
            raise UsageError(f"expected a share above 0 and at most 1, got {share}")
        reached = self.coverage(energy=energy) >= share * (1 - 1e-12)
        return int((~reached).sum()) + 1 if self.rank else 0

    def to_dense(self) -> Tensor:
        """A Bᵀ multiplied out: (d, e). For tests and small matrices."""
        return self.A @ self.B.T

    def __matmul__(self, other: Factored) -> Factored:
        """The product of two: A (Bᵀ A′) B′ᵀ, with the smaller of the two inner sizes."""
        if self.shape[1] != other.shape[0]:
            raise ShapeError(f"expected {self.shape[1]} rows on the right, got {other.shape[0]}")
        core, noise = self.B.T @ other.A, max(self.noise, other.noise)
        if core.shape[0] < core.shape[1]:
            return Factored(self.A, other.B @ core.T, noise)
        return Factored(self.A @ core, other.B, noise)

    @property
    def T(self) -> Factored:
        """The transposed matrix, B Aᵀ."""
        return Factored(self.B, self.A, self.noise)


def low_rank_svd(A: Tensor, B: Tensor, *, noise: float = 0.0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return singular triples (U, s, V) of every A Bᵀ of a batch, without numerically zero directions.

    A singular value counts as zero if it is below (max(d, e, h) ε + 4 `noise`) |A|₂ |B|₂, which rounding of
    the factors alone can cause.

    Args:
        A, B: (n, d, h) and (n, e, h), in float64.
        noise: relative precision of the entries, such as 1e-7 for weights in float32.
    """
    Q_A, R_A = torch.linalg.qr(A)
    Q_B, R_B = torch.linalg.qr(B)
    U, s, Vh = torch.linalg.svd(R_A @ R_B.transpose(-1, -2))
    size = torch.linalg.matrix_norm(R_A, 2) * torch.linalg.matrix_norm(R_B, 2)
    precision = max(*A.shape[1:], B.shape[1]) * torch.finfo(A.dtype).eps + 4 * noise
    triples = []
    for i in range(len(A)):
        r = int((s[i] > precision * size[i]).sum())
        triples.append((Q_A[i] @ U[i][:, :r], s[i, :r], Q_B[i] @ Vh[i][:r].T))
    return triples


def factor_all(pairs: Sequence[tuple[Tensor, Tensor]], *, noise: float = 0.0) -> list[Factored]:
    """Return `Factored` for each (A, B) with its SVD computed; pairs of equal shape form one batch."""
    matrices = [Factored(A, B, noise) for A, B in pairs]
    groups: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for i, (A, B) in enumerate(pairs):
        groups.setdefault((A.shape, B.shape), []).append(i)
    for members in groups.values():
        A, B = (torch.stack([pairs[i][side] for i in members]) for side in (0, 1))
        for i, triple in zip(members, low_rank_svd(A, B, noise=noise), strict=True):
            matrices[i].__dict__["_svd"] = triple  # fills the cached property
    return matrices

"""Certified bounds on the norms of Σ_i u_i u_iᵀ ⊗ C_i and Σ_i (u_i ⊗ I) N_i (w_i ⊗ I)ᵀ.

Blocks of attention and feed-forward Hessians are such sums over queries (tokens). The functions do not form
the sums. They return the smallest of several valid bounds, widened by `ROUNDING` to stay valid after
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.closed_form.attention.core import CorePoint, core_point
from curvescope.closed_form.attention.layer import check_loss, check_weights
from curvescope.core.errors import ShapeError, UsageError


@dataclass(frozen=True)
class HeadInputs:
    """Tokens and weights of one softmax head F = softmax(s X W_Q W_Kᵀ Xᵀ) X W_V, in float64."""

    X: Tensor  # (L, d), or (n, L, d) for a batch
    W_Q: Tensor  # (d, d_K)
    W_K: Tensor  # (d, d_K)
    W_V: Tensor  # (d, d_V)
    scale: float  # s
    mask: Tensor | None = None  # (L, L), True if a query may attend to a key; or numbers added to the scores

    def core(self) -> CorePoint:
        """Evaluate attention with the tokens themselves as values."""
        boolean = self.mask is not None and self.mask.dtype == torch.bool
        hidden, bias = (self.mask, None) if boolean else (None, self.mask)
        q, k = self.X @ self.W_Q, self.X @ self.W_K
        return core_point(q, k, self.X, scale=self.scale, mask=hidden, bias=bias)

    def check(self, G: Tensor) -> None:
        """Raise unless everything is finite and fits together and to the gradient G (…, L, d_V)."""
        if self.X.ndim not in (2, 3):
            raise ShapeError(f"expected X of shape (L, d) or (n, L, d), got {tuple(self.X.shape)}")
        named = {"Q": self.W_Q, "K": self.W_K, "V": self.W_V}
        X, G = (tensor if self.X.ndim == 3 else tensor[None] for tensor in (self.X, G))
        check_weights(X, X, X, named, 1, 1)
        check_loss(X, named, G, 0.0)
        for name, tensor in (("X", X), *named.items(), ("G", G)):
            if not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"expected finite numbers in {name}, got inf or nan")


def head_inputs(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> HeadInputs:
    """Return the inputs in float64; s is 1/√d_K unless given."""
    s = W_Q.shape[1] ** -0.5 if scale is None else scale
    return HeadInputs(X.double(), W_Q.double(), W_K.double(), W_V.double(), s, mask)


ROUNDING = 1e-12  # relative widening of a bound
POWERS = (0.25, 0.5, 0.75, 1.0)  # exponents of the weighted family
_FLOOR = 1e-8  # relative: added to a weight matrix so that its negative powers exist
_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class SeparableVector:
    """A unit vector a ⊗ c and its value |Σ_i (a·u_i)² cᵀC_i c|, which is a lower bound."""

    value: Tensor
    a: Tensor
    c: Tensor


def spectral_norm(A: Tensor) -> Tensor:
    """Return the largest singular value of each matrix; zero for an empty matrix."""
    return torch.linalg.matrix_norm(A, ord=2) if A.numel() else A.new_zeros(A.shape[:-2])


def symmetric_sum_bound(U: Tensor, C: Tensor) -> Tensor:
    """Return an upper bound on ‖Σ_i u_i u_iᵀ ⊗ C_i‖₂, C_i symmetric; U (n, a), C (n, c, c).

    It is the least of the norms of R = Σ‖C_i‖ u_i u_iᵀ and S = Σ|u_i|²|C_i|, the Frobenius norm, and the
    weighted family ‖S‖ᵖ ‖Σ μ_i u_i u_iᵀ‖, μ_i = ‖S^{−p/2}|C_i|S^{−p/2}‖, and ‖R‖ᵖ ‖Σ ν_i |C_i|‖,
    ν_i = u_iᵀ R^{−p} u_i. |C| is the matrix absolute value.
    """
    U, C, scale = _normalized(U, C)
    if scale == 0:
        return scale
    values, vectors = torch.linalg.eigh(C)
    size = (vectors * values.abs()[:, None]) @ vectors.mT
    best = torch.minimum(_positive_sum_bound(U, size, values.abs().amax(1)), _frobenius(U, U, C))
    return best * scale * (1 + ROUNDING)


def rectangular_sum_bound(U: Tensor, N: Tensor, W: Tensor) -> Tensor:
    """Return an upper bound on ‖Σ_i (u_i ⊗ I) N_i (w_i ⊗ I)ᵀ‖₂; U (n, a), N (n, c, b), W (n, e).

    With the singular values split over both sides it is at most
    √(‖Σ t_i u_i u_iᵀ ⊗ |N_iᵀ|‖ ‖Σ t_i⁻¹ w_i w_iᵀ ⊗ |N_i|‖) for any t_i > 0, here t_i = |w_i|/|u_i|; and at
    most its Frobenius norm.
    """
    lengths = torch.linalg.vector_norm(U, dim=1) * torch.linalg.vector_norm(W, dim=1)
    N, scale = _scaled(N * lengths[:, None, None])
    if scale == 0:
        return scale
    U, W = unit_rows(U), unit_rows(W)
    left, sizes, right = torch.linalg.svd(N, full_matrices=False)
    top = sizes[:, 0]
    rows = _positive_sum_bound(U, (left * sizes[:, None]) @ left.mT, top)
    columns = _positive_sum_bound(W, (right.mT * sizes[:, None]) @ right, top)
    best = torch.minimum((rows * columns).sqrt(), _frobenius(U, W, N))
    return best * scale * (1 + ROUNDING)


def joint_sum_bound(U: Tensor, N: Tensor) -> Tensor:
    """Return an upper bound on ‖Σ_i (u_i ⊗ I) N_i‖₂: `rectangular_sum_bound` with w_i = 1, N_i (n, c, b).

    For wide N_i, the norm of Σ|N_i| is computed from the smaller Gram matrix of its factor.
    """
    N, scale = _scaled(N * torch.linalg.vector_norm(U, dim=1)[:, None, None])
    if scale == 0:
        return scale
    U = unit_rows(U)
    left, sizes, right = torch.linalg.svd(N, full_matrices=False)
    rows = _positive_sum_bound(U, (left * sizes[:, None]) @ left.mT, sizes[:, 0])
    factor = (right * sizes.sqrt()[:, :, None]).flatten(0, 1)
    gram = factor @ factor.mT if factor.shape[0] <= factor.shape[1] else factor.mT @ factor
    best = torch.minimum((rows * _largest(gram)).sqrt(), _frobenius(U, torch.ones_like(U[:, :1]), N))
    return best * scale * (1 + ROUNDING)


def separable_rayleigh(U: Tensor, C: Tensor, *, num_steps: int = 4) -> SeparableVector:
    """Return the lower bound max |Σ_i (a·u_i)² cᵀC_i c| over unit a, c, by alternating eigenproblems.

    The iteration starts from every eigenvector of R = Σ‖C_i‖ u_i u_iᵀ, because a single start can stop at a
    poor local maximum if the C_i are indefinite.
    """
    sizes = torch.linalg.matrix_norm(C, ord=2)
    a = torch.linalg.eigh((U * sizes[:, None]).mT @ U).eigenvectors.mT
    c, values_of_starts = a.new_zeros(len(a), C.shape[1]), a.new_zeros(len(a))
    for _ in range(num_steps):
        weights = (a @ U.mT) ** 2
        values, vectors = torch.linalg.eigh(torch.tensordot(weights, C, 1))
        c = _extreme(values, vectors)[1]
        weights = torch.einsum("kc,ice,ke->ki", c, C, c)
        values, vectors = torch.linalg.eigh(torch.einsum("ki,ia,ib->kab", weights, U, U))
        values_of_starts, a = _extreme(values, vectors)
    best = int(values_of_starts.argmax())
    return SeparableVector(values_of_starts[best], a[best], c[best])


def _extreme(values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest |eigenvalue| of each matrix and its eigenvector."""
    largest = values.abs().argmax(1)
    rows = torch.arange(len(values), device=values.device)
    return values.abs()[rows, largest], vectors[rows, :, largest]


def _positive_sum_bound(U: Tensor, C: Tensor, norms: Tensor) -> Tensor:
    """Return an upper bound on ‖Σ u_i u_iᵀ ⊗ C_i‖₂ for C_i ⪰ 0 with the given norms."""
    R = (U * norms[:, None]).mT @ U
    S = torch.tensordot((U * U).sum(1), C, 1)
    powers = U.new_tensor(POWERS)
    s, basis = _weights(S)
    half = s ** (-powers[:, None] / 2)  # (p, c)
    inner = basis.mT @ C @ basis
    mu = _largest(half[:, None, :, None] * inner * half[:, None, None, :])  # (p, n)
    mu = mu + 8 * len(s) * _EPS * norms * s[0] ** -powers[:, None]
    by_rows = s[-1] ** powers * _largest(torch.einsum("pi,ia,ib->pab", mu, U, U))
    r, basis = _weights(R)
    nu = ((U @ basis) ** 2 @ (r ** -powers[:, None]).mT).mT  # (p, n)
    nu = nu + 8 * len(r) * _EPS * r[0] ** -powers[:, None]
    by_columns = r[-1] ** powers * _largest(torch.tensordot(nu, C, 1))
    return torch.cat([_largest(R)[None], _largest(S)[None], by_rows, by_columns]).min()


def _weights(S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of a positive matrix, ascending and raised by a floor, and its eigenvectors.

    The bound holds for every positive definite weight, so the floor only makes it less tight.
    """
    values, basis = torch.linalg.eigh(S)
    return values.clamp(min=0) + _FLOOR * values[-1], basis


def _largest(A: Tensor) -> Tensor:
    """Largest eigenvalue of each symmetric matrix."""
    return torch.linalg.eigvalsh(A)[..., -1]


def _frobenius(U: Tensor, W: Tensor, N: Tensor) -> Tensor:
    """Return ‖Σ_i (u_i ⊗ I) N_i (w_i ⊗ I)ᵀ‖_F from Gram matrices, with an allowance for cancellation."""
    flat = N.flatten(1)
    terms = (U @ U.mT) * (W @ W.mT) * (flat @ flat.mT)
    return (terms.sum().clamp(min=0) + 8 * flat.shape[1] * _EPS * terms.abs().sum()).sqrt()


def _normalized(U: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit rows, C times their squared lengths, scaled to a largest entry of 1, and that scale."""
    C, scale = _scaled(C * (U * U).sum(1)[:, None, None])
    return unit_rows(U), C, scale


def _scaled(C: Tensor) -> tuple[Tensor, Tensor]:
    """Return C divided by its largest |entry|, so that squares do not underflow, and that entry."""
    scale = C.abs().max() if C.numel() else C.new_zeros(())
    return (C / scale if scale > 0 else C), scale


def unit_rows(U: Tensor) -> Tensor:
    """Return the rows divided by their lengths; a row of zeros stays zero."""
    lengths = torch.linalg.vector_norm(U, dim=1, keepdim=True)
    return U / torch.where(lengths > 0, lengths, 1.0)

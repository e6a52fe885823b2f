"""Small matrices for each query, from one forward pass, for the bounds of one attention head.

With x̃_ij = x_j − Σ_l A_il x_l, the second moment M2_i = Σ_j A_ij x̃ x̃ᵀ and the tilted one
T_i = Σ_j A_ij (G_i·W_Vᵀx̃_ij) x̃ x̃ᵀ give every block of the Hessian:

    QQ = Σ x_i x_iᵀ ⊗ C_i,   KK = Σ D_i ⊗ q_i q_iᵀ,   QK = Σ (x_i ⊗ I) N_i (I ⊗ q_iᵀ) + Γ ⊗ I,
    VV = Σ m_i m_iᵀ ⊗ B_i,   KV[a, c, b, w] = Σ q_ic (P_iwa m_ib + M_iab G_iw),
    QV[a, c, b, w] = Σ x_ia ((P W_K)_iwc m_ib + (W_Kᵀ M)_icb G_iw).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from curvescope.closed_form.bounds.sums import HeadInputs
from curvescope.closed_form.objectives import token_curvature
from curvescope.closed_form.softmax import deviations

_MAX_ENTRIES = 1 << 22  # entries of one intermediate tensor


@dataclass(frozen=True)
class HeadLocals:
    """Per-query quantities of a head; i runs over all N queries of all samples. float64."""

    X: Tensor  # (N, d) query inputs
    q: Tensor  # (N, d_K)
    m: Tensor  # (N, d) attended mean
    M2: Tensor  # (N, d, d)
    T: Tensor  # (N, d, d)
    slope: Tensor  # (N, d) M2_i W_V G_i: derivative of ⟨G_i, F_i⟩ in the vector that multiplies the keys
    G: Tensor  # (N, d_V)
    B: Tensor  # (N, d_V, d_V)
    W_K: Tensor
    W_V: Tensor
    scale: float

    @cached_property
    def Gamma(self) -> Tensor:
        """∂ℓ/∂(W_Q W_Kᵀ) = s Xᵀ slope: (d, d)."""
        return self.scale * self.X.mT @ self.slope


@dataclass(frozen=True)
class HeadFactors:
    """The factors of the six blocks of JᵀBJ (`outer`), of the functional Hessian, or of their sum."""

    at: HeadLocals
    outer: bool
    functional: bool

    @cached_property
    def D(self) -> Tensor:
        """KK = Σ D_i ⊗ q_i q_iᵀ: (N, d, d), symmetric."""
        E = self.at.scale * self.at.W_V.mT @ self.at.M2
        D = self.outer * (E.mT @ self.at.B @ E) + self.functional * self.at.scale**2 * self.at.T
        return (D + D.mT) / 2

    @cached_property
    def N(self) -> Tensor:
        """QK = Σ (x_i ⊗ I) N_i (I ⊗ q_iᵀ) + Γ ⊗ I: (N, d_K, d)."""
        return self.at.W_K.mT @ self.D

    @cached_property
    def C(self) -> Tensor:
        """QQ = Σ x_i x_iᵀ ⊗ C_i: (N, d_K, d_K), symmetric."""
        C = self.N @ self.at.W_K
        return (C + C.mT) / 2

    @cached_property
    def P(self) -> Tensor:
        """Part of KV from JᵀBJ: s B_i W_Vᵀ M2_i, (N, d_V, d)."""
        return self.outer * self.at.scale * (self.at.B @ self.at.W_V.mT @ self.at.M2)

    @cached_property
    def M(self) -> Tensor:
        """Part of KV from the loss gradient: s M2_i, (N, d, d)."""
        return self.functional * self.at.scale * self.at.M2

    @cached_property
    def B(self) -> Tensor:
        """VV = Σ m_i m_iᵀ ⊗ B_i."""
        return self.outer * self.at.B

    @cached_property
    def Gamma(self) -> Tensor:
        """The mixed term of QK."""
        return self.functional * self.at.Gamma

    def matvec(self, block: str, V: Tensor) -> Tensor:
        """Return the block's product with V, shaped like its second weight; "QK" maps W_K to W_Q."""
        at, W_K = self.at, self.at.W_K
        if block[1] == "Q":
            y = at.X @ V
            if block == "QQ":
                return at.X.mT @ _rows(self.C, y)
            if block == "KQ":
                return _rows(self.N.mT, y).mT @ at.q + self.Gamma.mT @ V
            y = y @ W_K.mT  # VQ
            return at.m.mT @ _rows(self.P, y) + _rows(self.M, y).mT @ at.G
        if block[1] == "K":
            y = at.q @ V.mT
            if block == "KK":
                return _rows(self.D, y).mT @ at.q
            if block == "QK":
                return at.X.mT @ _rows(self.N, y) + self.Gamma @ V
            return at.m.mT @ _rows(self.P, y) + _rows(self.M, y).mT @ at.G  # VK
        y = at.m @ V
        if block == "VV":
            return at.m.mT @ _rows(self.B, y)
        y = _rows(self.P.mT, y) + _rows(self.M, at.G @ V.mT)
        return at.X.mT @ (y @ W_K) if block == "QV" else y.mT @ at.q


def _rows(A: Tensor, x: Tensor) -> Tensor:
    """A_i x_i for every row: (N, ·)."""
    return (A @ x[:, :, None])[:, :, 0]


def head_locals(head: HeadInputs, G: Tensor, B: float | Tensor) -> HeadLocals:
    """Return the per-query quantities of one softmax head; G and B as in `attention_bounds`."""
    G = G.double()
    head.check(G)
    at = replace(head, X=head.X.reshape(-1, *head.X.shape[-2:])).core()
    G, W_V = G.reshape(-1, *G.shape[-2:]), head.W_V
    moments = [_moments(x, a, g @ W_V.mT) for x, a, g in zip(at.v, at.A, G, strict=True)]
    M2, T = (torch.cat(part) for part in zip(*moments, strict=True))
    X, q, m, G = (tensor.flatten(0, 1) for tensor in (at.v, at.q, at.output, G))
    slope = _rows(M2, G @ W_V.mT)
    return HeadLocals(X, q, m, M2, T, slope, G, token_curvature(B, G), head.W_K, W_V, head.scale)


def _moments(X: Tensor, A: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return M2 and T of every query of one sample, by centered sums over slices; u_i = W_V G_i."""
    L, d = X.shape
    moments = []
    for cut in torch.arange(L, device=X.device).split(max(1, _MAX_ENTRIES // (L * d))):
        deviation = deviations(A[cut], X)
        tilted = A[cut] * _rows(deviation, u[cut])
        moments.append([(deviation * weight[:, :, None]).mT @ deviation for weight in (A[cut], tilted)])
    M2, T = (torch.cat(part) for part in zip(*moments, strict=True))
    return M2, T

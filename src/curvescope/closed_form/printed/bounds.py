"""The bounds of petrov2025 (arXiv:2510.16927), Theorems 1 and 6, exactly as they are printed.

Use them for comparison only. Theorem 1 is false (`bounds.operator_norms` explains why), some estimates behind
Theorem 6 are false, and valid ones are loose by many orders of magnitude. The setting is the paper's: one
head, d_V = d, squared error ‖· − target‖_F²/(Ld), no mask, no ε.

The module also has the bound of arXiv 2409.11995, the precursor of petrov2025, exactly as printed. For ‖W‖ <
1 it is false, and it is a bound of the GGN only. `bounds.relu_network` explains this and has corrected
bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np
from torch import Tensor

from curvescope.closed_form.bounds.block import block_forward
from curvescope.closed_form.bounds.sums import spectral_norm
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.result import Result

Constants = Literal["main", "appendix"]
Sigma = Literal["row_norm", "std"]
NAMES = ["1", "2", "K", "Q", "V"]  # of Theorem 6


@dataclass(frozen=True)
class PrintedBound(Result):
    """A published bound: the estimate of each block, their maximum times a factor, and the ingredients."""

    names: list[str]  # weights, in the paper's order
    blocks: np.ndarray  # (b, b) estimates; nan where the paper gives none
    value: float  # the number of weights times the largest estimate: the published M or M_tr
    parts: dict[str, float]  # intermediate estimates, by the paper's symbol


def theorem1_as_printed(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, target: Tensor, *, constants: Constants = "main"
) -> PrintedBound:
    """Return Theorem 1: M = 3 max over the blocks VV, QQ, VQ and QK; it omits the blocks KK and VK.

    The theorem in the main text and its proof in the appendix print different `constants`.
    Shapes are X and target (L, d), W_Q and W_K (d, d_K), W_V (d, d).
    """
    if constants not in ("main", "appendix"):
        raise UsageError(f"expected constants 'main' or 'appendix', got {constants!r}")
    L, d, d_K = _check(X, W_Q, W_K, W_V, target)
    x, q, k, v, y = (float(spectral_norm(A.double())) for A in (X, W_Q, W_K, W_V, target))
    main = constants == "main"
    outer, cross = (8, 4) if main else (2, 2)
    root = sqrt(d_K) if main else sqrt(d * d_K)
    residual = sqrt(min(L, d)) * (L * x * v + y)
    QQ = outer / (L**3 * d * d_K) * k**2 * v**2 * x**6 + 12 / (d * d_K) * residual * v * k**2 * x**5
    VQ = cross / (L * d * sqrt(d_K)) * v * k * x**4 + cross / (L**2 * root) * residual * k * x**3
    mixed = cross * residual / (L * d * root) * v * (3 * L * k * q * x**5 + d / L * x**3)
    QK = outer / (L**3 * d * d_K) * k * q * v**2 * x**6 + mixed
    VV = 2 * L / d * x**2
    blocks = np.array([[QQ, QK, VQ], [QK, np.nan, np.nan], [VQ, np.nan, VV]])
    parts = {"dA/dT": 1 / L, "A": float(L), "Z_1": x**3 / L, "Z_2": 6 * x**5, "R": residual}
    return PrintedBound(["Q", "K", "V"], blocks, 3 * float(np.nanmax(blocks)), parts)


def theorem6_as_printed(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    W_1: Tensor,
    W_2: Tensor,
    target: Tensor,
    *,
    sigma: Sigma = "std",
) -> PrintedBound:
    """Return Theorem 6: M_tr = 5 max_ij ((2/(Ld))‖∂Z/∂W_i‖‖∂Z/∂W_j‖ + ‖R_tr‖‖H_tr^ij‖).

    ‖H_tr^ij‖ ≤ ‖J_Z‖‖ξ_ij‖ + ‖B_i‖‖H_Z‖‖B_j‖. The estimates of ‖Y‖ and ‖S‖ are the paper's. It has no
    estimates of the residual, ‖relu(Y W_1)‖ and ‖X + F‖, so the function measures them. It does not print
    estimates of ξ_k1 and ξ_k2, so the function uses those of ξ_1k and ξ_2k.

    Shapes as in `block_forward`, target (L, d); for `sigma` see `layernorm_norms_as_printed`.
    """
    L, d, _ = _check(X, W_Q, W_K, W_V, target)
    at = block_forward(X, W_Q, W_K, W_V, W_1, W_2)
    first, second = (float(spectral_norm(W.double())) for W in (W_1, W_2))
    Y, J_SY = sqrt(L * d), first * second + 1
    S = Y * (1 + sqrt(min(L, W_1.shape[1])) * first * second)
    J_Y, H_Y = layernorm_norms_as_printed(at.R, sigma=sigma)
    J_Z, H_Z = layernorm_norms_as_printed(at.S, sigma=sigma, norm=S)
    G, Phi = _attention_estimates(X, W_Q, W_K, W_V)
    B = np.array([second * Y, float(spectral_norm(at.hidden)), *(J_SY * J_Y * G)])
    xi = np.zeros((5, 5))
    xi[0, 1], xi[1, 0] = sqrt(d) * Y, sqrt(W_1.shape[1]) * second
    xi[0, 2:] = xi[2:, 0] = sqrt(W_1.shape[1]) * second * J_Y * G
    xi[1, 2:] = xi[2:, 1] = sqrt(d) * first * J_Y * G
    xi[2:, 2:] = J_SY * (H_Y * np.outer(G, G) + J_Y * Phi)
    residual = float((at.Z - target.double()).norm())
    squares = np.outer(B, B)
    blocks = 2 / (L * d) * J_Z**2 * squares + residual * (J_Z * xi + H_Z * squares)
    parts = {"J_Y": J_Y, "H_Y": H_Y, "J_Z": J_Z, "H_Z": H_Z, "J_SY": J_SY, "Y": Y, "S": S, "R_tr": residual}
    parts |= _named("B", B, NAMES) | _named("xi", xi, NAMES) | _named("Phi", Phi, NAMES[2:])
    return PrintedBound(NAMES, blocks, 5 * float(blocks.max()), parts)


def _named(symbol: str, estimates: np.ndarray, names: list[str]) -> dict[str, float]:
    """Return the entries of a vector or a table by name: `B_1`, `xi_12`."""
    return {
        f"{symbol}_" + "".join(names[i] for i in index): float(value)
        for index, value in np.ndenumerate(estimates)
    }


def layernorm_norms_as_printed(
    X: Tensor, *, sigma: Sigma = "std", norm: float | None = None
) -> tuple[float, float]:
    """Return the paper's estimates of ‖∂LN/∂X‖ and ‖∂²LN/∂X²‖ for X (m, n).

    1/σ + ‖X‖²/(√n σ³) and ‖X‖/σ³ (1 + √(m/n)) + ‖X‖²/(√n σ³) + 3‖X‖³/(n σ⁵). The lemma defines σ as the
    least norm of a centered row ("row_norm"), its proof uses the least standard deviation ("std"); with the
    former both estimates can fail. `norm` replaces ‖X‖.
    """
    if sigma not in ("row_norm", "std"):
        raise UsageError(f"expected sigma 'row_norm' or 'std', got {sigma!r}")
    X = X.double()
    m, n = X.shape
    x = float(spectral_norm(X)) if norm is None else norm
    std = float(X.std(1, correction=0).min())
    low = std * sqrt(n) if sigma == "row_norm" else std
    jacobian = 1 / low + x**2 / (sqrt(n) * low**3)
    second = x / low**3 * (1 + sqrt(m / n)) + x**2 / (sqrt(n) * low**3) + 3 * x**3 / (n * low**5)
    return jacobian, second


def _attention_estimates(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the proof's estimates of ‖∂F/∂W_k‖, (3,), and ‖∂²F/∂W_k∂W_l‖, (3, 3), in the order K, Q, V."""
    L, d, d_K = X.shape[0], X.shape[1], W_Q.shape[1]
    x, q, k, v = (float(spectral_norm(A.double())) for A in (X, W_Q, W_K, W_V))
    slope = v * x**3 / (L * sqrt(d_K))
    G = np.array([slope * q, slope * k, L * x])
    third = 12 / (L * d * d_K) * v * x**5
    second = 2 / (L**2 * sqrt(d * d_K)) * x**3
    mixed = third * k * q + second * v
    Phi = np.array(
        [
            [third * q**2, mixed, second * q],
            [mixed, third * k**2, second * k],
            [second * q, second * k, 0.0],
        ]
    )
    return G, Phi


def _check(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, target: Tensor) -> tuple[int, int, int]:
    """Return L, d, d_K of the paper's setting."""
    d = X.shape[-1]
    if X.ndim != 2 or target.shape != X.shape or W_V.shape != (d, d) or W_Q.shape != W_K.shape:
        raise ShapeError(
            f"expected X and target (L, d), W_Q and W_K (d, d_K), W_V (d, d), got {tuple(X.shape)}, "
            f"{tuple(target.shape)}, {tuple(W_Q.shape)}, {tuple(W_K.shape)}, {tuple(W_V.shape)}",
            hint="the theorems have d_V = d",
        )
    return X.shape[0], d, W_Q.shape[1]


WeightNorm = Literal["spectral", "entries"]


def precursor_as_printed(x: Tensor, weights: Sequence[Tensor], *, norm: WeightNorm = "spectral") -> float:
    """Return ‖H‖ ≤ n √2 M_x² M_W^{2n} + √2 M_W² (M_W^{2n} − 1)/(M_W² − 1) for n layers without biases.

    M_x = |x| and M_W is the largest norm of a weight ("spectral", the theorem), or the width h times the
    largest entry ("entries", the lemma that makes it grow as n (hM)^{2n}). The second summand has the form of
    a contribution of biases.
    """
    if norm not in ("spectral", "entries"):
        raise UsageError(f"expected norm 'spectral' or 'entries', got {norm!r}")
    if norm == "spectral":
        largest = max(float(spectral_norm(W.double())) for W in weights)
    else:
        largest = max(max(W.shape) for W in weights) * max(float(W.abs().max()) for W in weights)
    n, square, size = len(weights), largest**2, float(x.double().norm())
    geometric = sum(square**power for power in range(n))  # (M^{2n} − 1)/(M² − 1), at M = 1 too
    return sqrt(2) * (n * size**2 * square**n + square * geometric)

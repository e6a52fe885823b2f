"""Softmax as the source of heterogeneity, one query-key matrix against two, and attention without softmax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form import attention
from curvescope.closed_form.attention import linear as linear_attention
from curvescope.closed_form.attention.layer import Kind
from curvescope.closed_form.bounds import growth
from curvescope.closed_form.loss_curvature import squared_error
from curvescope.core.parts import HALVES
from curvescope.papers.ormaniec2025.histograms.study import Histograms, measure
from curvescope.papers.ormaniec2025.statements.rows import (
    CORRECTED,
    FAILS,
    HOLDS,
    STEP,
    Group,
    Head,
    Statement,
    exponent,
    log_slope,
    make_head,
    name,
    state,
)

SMALL, TOLERANCE, EXACT = 1e-3, 0.02, 1e-9
GRID = np.logspace(-2, 0.7, 28)
B = 0.1
KINDS: tuple[Kind, ...] = ("softmax", "linear")


def heterogeneity(num_heads: int, device: str) -> Group:
    """‖H_o(V, V)‖ over ‖H_o(Q, Q)‖ against σ, and the entries of the paper's own model."""
    heads = [make_head(seed) for seed in range(num_heads)]
    rows, curves = [], {"sigma": GRID}
    claims: dict[Kind, int] = {"softmax": -4, "linear": 0}
    for kind, claimed in claims.items():
        values = [log_slope(_ratio(h, kind, SMALL / STEP), _ratio(h, kind, SMALL * STEP)) for h in heads]
        words = f"‖H_o(V, V)‖/‖H_o(Q, Q)‖ goes as σ^{claimed} with {kind} attention"
        rows.append(
            state(words, "slides; the exponent follows from theirs", claimed, values, tolerance=TOLERANCE)
        )
        curves[kind] = np.array([[_ratio(h, kind, float(sigma)) for sigma in GRID] for h in heads])
    norms = [
        float(_head(h, "linear", 1.0).frobenius(pair, "functional"))
        for h in heads
        for pair in (("Q", "Q"), ("K", "K"), ("V", "V"))
    ]
    rows.append(
        state("without softmax the functional Hessian is zero on the diagonal", "slides", 0, norms,
              tolerance=0.0, note="the largest norm of H_f(Q, Q), H_f(K, K), H_f(V, V)")
    )  # fmt: skip
    found = Histograms(
        [
            measure(kind, block, parts=("H",), device=device)
            for kind in KINDS
            for block in ("L0.W_V", "L0.W_Q")
        ]
    )
    rows += _paper_model(found)
    curves |= {f"entries {b.attention} {b.block}": np.quantile(b.entries, [0.05, 0.25, 0.5, 0.75, 0.95])
               for b in found.bars}  # fmt: skip
    return Group("softmax and heterogeneity", rows, curves)


def _paper_model(found: Histograms) -> list[Statement]:
    softmax, linear = (found.median_ratio(kind) for kind in KINDS)
    alike = max(linear, 1 / linear) < 5 < softmax
    return [
        state("median |entry| of W_V over that of W_Q, the paper's model with softmax", "figure 1", 31.2,
              softmax, tolerance=0.1, note="1.602e-5 over 5.127e-7"),
        state("the same without softmax: the two become alike", "figure 4", 1, linear, tolerance=0.0,
              verdict=HOLDS if alike else FAILS,
              note=f"a factor of {max(linear, 1 / linear):.2f} instead of {softmax:.1f}: W_Q has passed W_V"
              if linear < 1 else f"a factor of {linear:.2f} instead of {softmax:.1f}"),
    ]  # fmt: skip


def _head(head: Head, kind: Kind, sigma: float) -> attention.AttentionCurvature:
    return attention.curvature(sigma * head.X, *head[1:], B, kind=kind)


def _ratio(head: Head, kind: Kind, sigma: float) -> float:
    found = _head(head, kind, sigma)
    return float(found.frobenius(("V", "V"), "outer") / found.frobenius(("Q", "Q"), "outer"))


def parameterization(num_heads: int) -> Group:
    """W_Q and W_K against their product W_QK: what the two add is Γ ⊗ I, with eigenvalues of both signs."""
    heads = [make_head(seed) for seed in range(num_heads)]
    rows = [
        state("what W_Q, W_K add to W_QK is Γ ⊗ I with the spectrum ±σ_i(Γ): largest relative error",
              "ours; Theorem 3.2", 0, [_mixed_error(h) for h in heads], tolerance=1e-10),
        state("H(Q, Q) is (I ⊗ W_K)ᵀ H(QK, QK) (I ⊗ W_K): largest relative error", "ours", 0,
              [_seen_error(h) for h in heads], tolerance=1e-10),
    ]  # fmt: skip
    curves = {"sigma": GRID}
    for words, negative, claimed in (("W_Q and W_K", _classical, -3), ("one W_QK", _merged, -1)):
        values = [log_slope(negative(h, SMALL / STEP), negative(h, SMALL * STEP)) for h in heads]
        said = f"−λ_min(H)/λ_max(H_o) over {words} goes as σ^{claimed}"
        rows.append(state(said, "slides; the exponent is ours", claimed, values, tolerance=TOLERANCE))
        curves[words] = np.array([[negative(h, float(sigma)) for sigma in GRID] for h in heads])
    rows.append(_factor(heads))
    return Group("two query-key matrices against one", rows, curves)


def _factor(heads: Sequence[Head]) -> Statement:
    """How many times more negative the classical parameterization is, for scores of order one."""
    at = 0.3
    values = [_classical(h, at) / _merged(h, at) for h in heads]
    verdict = HOLDS if min(values) > 1 else CORRECTED if float(np.median(values)) > 1 else FAILS
    note = f"the factor at σ = {at}, above one for {sum(v > 1 for v in values)} of {len(values)} heads"
    words = "the classical parameterization is the more indefinite one"
    return state(words, "slides", 1, values, tolerance=0.0, verdict=verdict, note=note)


def _matrix(found: attention.AttentionCurvature, names: tuple[str, ...], part: str = "total") -> Tensor:
    return found.hessian(part).to_dense(names)  # pyright: ignore[reportArgumentType]


def _share(found: attention.AttentionCurvature, names: tuple[str, ...]) -> float:
    """−λ_min(H)/λ_max(H_o) over these weights."""
    low = torch.linalg.eigvalsh(_matrix(found, names))[0]
    return float(-low / torch.linalg.eigvalsh(_matrix(found, names, "outer"))[-1])


def _classical(head: Head, sigma: float) -> float:
    return _share(attention.curvature(sigma * head.X, *head[1:], B), ("Q", "K"))


def _merged(head: Head, sigma: float) -> float:
    return _share(_one_matrix(head, sigma), ("QK",))


def _one_matrix(head: Head, sigma: float) -> attention.AttentionCurvature:
    scale = head.W_Q.shape[1] ** -0.5
    return attention.merged_curvature(sigma * head.X, head.W_Q @ head.W_K.T, head.W_V, head.G, B, scale=scale)


def _mixed_error(head: Head) -> float:
    """The functional Q–K matrix less its third-moment terms against ±σ_i(Γ), each d_K times."""
    found = attention.curvature(*head, B)
    mixed = found.terms(("Q", "K"), "functional")[1].to_dense().flatten(2).flatten(0, 1)
    zero = torch.zeros_like(mixed)
    values = torch.linalg.eigvalsh(torch.cat([torch.cat([zero, mixed], 1), torch.cat([mixed.T, zero], 1)]))
    scale, d_K = head.W_Q.shape[1] ** -0.5, head.W_Q.shape[1]
    A = torch.softmax(scale * head.X @ head.W_Q @ head.W_K.T @ head.X.T, -1)
    rho = head.G @ (head.X @ head.W_V).T
    tau = A * (rho - (A * rho).sum(-1, keepdim=True))
    sigma = torch.linalg.svdvals(scale * head.X.T @ tau @ head.X).repeat_interleave(d_K)
    expected = torch.zeros_like(values)
    signed = torch.cat([-sigma, sigma])
    expected[: len(signed)] = signed
    return float((values - expected.sort().values).abs().max() / values.abs().max())


def _seen_error(head: Head) -> float:
    one = _matrix(attention.curvature(*head, B), ("Q",))
    lift = torch.kron(torch.eye(head.X.shape[1]).double(), head.W_K)
    two = lift.T @ _matrix(_one_matrix(head, 1.0), ("QK",)) @ lift
    return float((one - two).abs().max() / one.abs().max())


def linear(num_heads: int) -> Group:
    """Without softmax every block is made of the weights, Σ = XᵀX and Ω = Xᵀ(F − Y)."""
    heads = [make_head(seed) for seed in range(num_heads)]
    errors = [_two_matrices_error(h) for h in heads]
    words = "Σ_XX and Ω_XY are all the Hessian knows of the data: largest relative error"
    rows = [state(words, "slides", 0, errors, tolerance=1e-10)]
    curves: dict[str, np.ndarray] = {}
    for part, claims in zip(HALVES, ((3, 0), (1, 1)), strict=True):
        for pair in growth.PAIRS:
            if part == "functional" and not growth.DATA_LINEAR.exponents(pair, part):
                continue
            powers = np.array([_powers(h, pair, part) for h in heads])
            curves[f"{part} {''.join(pair)}"] = powers.mean(0)
            said = "Σ_XX^3" if part == "outer" else "Ω_XY Σ_XX"
            for symbol, claimed, values in zip(("Σ_XX", "Ω_XY"), claims, powers.T, strict=True):
                if claimed:
                    words = f"{name(pair, part)} of linear attention is {said}: power of {symbol}"
                    rows.append(state(words, "slides", claimed, values, tolerance=EXACT))
    return Group("linear attention", rows, curves)


def _moments(head: Head) -> tuple[Tensor, Tensor, float]:
    """Σ_XX, Ω_XY and c of a squared error; G stands in for the targets."""
    F = head.W_Q.shape[1] ** -0.5 * head.X @ head.W_Q @ head.W_K.T @ head.X.T @ head.X @ head.W_V
    _, c = squared_error(F, head.G)
    S = head.X.T @ head.X
    Omega = linear_attention.residual_covariance(S, head.X.T @ head.G, head.W_Q, head.W_K, head.W_V)
    return S, Omega, float(c)


def _powers(head: Head, pair: tuple[str, str], part: str) -> tuple[float, float]:
    """Powers of Σ_XX and of Ω_XY in a block."""
    S, Omega, c = _moments(head)
    weights, factor = head[1:4], 2.0
    norms = [
        float(getattr(linear_attention.blocks(a * S, b * Omega, *weights, c=c)[pair], part).norm())
        for a, b in ((1, 1), (factor, 1), (1, factor))
    ]
    return exponent(norms[0], norms[1], factor), exponent(norms[0], norms[2], factor)


def _two_matrices_error(head: Head) -> float:
    S, Omega, c = _moments(head)
    F = head.W_Q.shape[1] ** -0.5 * head.X @ head.W_Q @ head.W_K.T @ head.X.T @ head.X @ head.W_V
    want = attention.blocks(head.X, *head[1:4], c * (F - head.G), c, kind="linear")
    found = linear_attention.blocks(S, Omega, *head[1:4], c=c)
    largest = max(float(split.total.abs().max()) for split in want.values())
    return max(float((found[pair].total - want[pair].total).abs().max()) for pair in want) / largest

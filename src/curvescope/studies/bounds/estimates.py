"""The estimates that the proofs of Theorems 1 and 6 are made of, each next to the norm that it is for.

Norms are exact: of matrices that are written out in Kronecker form, or known in closed form.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from curvescope.closed_form.bounds.block import block_forward
from curvescope.closed_form.bounds.operator_norms import head_curvature_norms, theorem1_corrected
from curvescope.closed_form.norms import (
    norm_jacobian_norm,
    norm_point,
    norm_second_derivative_norm,
)
from curvescope.closed_form.printed import block_theorems
from curvescope.closed_form.printed.block_theorems import head_second_derivatives
from curvescope.closed_form.printed.bounds import (
    PrintedBound,
    Sigma,
    layernorm_norms_as_printed,
    theorem1_as_printed,
    theorem6_as_printed,
)
from curvescope.closed_form.printed.kronecker import Theorem, softmax_derivatives
from curvescope.closed_form.softmax import softmax_covariance
from curvescope.studies.bounds.comparisons import Row
from curvescope.studies.bounds.instances import Block, Head
from curvescope.studies.bounds.measures import (
    APPENDIX,
    PRIORI,
    THEOREM_1,
    THEOREM_6,
    head_hessian,
    norm_of,
)

LEMMA: dict[str, Sigma] = {"lemma, literal σ": "row_norm", "lemma, σ of its proof": "std"}
REPAIRED = "repaired"
MOST_TOKENS = 8  # ∂²A/∂T² has L⁶ entries
PAIRS = ("QQ", "QK", "QV", "KK", "KV", "VV")


def head_estimates(head: Head) -> list[Row]:
    """What the proof of Theorem 1 uses of softmax and moments, and its estimates of the blocks."""
    at, parts = Theorem(*head), theorem1_as_printed(*head).parts
    L, x = len(head.X), norm_of(head.X)
    slopes = softmax_covariance(at.A, torch.eye(L).to(at.A))  # one matrix for each query
    slope = float(torch.linalg.matrix_norm(slopes, ord=2).max())
    rows = [
        Row("‖∂A/∂T‖", THEOREM_1, slope, parts["dA/dT"]),
        Row("‖∂A/∂T‖", REPAIRED, slope, 0.5),
        Row("‖A‖", THEOREM_1, norm_of(at.A), parts["A"]),
        Row("‖A‖", REPAIRED, norm_of(at.A), sqrt(L)),
        Row("‖Z_1‖", THEOREM_1, norm_of(at.Z1), parts["Z_1"]),
        Row("‖Z_1‖", REPAIRED, norm_of(at.Z1), x**3 / 2),
        Row("‖Z_2‖", THEOREM_1, norm_of(at.Z2), parts["Z_2"]),
    ]
    if L <= MOST_TOKENS:
        rows.append(Row("‖∂²A/∂T²‖", THEOREM_1, norm_of(softmax_derivatives(at.A)[1]), 6.0))
    return rows + _block_estimates(head)


def _block_estimates(head: Head) -> list[Row]:
    """Of the blocks of H; KK and KV, for which the paper has none, against its bound of the whole."""
    H, corrected = head_hessian(head), theorem1_corrected(*head)
    printed = {
        THEOREM_1: theorem1_as_printed(*head),
        APPENDIX: theorem1_as_printed(*head, constants="appendix"),
    }
    rows = []
    for one, two in PAIRS:
        true, quantity = norm_of(H[one, two]), f"‖H_{one}{two}‖"
        for name, bound in printed.items():
            value = float(bound.blocks[bound.names.index(one), bound.names.index(two)])
            missing = (one, two) in (("K", "K"), ("K", "V"))
            rows.append(Row(quantity, name, true, bound.value if missing else value))
        place = corrected.names.index(one), corrected.names.index(two)
        rows.append(Row(quantity, PRIORI, true, float(corrected.upper[place])))
    return rows


def block_estimates(block: Block) -> list[Row]:
    """What the proof of Theorem 6 uses: norms of LayerNorm, of Y and S, and of all derivatives of S."""
    at, printed = block_forward(*block[:6]), theorem6_as_printed(*block)
    rows = norm_estimates(at.R) + norm_estimates(at.S)
    Y_F = float(at.Y.norm())
    rows += [
        Row("‖Y‖_F", THEOREM_6, Y_F, printed.parts["Y"]),
        Row("‖S‖", THEOREM_6, norm_of(at.S), printed.parts["S"]),
    ]
    params = {name: getattr(block, name) for name in block_theorems.WEIGHTS}
    derived = block_theorems.PostNormBlock(block.X, params)
    return rows + _derivative_estimates(derived, printed, Y_F)


def norm_estimates(X: Tensor) -> list[Row]:
    """The lemma on LayerNorm of X (m, n) with both meanings of σ."""
    at = norm_point(X)
    true = float(norm_jacobian_norm(at).max()), float(norm_second_derivative_norm(at).max())
    rows = []
    for name, sigma in LEMMA.items():
        for quantity, one, value in zip(
            ("‖∂LN/∂X‖", "‖∂²LN/∂X²‖"), true, layernorm_norms_as_printed(X, sigma=sigma), strict=True
        ):
            rows.append(Row(quantity, name, one, value))
    return rows


def _derivative_estimates(
    block: block_theorems.PostNormBlock, printed: PrintedBound, Y_F: float
) -> list[Row]:
    """ξ, Φ and B. What is printed for (1, 2) is ∂B_2/∂W_1, and for (2, 1) ∂B_1/∂W_2."""
    xi, phi = block_theorems.inner_second_derivatives(block), head_second_derivatives(block.head)
    named = {f"B_{name[2:]}": norm_of(B) for name, B in block.B.items()}
    named |= {f"xi_{a[2:]}{b[2:]}": norm_of(M) for (a, b), M in xi.items()}
    named |= {f"Phi_{a[2:]}{b[2:]}": norm_of(M) for (a, b), M in phi.items()}
    named["xi_12"], named["xi_21"] = named["xi_21"], named["xi_12"]
    unprinted = {f"xi_{k}{i}" for k in "KQV" for i in "12"} | {"xi_11", "xi_22", "Phi_VV"}
    rows = [
        Row(f"‖{name.replace('xi', 'ξ').replace('Phi', 'Φ')}‖", THEOREM_6, true, printed.parts[name])
        for name, true in named.items()
        if name not in unprinted
    ]
    W = block.params
    corrected = head_curvature_norms(block.X, W["W_Q"], W["W_K"], W["W_V"])
    rows += [Row(f"‖Φ_{pair}‖", REPAIRED, named[f"Phi_{pair}"], bound) for pair, bound in corrected.items()]
    return [*rows, Row("‖ξ_21‖", REPAIRED, named["xi_21"], Y_F)]

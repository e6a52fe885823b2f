"""What docs/theory states and no other file checks: readings, exponents, conditioning, exact norms."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from curvescope.closed_form import attention
from curvescope.closed_form.bounds import growth
from curvescope.closed_form.bounds.operator_norms import attention_norm_bounds
from curvescope.closed_form.norms import norm_curvature_supremum, norm_point
from curvescope.closed_form.printed import block_theorems
from curvescope.closed_form.printed.block_theorems import (
    layernorm_jacobian_theorem2,
    layernorm_second_derivative_theorem3,
)
from curvescope.closed_form.printed.kronecker import Theorem, kron, kron_derivatives, softmax_derivatives
from curvescope.closed_form.spectra.one_dimensional import attention_1d_spectrum
from curvescope.core.seeds import generator


def draw(seed, *shapes):
    source = generator(29, seed)
    return [torch.randn(*shape, generator=source, dtype=torch.float64) for shape in shapes]


def head(seed, L=4, d=3, d_K=2, d_V=2):
    return Theorem(*draw(seed, (L, d), (d, d_K), (d, d_K), (d, d_V), (L, d_V)))


def norm(M):
    return float(torch.linalg.matrix_norm(M, ord=2))


# -------------------------------------------------------------------------------------------------- attention


def test_the_mixed_term_has_one_possible_bracket():
    """[R … S] ⊗ I_{d_K}, not R … (S ⊗ I_{d_K}): the latter does not fit its left neighbor."""
    at = head(0)
    lifted, S, eye = kron(at.Z1, torch.eye(3).double()), at.S(3), torch.eye(2).double()
    assert (lifted @ S).shape == (36, 3)
    assert at.mixed.shape == (6, 6)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        lifted @ kron(S, eye)


def test_the_shuffling_matrix_is_d_cubed_by_d_and_has_norm_root_d():
    at = head(1)
    for size in (2, 3):
        S = at.S(size)
        assert S.shape == (3 * size**2, 3)
        assert torch.equal(S.T @ S, size * torch.eye(3).double())


def test_the_mixed_term_is_gamma_times_the_identity_and_indefinite():
    """Γ = ∂ℓ/∂(W_Q W_Kᵀ); on the diagonal it has nothing, so its spectrum is that of ±Γ."""
    at = head(2, d_K=3)

    def loss(M):
        A = torch.softmax(at.X @ M @ at.X.T / 3**0.5, -1)
        return (A @ at.X @ at.W_V - at.Y).square().mean()

    Gamma = torch.func.grad(loss)(at.W_Q @ at.W_K.T)
    torch.testing.assert_close(at.mixed, kron(Gamma, torch.eye(3).double()), rtol=1e-11, atol=1e-14)
    zero = torch.zeros_like(at.mixed)
    values = torch.linalg.eigvalsh(torch.cat([torch.cat([zero, at.mixed]), torch.cat([at.mixed.T, zero])], 1))
    sigma = torch.linalg.svdvals(Gamma).repeat_interleave(3)
    torch.testing.assert_close(values, torch.cat([-sigma, sigma]).sort().values, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("moment", ["M1", "M2", "M3"])
@pytest.mark.parametrize("part", ["outer", "functional"])
def test_blocks_have_the_stated_powers_of_the_moments(part, moment):
    """One moment of the Kronecker form multiplied by 3, the residual kept as it was."""
    plain, factor = head(3), 3.0
    moments = replace(plain.moments, **{moment: factor * getattr(plain.moments, moment)})
    scaled = replace(plain, Y=plain.Y + (moments.M1 - plain.moments.M1) @ plain.W_V)
    scaled.__dict__["moments"] = moments
    torch.testing.assert_close(scaled.R(1), plain.R(1))
    powers = growth.MOMENTS_OUTER if part == "outer" else growth.MOMENTS_FUNCTIONAL
    before, after = getattr(plain, part)(), getattr(scaled, part)()
    for pair, terms in powers.items():
        key = pair if pair in before else pair[::-1]
        parts = [before[key]]
        if len(terms) == 2:  # the third moment, then the mixed term
            parts = [before[key] - plain.mixed, plain.mixed]
        want = [factor ** getattr(power, moment) * block for power, block in zip(terms, parts, strict=False)]
        largest = max(float(block.abs().max()) for block in after.values())
        assert float((after[key] - sum(want, torch.zeros_like(before[key]))).abs().max()) < 1e-13 * largest


@pytest.mark.parametrize("part", ["outer", "functional"])
def test_exponents_of_the_data_bound_the_blocks_at_every_scale(part):
    """‖block(σX)‖ ≤ C σ^exponent for all σ, C from norms alone: as an upper bound 𝒪 needs no small scores."""
    X, *W, G = draw(4, (6, 4), (4, 3), (4, 3), (4, 3), (6, 3))
    G, B = (0 * G, 0.1) if part == "outer" else (G, 0.0)
    names = {"Q": 0, "K": 1, "V": 2}
    at_one = attention_norm_bounds(X, *W, G, B).upper
    for sigma in (1e-3, 0.1, 1.0, 3.0, 30.0):
        truth = attention.curvature(sigma * X, *W, G, B)
        bound = attention_norm_bounds(sigma * X, *W, G, B).upper
        for one, two in growth.PAIRS:
            place, exponents = (names[one], names[two]), growth.DATA.exponents((one, two), part)
            largest = max((sigma**e for e in exponents), default=0.0)
            assert bound[place] <= at_one[place] * largest * (1 + 1e-9)
            if len(exponents) == 1:
                assert bound[place] == pytest.approx(at_one[place] * largest, rel=1e-9)
            block = truth.to_dense((one, two), part).flatten(0, 1).flatten(1)
            assert norm(block) <= bound[place] * (1 + 1e-9)


def test_targets_that_scale_with_the_data_add_one_to_the_functional_exponents():
    X, *W, Y = draw(5, (6, 4), (4, 3), (4, 3), (4, 3), (6, 3))

    def norms(sigma, targets):
        F = torch.softmax(sigma**2 * X @ W[0] @ W[1].T @ X.T / 3**0.5, -1) @ (sigma * X) @ W[2]
        found = attention.curvature(sigma * X, *W, 0.1 * (F - targets), 0.1)
        return {pair: float(found.frobenius(pair, "functional")) for pair in growth.PAIRS[:-1]}

    low, high = 1e-3, 1.1e-3
    for shift, of in ((0, lambda _: Y), (1, lambda sigma: sigma * Y)):
        pairs = zip(norms(low, of(low)).items(), norms(high, of(high)).values(), strict=True)
        for (pair, one), two in pairs:
            slope = math.log(two / one) / math.log(high / low)
            assert slope == pytest.approx(growth.DATA.slope(pair, "functional") + shift, abs=0.02)


# ------------------------------------------------------------------------------------------- blocks and norms


def post_norm_block(seed, L=2, d=3, d_ff=4, d_K=2):
    shapes = {"W_1": (d, d_ff), "W_2": (d_ff, d), "W_Q": (d, d_K), "W_K": (d, d_K), "W_V": (d, d)}
    X, target, *weights = draw(seed, (L, d), (L, d), *shapes.values())
    return block_theorems.PostNormBlock(X, dict(zip(shapes, weights, strict=True))), target


def test_the_mask_of_the_feed_forward_layer_is_that_of_its_hidden_values():
    """1_{X>0} has the shape of 1_{YW_1>0} where d_ff = d, and gives another Jacobian."""
    block, _ = post_norm_block(6, d_ff=3)
    right = block_theorems.block_jacobians_theorem4(block)["W_1"]
    printed = replace(block)
    printed.__dict__["D"] = torch.diag((block.X > 0).double().reshape(-1))
    wrong = block_theorems.block_jacobians_theorem4(printed)["W_1"]
    assert float((wrong - right).norm() / right.norm()) > 0.3


def test_the_printed_identity_of_theorem_5_does_not_fit():
    """ξ_1k = ((I_L ⊗ W_2ᵀ) D ⊗ I) ∂(Y ⊗ I)/∂Y J_Y G_k: I has the entries of W_1; printed are those of W_k."""
    block, _ = post_norm_block(6)
    outward = kron(torch.eye(2).double(), block.params["W_2"].T) @ block.D
    inner = kron_derivatives(block.Y, torch.eye(4).double())[0] @ block.G["W_Q"]
    right = block_theorems.inner_second_derivatives(block)["W_1", "W_Q"]
    torch.testing.assert_close(kron(outward, torch.eye(12).double()) @ inner, right)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        kron(outward, torch.eye(6).double()) @ inner


@pytest.mark.parametrize("seed", range(7, 10))
def test_theorem_6_holds_with_the_norms_themselves(seed):
    """‖H_ij‖ ≤ ‖J_Z‖‖ξ_ij‖ + ‖B_i‖‖H_Z‖‖B_j‖, and M_tr = 5 max bounds the Hessian: loose, and true."""
    block, target = post_norm_block(seed)
    J = block_theorems.block_jacobians_theorem4(block)
    second = block_theorems.block_second_derivatives_theorem5(block)
    functional = block_theorems.block_functional_theorem5(block, target)
    J_Z, H_Z = (
        norm(derivative(block.S))
        for derivative in (layernorm_jacobian_theorem2, layernorm_second_derivative_theorem3)
    )
    c, residual, blocks = 2 / target.numel(), float((block.output - target).norm()), []
    for (one, two), xi in block_theorems.inner_second_derivatives(block).items():
        limit = J_Z * norm(xi) + norm(block.B[one]) * H_Z * norm(block.B[two])
        assert norm(second[one, two]) <= limit * (1 + 1e-12)
        blocks.append(c * norm(J[one]) * norm(J[two]) + residual * limit)
        H = c * J[one].T @ J[two] + functional[one, two]
        assert norm(H) <= blocks[-1] * (1 + 1e-12)
    names = list(J)
    H = torch.cat(
        [torch.cat([c * J[one].T @ J[two] + functional[one, two] for two in names], 1) for one in names]
    )
    assert norm(H) <= 5 * max(blocks)


@pytest.mark.parametrize(("kind", "d"), [("layernorm", 3), ("layernorm", 7), ("rmsnorm", 2)])
def test_the_sharp_constant_of_the_curvature_of_a_norm(kind, d):
    at = norm_point(*draw(12, (d,)), kind=kind)
    expected = 2 / 3**0.5 / (d**0.5 * float(at.sigma) ** 2)
    assert float(norm_curvature_supremum(at)) == pytest.approx(expected, rel=1e-13)


# ---------------------------------------------------------------------------------------------------- spectra


def scalars_1d(x, y, w_Q, w_K, w_V):
    """b, c, e, v, N, D of one head on one sequence, from the moments of x under attention."""
    d = len(w_Q)
    A = torch.softmax(w_Q @ w_K / d**0.5 * torch.outer(x, x), 1)
    m = A @ x
    deviation = x - m[:, None]
    first, second = x * (A * deviation**2).sum(1), x**2 * (A * deviation**3).sum(1)
    r = w_V * m - y

    def mean(z):
        return 2 * float(z.mean())

    b = w_V * mean(r * first) / d**0.5
    c = (w_V**2 * mean(first**2) + w_V * mean(r * second)) / d
    e = (w_V * mean(m * first) + mean(r * first)) / d**0.5
    return b, c, e, mean(m * m), float(w_Q @ w_Q + w_K @ w_K), 2 * float(w_Q @ w_K)


def cubic(b, c, e, v, N, D):
    return [1.0, -(v + c * N), N * (v * c - e * e) - c * b * D - b * b, b * b * v + b * D * (c * v - e * e)]


def test_outliers_of_attention_in_one_dimension_are_the_roots_of_a_cubic():
    for seed, d in product(range(5), (1, 3)):
        x, y, w_Q, w_K = draw(100 + seed, (6,), (6,), (d,), (d,))
        b, c, e, v, N, D = scalars_1d(x, y, w_Q, w_K, 1.3)
        found = attention_1d_spectrum(x, w_Q, w_K, torch.tensor([1.3], dtype=torch.float64), targets=y)
        np.testing.assert_allclose(found.bulk, [b, -b], rtol=1e-11)
        scale = np.abs(found.outliers).max() ** np.arange(4)
        difference = np.poly(found.outliers) - cubic(b, c, e, v, N, D)
        assert (np.abs(difference) < 1e-11 * scale).all()


def test_the_cubic_loses_half_of_the_digits_where_two_outliers_meet():
    """w_Q = w_K = 0 has the outliers b, −b and v; targets that make b = v leave a double root."""
    zero, w_V, errors = torch.zeros(3, dtype=torch.float64), 1.3, []
    for seed in range(10):
        x, y = draw(110 + seed, (6,), (6,))
        b, _, _, v, _, _ = scalars_1d(x, y, zero, zero, w_V)
        m = x.mean()
        y = w_V * m - v / b * (w_V * m - y)
        b, c, e, v, N, D = scalars_1d(x, y, zero, zero, w_V)
        assert b == pytest.approx(v, rel=1e-13)
        found = attention_1d_spectrum(x, zero, zero, torch.tensor([w_V], dtype=torch.float64), targets=y)
        np.testing.assert_allclose(found.outliers, [-v, v, v], rtol=1e-13)
        roots = np.sort(np.roots(cubic(b, c, e, v, N, D)).real)
        errors.append(np.abs(roots - found.outliers).max() / v)
    assert max(errors) > 1e-10


# ----------------------------------------------------------------------------------------------------- bounds


def test_norms_of_the_derivatives_of_the_softmax():
    """‖∂A/∂T‖ ≤ 1/2 and ‖∂²A/∂T²‖ ≤ √2/(3√3), both attained by two keys; the paper has 1/L and 6."""
    limits = 0.5, 2**0.5 / (3 * 3**0.5)
    for p, index in ((0.5, 0), ((1 - 3**-0.5) / 2, 1)):
        A = torch.tensor([[p, 1 - p], [p, 1 - p]], dtype=torch.float64)
        assert norm(softmax_derivatives(A)[index]) == pytest.approx(limits[index], rel=1e-12)
    for seed, L, size in product(range(4), (2, 3, 5), (0.3, 2.0, 6.0)):
        (T,) = draw(200 + seed, (L, L))
        for derivative, limit in zip(softmax_derivatives(torch.softmax(size * T, -1)), limits, strict=True):
            assert norm(derivative) <= limit * (1 + 1e-12)

"""Bounds of a Transformer block against autodiff, and the published estimates that fail."""

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian as autodiff_hessian
from torch.autograd.functional import jacobian

from curvescope.closed_form.bounds.block import block_forward, theorem6_corrected
from curvescope.closed_form.bounds.operator_norms import head_curvature_norms
from curvescope.closed_form.printed.block_theorems import head, head_second_derivatives
from curvescope.closed_form.printed.bounds import layernorm_norms_as_printed, theorem6_as_printed
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator
from oracles import normal, whole_number


def attend(X, W_Q, W_K, W_V):
    return torch.softmax(X @ W_Q @ (X @ W_K).mT / W_Q.shape[1] ** 0.5, 1) @ X @ W_V


def check(found, table, whole):
    assert (table <= found.upper * (1 + 1e-9) + 1e-13 * whole).all()
    assert whole <= found.whole * (1 + 1e-9)


def block_case(number):
    source = generator(51, number)
    L, d, d_ff = whole_number(source, 1, 4), whole_number(source, 3, 5), whole_number(source, 1, 5)
    size = (1.0, 0.2, 4.0)[number % 3]
    shapes = (d, 2), (d, 2), (d, d), (d, d_ff), (d_ff, d)
    weights = [size * normal(source, *shape) / d**0.5 for shape in shapes]
    if number % 6 == 5:
        weights[4] = 0 * weights[4]
    if number % 7 == 6:
        weights[0], weights[1] = 50 * weights[0], 0 * weights[1]
    return normal(source, L, d), weights, normal(source, L, d), torch.randint(0, d, (L,), generator=source)


def block_output(X, W_Q, W_K, W_V, W_1, W_2):
    def norm(R):
        R = R - R.mean(1, keepdim=True)
        return R / R.square().mean(1, keepdim=True).sqrt()

    Y = norm(X + attend(X, W_Q, W_K, W_V))
    return norm(Y + torch.relu(Y @ W_1) @ W_2)


def block_norms(loss, weights):
    """Norms of the 25 blocks in the order 1, 2, Q, K, V, and of the whole."""
    H, sizes, order = autodiff_hessian(loss, tuple(weights)), [W.numel() for W in weights], (3, 4, 0, 1, 2)
    rows = [[H[i][j].reshape(sizes[i], sizes[j]) for j in order] for i in order]
    table = np.array([[float(torch.linalg.matrix_norm(block, ord=2)) for block in row] for row in rows])
    whole = torch.cat([torch.cat(row, 1) for row in rows])
    return table, float(torch.linalg.matrix_norm(whole, ord=2))


def test_block_bounds_hold_and_are_far_below_the_printed_one():
    ratios, printed = [], []
    for number in range(6):
        X, weights, target, _ = block_case(number)
        torch.testing.assert_close(block_forward(X, *weights).Z, block_output(X, *weights))
        table, whole = block_norms(
            lambda *W, X=X, target=target: ((block_output(X, *W) - target) ** 2).mean(), weights
        )
        found = theorem6_corrected(X, *weights, target=target)
        check(found, table, whole)
        check(theorem6_corrected(X, *weights, target=target, measured=False), table, whole)
        ratios.append(found.whole / whole)
        printed.append(theorem6_as_printed(X, *weights, target).value / whole)
    assert np.median(ratios) < 15
    assert min(printed) > 1e3
    assert np.median(printed) > 1e7


def test_block_bounds_hold_for_cross_entropy():
    for number in range(3):
        X, weights, _, labels = block_case(100 + number)
        Z = block_output(X, *weights)
        G = torch.softmax(Z, 1) - torch.nn.functional.one_hot(labels, Z.shape[1])
        table, whole = block_norms(
            lambda *W, X=X, labels=labels: torch.nn.functional.cross_entropy(block_output(X, *W), labels),
            weights,
        )
        check(theorem6_corrected(X, *weights, G=G / len(X), curvature=1 / (2 * len(X))), table, whole)


def test_printed_estimate_of_the_ffn_mixed_derivative_fails_without_second_layer():
    """∂²S/∂W_1∂W_2 does not vanish with W_2, the printed estimate does."""
    X, weights, target, _ = block_case(5)
    assert not weights[4].any()
    at = block_forward(X, *weights)
    truth = float((at.active.mT @ (at.Y**2).sum(1)).sqrt().max())
    mixed = torch.einsum("th,tp,ab->taphb", at.active, at.Y, torch.eye(X.shape[1]).double())
    derivative = torch.einsum("taphb,hk->taphkb", mixed, torch.eye(at.hidden.shape[1]).double())
    np.testing.assert_allclose(
        truth, float(torch.linalg.matrix_norm(derivative.flatten(0, 3).flatten(1), ord=2)), rtol=1e-12
    )
    assert theorem6_as_printed(X, *weights, target).parts["xi_21"] == 0
    assert truth > 1


def test_printed_norm_estimates_need_the_standard_deviation():
    """With the least norm of a centered row, as the lemma says, the estimate of the Jacobian fails."""
    source = generator(61)
    X = normal(source, 1, 12)
    truth = float(1 / X.std(1, correction=0).min())
    assert layernorm_norms_as_printed(X, sigma="row_norm")[0] < truth
    for _ in range(100):
        X = normal(source, 4, 6)
        sigma = float(X.std(1, correction=0).min())
        jacobian, second = layernorm_norms_as_printed(X)
        assert jacobian >= 1 / sigma
        assert second >= (4 / 6) ** 0.5 / sigma**2


def test_printed_attention_curvature_of_theorem_6_fails():
    """‖∂²F/∂W_V∂W_Q‖ against the printed estimate, which keeps the loss factor 2/(Ld)."""
    source = generator(62)
    X, (W_Q, W_K, W_V) = normal(source, 6, 4), [normal(source, 4, n) / 2 for n in (2, 2, 4)]
    W_1, W_2, target = normal(source, 4, 5), normal(source, 5, 4), normal(source, 6, 4)
    slope = jacobian(lambda W: attend(X, W, W_K, torch.eye(4).double()), W_Q)  # (L, b, a, c)
    derivative = torch.einsum("tbac,vw->tvbwac", slope, torch.eye(4).double())
    truth = float(torch.linalg.matrix_norm(derivative.flatten(0, 3).flatten(1), ord=2))
    assert truth > theorem6_as_printed(X, W_Q, W_K, W_V, W_1, W_2, target).parts["Phi_VQ"]


@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
def test_norms_of_the_second_derivatives_of_a_head_are_bounded(size):
    for number in range(4):
        source = generator(63, number)
        L, d, d_K = whole_number(source, 1, 8), whole_number(source, 1, 4), whole_number(source, 1, 4)
        W = {f"W_{role}": size * normal(source, d, n) for role, n in (("Q", d_K), ("K", d_K), ("V", d))}
        X = normal(source, L, d)
        bounds = head_curvature_norms(X, *W.values())
        truth = head_second_derivatives(head(X, W))
        assert len(bounds) == 6
        for (one, two), bound in bounds.items():
            norm = float(torch.linalg.matrix_norm(truth[f"W_{one}", f"W_{two}"], ord=2))
            assert norm <= bound * (1 + 1e-12)


def test_wrong_calls_say_what_was_expected():
    X, weights, target, _ = block_case(0)
    with pytest.raises(UsageError, match="either a target, or both"):
        theorem6_corrected(X, *weights, target=target, curvature=1.0)
    with pytest.raises(UsageError, match="either a target, or both"):
        theorem6_corrected(X, *weights, G=target)
    with pytest.raises(ShapeError, match="shape of the outputs"):
        theorem6_corrected(X, *weights, target=target[:, 1:])
    with pytest.raises(UsageError, match="constant"):
        theorem6_corrected(0 * X, *weights, target=target)
    with pytest.raises(UsageError, match="'std'"):
        layernorm_norms_as_printed(X, sigma="variance")

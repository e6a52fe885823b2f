"""Theorems 4 and 5 of petrov2025: corrected forms against autograd, printed forms as counterexamples."""

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from curvescope.closed_form.network.block import Architecture, block_tape
from curvescope.closed_form.network.stack import StackCurvature
from curvescope.closed_form.objectives import squared_error_objective
from curvescope.closed_form.printed import block_theorems as heads
from curvescope.closed_form.printed import block_theorems as theorems
from curvescope.closed_form.printed.kronecker import (
    commutation,
    diagonal_derivative,
    kron,
    kron_derivatives,
    vec,
)
from curvescope.core.seeds import generator
from selection import some

L, D, M, K = 2, 3, 4, 2
SHAPES = {"W_1": (D, M), "W_2": (M, D), "W_Q": (D, K), "W_K": (D, K), "W_V": (D, D)}


def instance(seed):
    source = generator(23, seed)
    params = {n: torch.randn(*s, generator=source, dtype=torch.float64) for n, s in SHAPES.items()}
    X, target = torch.randn(2, L, D, generator=source, dtype=torch.float64).unbind(0)
    return X, target, params


def layernorm(x):
    x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1]) ** 0.5


def attention(X, params):
    scores = X @ params["W_Q"] @ params["W_K"].T @ X.T / K**0.5
    return scores.softmax(-1) @ X @ params["W_V"]


def block(X, params):
    Y = layernorm(X + attention(X, params))
    return layernorm(Y + torch.relu(Y @ params["W_1"]) @ params["W_2"])


def derivatives(function, X, params, names):
    """∂F/∂W and ∂vec_r(∂F/∂W)/∂vec_r(W′)ᵀ by autograd."""
    leaves = tuple(params[n] for n in names)

    def f(*values):
        return function(X, params | dict(zip(names, values, strict=True)))

    def first(*values):
        found = jacobian(f, values, create_graph=True)
        return tuple(j.reshape(-1) for j in found)

    J = {n: j.detach().reshape(L * D, -1) for n, j in zip(names, first(*leaves), strict=True)}
    second = jacobian(first, leaves)
    H = {
        (a, b): second[i][j].reshape(-1, params[b].numel())
        for i, a in enumerate(names)
        for j, b in enumerate(names)
    }
    return J, H


def relative(found, expected):
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300))


@pytest.mark.parametrize("seed", some([0, 1], 1))
def test_theorem_4_and_all_25_pairs_of_theorem_5(seed):
    X, _, params = instance(seed)
    J, H = derivatives(block, X, params, list(SHAPES))
    here = theorems.PostNormBlock(X, params)
    torch.testing.assert_close(here.output, block(X, params), rtol=1e-13, atol=1e-13)
    for name, found in theorems.block_jacobians_theorem4(here).items():
        assert relative(found, J[name]) < 1e-12
    found = theorems.block_second_derivatives_theorem5(here)
    assert set(found) == set(H)
    largest = max(float(expected.abs().max()) for expected in H.values())
    for pair, expected in H.items():
        assert found[pair].shape == expected.shape
        assert float((found[pair] - expected).abs().max()) < 1e-12 * largest
    # ξ_11 = ξ_22 = 0, yet these second derivatives are not: the norm bends
    for name in ("W_1", "W_2"):
        assert float(found[name, name].norm()) > 1e-3
    # H(i, j) is H(j, i) after exchanging rows, not as a matrix
    assert found["W_1", "W_Q"].shape != found["W_Q", "W_1"].shape
    swapped = heads.exchanged(found["W_1", "W_Q"], L * D)
    assert relative(swapped, found["W_Q", "W_1"]) < 1e-12


def test_second_derivatives_of_the_head():
    X, _, params = instance(2)
    J, H = derivatives(attention, X, params, ["W_Q", "W_K", "W_V"])
    at = heads.head(X, params)
    for name, found in heads.head_jacobians(at).items():
        assert relative(found, J[name]) < 1e-12
    found = heads.head_second_derivatives(at)
    for pair, expected in H.items():
        if pair == ("W_V", "W_V"):
            assert float(found[pair].abs().max()) == float(expected.abs().max()) == 0
        else:
            assert relative(found[pair], expected) < 1e-12


def test_printed_forms_are_wrong():
    X, target, params = instance(3)
    at, here = heads.head(X, params), theorems.PostNormBlock(X, params)
    assert relative(heads.head_key_jacobian_as_printed(at), heads.head_jacobians(at)["W_K"]) > 0.3
    right = heads.head_second_derivatives(at)
    for pair, printed in heads.head_second_derivatives_as_printed(at).items():
        if pair != ("W_V", "W_V"):
            assert relative(printed, right[pair]) == pytest.approx(1 - 2 / (L * D))
    right = theorems.block_second_derivatives_theorem5(here)
    for pair, printed in theorems.block_second_derivatives_theorem5_as_printed(here).items():
        assert relative(printed, right[pair]) > 0.3
    right = theorems.block_functional_theorem5(here, target)
    for pair, printed in theorems.block_functional_theorem5_as_printed(here, target).items():
        assert relative(printed, right[pair]) == pytest.approx(L * D / 2 - 1)


def test_uniform_attention_does_not_make_second_derivatives_vanish():
    """The remark that Φ_VQ = 0 at uniform attention freezes A: at W_Q = 0 A is uniform, Φ_VQ is not zero."""
    X, _, params = instance(4)
    at = heads.head(X, params | {"W_Q": torch.zeros(D, K, dtype=torch.float64)})
    torch.testing.assert_close(at.A, torch.full_like(at.A, 1 / L))
    assert float(heads.head_second_derivatives(at)["W_V", "W_Q"].norm()) > 0.1


def test_w2_equal_to_zero():
    """The printed bound √d_ff ‖W_2‖ for ξ_21 would be 0; the derivative is not."""
    X, _, params = instance(5)
    params = params | {"W_2": torch.zeros(M, D, dtype=torch.float64)}
    found = theorems.block_second_derivatives_theorem5(theorems.PostNormBlock(X, params))
    _, H = derivatives(block, X, params, ["W_1", "W_2"])
    assert relative(found["W_2", "W_1"], H["W_2", "W_1"]) < 1e-12
    assert float(H["W_2", "W_1"].norm()) > 0.1


def test_contracted_theorem_5_is_the_functional_part_of_the_stack():
    X, target, params = instance(6)
    arch = Architecture(num_heads=1, norm="post", norm_eps=0.0, activation="relu", causal=False)
    tape = block_tape(X[None], params, arch)
    found = StackCurvature(tape, lambda z: squared_error_objective(z, target[None]))
    names = list(SHAPES)
    total = hessian(
        lambda *values: (block(X, dict(zip(names, values, strict=True))) - target).square().mean(),
        tuple(params.values()),
    )
    functional = theorems.block_functional_theorem5(theorems.PostNormBlock(X, params), target)
    outer, by_source = found.ggn(), found.sources()
    assert set(by_source) == {
        "attention.core", "attention.bilinear", "ln1", "ffn.activation", "ffn.bilinear", "ln2",
    }  # fmt: skip
    assert float(by_source["ffn.activation"].matrix.abs().max()) == 0
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            expected = total[i][j].reshape(params[a].numel(), -1)
            scale = float(expected.abs().max())
            assert float((found.hessian()[a, b] - expected).abs().max()) < 1e-12 * scale
            summed = sum(term[a, b] for term in by_source.values())
            assert float((summed - functional[a, b]).abs().max()) < 1e-12 * scale
            assert float((outer[a, b] + functional[a, b] - expected).abs().max()) < 1e-12 * scale


def test_rules_of_matrix_calculus():
    source = generator(1)
    A, B = (torch.randn(2, 3, generator=source, dtype=torch.float64) for _ in range(2))
    C = torch.randn(3, 4, generator=source, dtype=torch.float64)
    torch.testing.assert_close(vec(A @ C @ C.T), kron(A, C @ C.T) @ vec(C @ torch.linalg.pinv(C)))
    torch.testing.assert_close(vec(A.T), commutation(3, 2, A) @ vec(A))
    torch.testing.assert_close(commutation(3, 2, A).T, commutation(2, 3, A))
    torch.testing.assert_close(kron(A, B.T, C), torch.kron(torch.kron(A, B.T.contiguous()), C))
    first, second = kron_derivatives(A, C)
    torch.testing.assert_close(first, jacobian(lambda A: torch.kron(A, C), A).reshape(-1, 6))
    torch.testing.assert_close(second, jacobian(lambda C: torch.kron(A, C), C).reshape(-1, 12))
    torch.testing.assert_close(diagonal_derivative(3, A), jacobian(torch.diag, A[0]).reshape(9, 3))

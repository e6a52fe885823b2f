"""Norms against autograd on a norm written out elementwise."""

from itertools import product

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from curvescope.closed_form import norms
from curvescope.closed_form.printed import block_theorems
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator
from selection import a_half, a_third, some

KINDS = ["layernorm", "rmsnorm"]
CASES = [
    (kind, d, eps)
    for kind in KINDS
    for d in range(1, 9)
    for eps in (0.0, 1e-5, 0.3, 20.0)
    if not (kind == "layernorm" and d == 1 and eps == 0)
]


def written_out(x, gamma, beta, *, kind, eps):
    if kind == "layernorm":
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return gamma * x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 + beta


def instance(d, *stream):
    source = generator(7, d, *stream)
    draw = [torch.randn(d, generator=source, dtype=torch.float64) for _ in range(6)]
    return draw[0] * 1.5 + 0.7, *draw[1:]


def close(found, expected, scale=None, tol=1e-11):
    scale = expected.abs().max() if scale is None else scale
    assert found.shape == expected.shape
    assert bool((found - expected).abs().max() <= tol * scale + 1e-300), (found, expected)


@pytest.mark.parametrize("trial", some(range(3), 1))
@pytest.mark.parametrize(("kind", "d", "eps"), a_third(CASES, shift=0))
def test_derivatives_against_autograd(kind, d, eps, trial):
    x, gamma, beta, g, dx, dgamma = instance(d, trial)

    def f(x, gamma):
        return written_out(x, gamma, beta, kind=kind, eps=eps)

    at = norms.norm_point(x, kind=kind, eps=eps)
    unit = 1 / at.sigma.item()
    close(norms.norm_output(at, gamma, beta), f(x, gamma), scale=1.0)
    close(norms.norm_jacobian(at, gamma), jacobian(lambda x: f(x, gamma), x), scale=unit)
    close(at.apply(dx), at.jacobian @ dx, scale=unit)
    second = torch.stack([hessian(lambda x, a=a: f(x, gamma)[a], x) for a in range(d)])
    close(norms.norm_second_derivative(at, gamma), second, scale=unit**2)
    (xx, xg), (_, gg) = hessian(lambda x, gamma: f(x, gamma) @ g, (x, gamma))
    close(norms.norm_curvature(at, g, gamma), xx, scale=unit**2)
    close(norms.norm_gain_curvature(at, g), xg, scale=unit)
    assert float(gg.abs().max()) == 0
    h_x, h_gamma = norms.norm_curvature_product(at, g, dx, gamma=gamma, dgamma=dgamma)
    close(h_x, xx @ dx + xg @ dgamma, scale=unit + unit**2)
    close(h_gamma, xg.T @ dx, scale=unit)


@pytest.mark.parametrize(("kind", "d", "eps"), a_half(CASES, shift=0))
def test_spectra_and_norms_are_exact(kind, d, eps):
    for trial in range(2):
        x, gamma, _, g, _, _ = instance(d, 50 + trial)
        at = norms.norm_point(x, kind=kind, eps=eps)
        J, K, S = at.jacobian, norms.norm_curvature(at, g, gamma), norms.norm_second_derivative(at)
        one, two = 1 / at.sigma.item(), 1 / at.sigma.item() ** 2
        close(norms.norm_jacobian_spectrum(at), torch.linalg.eigvalsh(J), scale=one)
        close(norms.norm_jacobian_norm(at), torch.linalg.matrix_norm(J, 2), scale=one)
        close(norms.norm_jacobian_norm(at, gamma), torch.linalg.matrix_norm(gamma[:, None] * J, 2), scale=one)
        flat = torch.linalg.matrix_norm(S.reshape(d, -1), 2)
        close(norms.norm_second_derivative_norm(at), flat, scale=two)
        flat = torch.linalg.matrix_norm((gamma[:, None, None] * S).reshape(d, -1), 2)
        # a square root of an eigenvalue that is zero up to rounding
        close(norms.norm_second_derivative_norm(at, gamma), flat, scale=two, tol=1e-7 if flat == 0 else 1e-11)
        close(norms.norm_curvature_spectrum(at, g, gamma), torch.linalg.eigvalsh(K), scale=two)
        close(norms.norm_curvature_norm(at, g, gamma), torch.linalg.matrix_norm(K, 2), scale=two)
        close(norms.norm_curvature_trace(at, g, gamma), K.trace(), scale=two)
        close(norms.norm_curvature_frobenius(at, g, gamma) ** 2, K.norm() ** 2, scale=two**2)


def test_curvature_vanishes_at_a_constant_token():
    at = norms.norm_point(torch.full((4,), 2.5, dtype=torch.float64), eps=0.1)
    g = torch.arange(4.0, dtype=torch.float64)
    assert float(norms.norm_curvature_spectrum(at, g).abs().max()) == 0
    assert float(norms.norm_curvature(at, g).abs().max()) == 0
    close(norms.norm_jacobian_spectrum(at), torch.linalg.eigvalsh(at.jacobian))


@pytest.mark.parametrize(
    ("kind", "d", "eps"), a_half([*product(KINDS, [1, 2, 3, 5], [0.2, 3.0, 0.0])], shift=0)
)
def test_supremum_over_cotangents(kind, d, eps):
    if kind == "layernorm" and d == 1:
        eps = 0.5
    x = instance(d, 3)[0]
    at = norms.norm_point(x, kind=kind, eps=eps)
    found = float(norms.norm_curvature_supremum(at))
    G = torch.randn(2000, d, generator=generator(1), dtype=torch.float64)
    G = G / G.norm(dim=1, keepdim=True)
    many = norms.NormPoint(at.x_hat.expand_as(G), at.sigma.expand(2000, 1), eps, kind)
    values = norms.norm_curvature_norm(many, G)
    assert float(values.max()) <= found * (1 + 1e-12) + 1e-15
    # alternate g ← top eigenvector of K(g) from the best start: it ends at the supremum
    g = G[values.argmax()]
    for _ in range(200):
        vals, vecs = torch.linalg.eigh(norms.norm_curvature(at, g))
        g = vecs[:, vals.abs().argmax()]
    reached = float(norms.norm_curvature_norm(at, g))
    assert reached == pytest.approx(found, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize(("kind", "d", "eps"), a_half(CASES, shift=1))
def test_identities(kind, d, eps):
    x = instance(d, 9)[0]
    at = norms.norm_point(x, kind=kind, eps=eps)
    scale = 1e-13 / at.sigma.item()
    if kind == "layernorm":
        assert float((at.jacobian @ torch.ones_like(x)).abs().max()) <= scale  # J 1 = 0
    along = eps * at.x_hat / at.sigma**3
    assert float((at.apply(at.x_hat) - along).abs().max()) <= scale  # J x̂ = ε x̂/σ³
    S = norms.norm_second_derivative(at)
    for order in [(1, 0, 2), (0, 2, 1), (2, 1, 0)]:
        assert torch.allclose(S, S.permute(order), rtol=0, atol=1e-12 / at.sigma.item() ** 2)


@pytest.mark.parametrize("d", [2, 3, 4, 7])
def test_norms_of_the_paper_without_eps(d):
    """‖J‖ = 1/σ (0 at d = 2); ‖H‖ = √(max(d−2, 2)/d)/σ² (0 at d = 2); rmsnorm has d − 1 for d − 2."""
    x, g = instance(d, 1)[0], instance(d, 2)[3]
    at = norms.norm_point(x)
    s = float(at.sigma)
    J = 1 / s if d > 2 else 0.0
    H = (max(d - 2, 2) / d) ** 0.5 / s**2 if d > 2 else 0.0
    assert float(norms.norm_jacobian_norm(at)) == pytest.approx(J, rel=1e-13, abs=0)
    assert float(norms.norm_second_derivative_norm(at)) == pytest.approx(H, rel=1e-13, abs=0)
    assert float(torch.linalg.matrix_norm(norms.norm_curvature(at, g), 2)) <= 2 / 3**0.5 * float(g.norm()) / (
        d**0.5 * s**2
    ) * (1 + 1e-12)
    rms = norms.norm_point(x, kind="rmsnorm")
    H = (max(d - 1, 2) / d) ** 0.5 / float(rms.sigma) ** 2
    assert float(norms.norm_second_derivative_norm(rms)) == pytest.approx(H, rel=1e-13)


def test_many_tokens_at_once_are_one_at_a_time():
    X, G = torch.randn(2, 3, 2, 5, generator=generator(5), dtype=torch.float64).unbind(0)
    at = norms.norm_point(X, eps=0.1)
    for i, j in [(0, 0), (2, 1)]:
        single = norms.norm_point(X[i, j], eps=0.1)
        for name in ("norm_curvature", "norm_curvature_spectrum", "norm_curvature_frobenius"):
            function = getattr(norms, name)
            close(function(at, G)[i, j], function(single, G[i, j]))
        close(norms.norm_second_derivative(at)[i, j], norms.norm_second_derivative(single))


def stacked(L, d, *stream):
    return torch.randn(L, d, generator=generator(11, L, d, *stream), dtype=torch.float64) * 1.7 + 0.4


def layernorm(X):
    return written_out(X, 1.0, 0.0, kind="layernorm", eps=0.0)


@pytest.mark.parametrize(("L", "d"), [(3, 4), (2, 3), (3, 3), (1, 5)])
def test_theorems_2_and_3(L, d):
    X, n = stacked(L, d), L * d
    J = jacobian(layernorm, X).reshape(n, n)
    H = jacobian(lambda X: jacobian(layernorm, X, create_graph=True), X).reshape(n * n, n)
    close(block_theorems.layernorm_jacobian_theorem2(X), J)
    close(block_theorems.layernorm_second_derivative_theorem3(X), H)
    per_token = norms.norm_second_derivative(norms.norm_point(X))
    blocks = H.reshape(L, d, L, d, L, d)
    for i in range(L):
        close(per_token[i], blocks[i, :, i, :, i])


def test_theorem_3_as_printed_is_wrong():
    X = stacked(3, 3)
    right = block_theorems.layernorm_second_derivative_theorem3(X)
    printed = block_theorems.layernorm_second_derivative_theorem3_as_printed(X)
    assert float((printed - right).norm() / right.norm()) > 1
    with pytest.raises(ShapeError, match="square"):
        block_theorems.layernorm_second_derivative_theorem3_as_printed(stacked(2, 3))


def test_jacobian_without_the_variance_term_is_wrong():
    """(P ⊗ I) G alone: the published stub. Its error is of the size of J, its rank is too large."""
    L, d = 3, 5
    X = stacked(L, d)
    J = jacobian(layernorm, X).reshape(L * d, L * d)
    at = norms.norm_point(X)
    centering = torch.eye(d, dtype=X.dtype) - 1 / d
    stub = torch.block_diag(*[centering / s for s in at.sigma])
    assert float(torch.linalg.matrix_norm(stub - J, 2) / torch.linalg.matrix_norm(J, 2)) > 0.5
    assert int(torch.linalg.matrix_rank(stub)) == L * (d - 1)
    assert int(torch.linalg.matrix_rank(block_theorems.layernorm_jacobian_theorem2(X))) == L * (d - 2)


def test_errors_say_what_to_do():
    with pytest.raises(UsageError, match="eps > 0"):
        norms.norm_point(torch.ones(3, dtype=torch.float64))
    with pytest.raises(UsageError, match="layernorm"):
        norms.norm_point(torch.ones(3), kind="batchnorm")  # pyright: ignore
    with pytest.raises(UsageError, match="eps ≥ 0"):
        norms.norm_point(torch.ones(3), eps=-1.0)
    with pytest.raises(UsageError, match="variance"):
        block_theorems.layernorm_jacobian_theorem2(torch.ones(2, 3, dtype=torch.float64))

"""Activations and feed-forward layers against autograd."""

import pytest
import torch
from closed_form_block_oracle import ACTIVATIONS
from torch.autograd.functional import hessian, jacobian

from curvescope.closed_form import ffn
from curvescope.closed_form.block_matrix import symmetric
from curvescope.closed_form.ffn import statistics as ffn_statistics
from curvescope.closed_form.ffn.layer import activation
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.seeds import generator
from selection import pairs

NAMES = ["relu", "gelu", "gelu_tanh", "silu", "identity", "swiglu", "geglu"]
L, D, M, OUT = 3, 2, 4, 3


def layer(name, *, biases=True, seed=0):
    source = generator(3, seed)

    def draw(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    gated = name in ("swiglu", "geglu")
    inputs = ["g", "u"] if gated else ["1"]
    params = {}
    for role in inputs:
        params[f"W_{role}"] = draw(D, M)
        if biases:
            params[f"b_{role}"] = draw(M)
    params["W_2"] = draw(M, OUT)
    if biases:
        params["b_2"] = draw(OUT)
    root = draw(L, OUT, OUT)
    return draw(L, D), params, draw(L, OUT), root @ root.mT, draw(L * OUT, L * OUT)


def written_out(x, params, name):
    act = ACTIVATIONS.get(name, name)

    def affine(role):
        h = x @ params[f"W_{role}"]
        return h + params[f"b_{role}"] if f"b_{role}" in params else h

    z = act(affine("g")) * affine("u") if "W_g" in params else act(affine("1"))
    y = z @ params["W_2"]
    return y + params["b_2"] if "b_2" in params else y


def oracle(x, params, name, g, B):
    """Jᵀ B J and ∇²⟨g, y⟩ over (x, parameters in order), from autograd."""
    names = list(params)
    leaves = (x, *params.values())

    def f(x, *values):
        return written_out(x, dict(zip(names, values, strict=True)), name)

    J = torch.cat([j.reshape(L * OUT, -1) for j in jacobian(f, leaves)], dim=1)
    rows = hessian(lambda *a: (f(*a) * g).sum(), leaves)
    K = torch.cat(
        [
            torch.cat([k.reshape(a.numel(), b.numel()) for k, b in zip(row, leaves, strict=True)], 1)
            for row, a in zip(rows, leaves, strict=True)
        ]
    )
    return J, J.T @ B @ J, K


def close(found, expected, tol=1e-12):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tol * max(float(expected.abs().max()), 1e-300)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_activations(name):
    a = activation(name)
    h = torch.linspace(-6, 6, 101, dtype=torch.float64) + 0.013
    h.requires_grad_()
    value = ACTIVATIONS[name](h)
    torch.testing.assert_close(a.value(h), value, rtol=1e-12, atol=1e-14)
    (first,) = torch.autograd.grad(value.sum(), h, create_graph=True)
    torch.testing.assert_close(a.first(h), first, rtol=1e-11, atol=1e-14)
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.sum(), h, materialize_grads=True)
        torch.testing.assert_close(a.second(h), second, rtol=1e-10, atol=1e-13)
    else:
        assert float(a.second(h).abs().max()) == 0


def test_tanh_gelu_is_not_the_derivative_of_gelu():
    """Mixing the tanh form of Φ with the exact φ, as one published stub does, is off by 10⁻⁴."""
    h = torch.linspace(-3, 3, 301, dtype=torch.float64)
    cdf = activation("gelu_tanh").value(h) / h.where(h != 0, torch.ones_like(h))
    mixed = cdf + h * torch.exp(-h * h / 2) / (2 * torch.pi) ** 0.5
    for name in ("gelu", "gelu_tanh"):
        wrong = (mixed - activation(name).first(h))[h != 0].abs().max()
        assert float(wrong) > 1e-4


@pytest.mark.parametrize(("name", "biases"), pairs(NAMES, [True, False], every=2))
def test_all_blocks(name, biases):
    for seed in range(2):
        x, params, g, B, root = layer(name, biases=biases, seed=seed)
        full = root @ root.T
        at = ffn.ffn_point(x, params, activation=activation(name))
        close(ffn.ffn_output(at), written_out(x, params, name))
        assert list(at.sizes) == ["x", *params]
        curvatures = {
            0.7: 0.7 * torch.eye(L * OUT, dtype=torch.float64),
            B: torch.block_diag(*B),
            full.reshape(L, OUT, L, OUT): full,
        }
        for given, dense in curvatures.items():
            J, outer, functional = oracle(x, params, name, g, dense)
            close(torch.cat(list(ffn.ffn_jacobian(at).values()), dim=1), J)
            close(ffn.ffn_blocks(at, g, given, part="outer").to_dense(), outer)
            close(ffn.ffn_blocks(at, g, given, part="functional").to_dense(), functional)
            total = ffn.ffn_blocks(at, g, given)
            close(total.to_dense(), outer + functional)
            without = ffn.ffn_blocks(at, g, given, with_input=False)
            close(without.to_dense(), (outer + functional)[x.numel() :, x.numel() :])
            for a, b in without:
                torch.testing.assert_close(without[a, b], total[a, b], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("part", ["outer", "functional", "total"])
@pytest.mark.parametrize(("name", "biases"), pairs(NAMES, [False, True]))
def test_kronecker_sums_and_what_follows_without_blocks(name, biases, part):
    x, params, g, B, _ = layer(name, biases=biases, seed=5)
    at = ffn.ffn_point(x, params, activation=activation(name))
    for given in (0.3, B):
        expected = ffn.ffn_blocks(at, g, given, part=part, with_input=False)
        scale = float(expected.matrix.abs().max())
        found = ffn_statistics.ffn_parameter_blocks(at, g, given, part=part)
        close(found.to_dense(), expected.to_dense())
        diagonal = ffn_statistics.ffn_diagonal(at, g, given, part=part)
        trace = ffn_statistics.ffn_trace(at, g, given, part=part)
        norms = ffn_statistics.ffn_frobenius(at, g, given, part=part)
        for role, value in params.items():
            block = expected[role, role]
            assert diagonal[role].numel() == value.numel()
            assert float((diagonal[role].flatten() - block.diagonal()).abs().max()) <= 1e-12 * scale
            assert abs(float(trace[role] - block.trace())) <= 1e-11 * scale
        assert len(norms) == len(params) * (len(params) + 1) // 2
        for pair, norm in norms.items():
            assert abs(float(norm - expected[pair].norm())) <= 1e-11 * scale


@pytest.mark.parametrize("name", NAMES)
def test_activation_source_is_what_the_second_derivative_makes(name):
    x, params, g, _, _ = layer(name)
    at = ffn.ffn_point(x, params, activation=activation(name))
    sources = {k: symmetric(b, at.sizes, x).matrix for k, b in ffn.ffn_curvature(at, g).items()}
    if name in ("relu", "identity"):
        assert float(sources["activation"].abs().max()) == 0
    else:
        # the same layer with the activation replaced by its first-order expansion at these hidden values
        hidden = x @ params["W_g" if "W_g" in params else "W_1"] + params["b_g" if "W_g" in params else "b_1"]
        act = activation(name)
        slope, value = act.first(hidden), act.value(hidden)
        straight = lambda h: value + slope * (h - hidden)  # noqa: E731
        _, _, bilinear = oracle(x, params, straight, g, torch.eye(L * OUT, dtype=torch.float64))
        close(sources["bilinear"], bilinear)
        assert float(sources["activation"].abs().max()) > 0.1


def test_w2_block_has_no_functional_part_and_is_not_zero():
    """H(W_2, W_2) = Σ z zᵀ ⊗ B: a published stub returns zeros, another 'Jᵀ diag(residual) J'."""
    x, params, g, B, _ = layer("gelu")
    at = ffn.ffn_point(x, params, activation=activation("gelu"))
    exact = sum(torch.kron(torch.outer(z, z), b) for z, b in zip(at.z, B, strict=True))
    close(ffn.ffn_blocks(at, g, B)["W_2", "W_2"], exact)
    assert float(ffn.ffn_blocks(at, g, B, part="functional")["W_2", "W_2"].abs().max()) == 0
    assert float(exact.norm()) > 1


def test_relu_curvature_between_w1_and_w2_is_bilinear_only():
    """For ReLU the functional Hessian is not zero: (W_1, W_2) is δ_pq Σ x_ia 1_{h>0} g_io."""
    x, params, g, B, _ = layer("relu")
    at = ffn.ffn_point(x, params, activation=activation("relu"))
    found = ffn.ffn_blocks(at, g, B, part="functional")
    assert float(found["W_1", "W_1"].abs().max()) == 0
    assert float(found["W_1", "W_2"].abs().max()) > 0.1


def test_errors_say_what_to_do():
    x, params, g, B, _ = layer("gelu")
    with pytest.raises(UsageError, match="gelu"):
        activation("gelo")
    with pytest.raises(UsageError, match="W_g"):
        ffn.ffn_point(x, params, activation=activation("swiglu"))
    with pytest.raises(ShapeError, match="inputs × outputs"):
        ffn.ffn_point(x, params | {"W_1": params["W_1"].T}, activation=activation("gelu"))
    at = ffn.ffn_point(x, params, activation=activation("gelu"))
    with pytest.raises(ShapeError, match="loss curvature"):
        ffn.ffn_blocks(at, g, B[:, :2])
    with pytest.raises(ShapeError, match="ffn_blocks"):
        ffn_statistics.ffn_diagonal(at, g, torch.zeros(L, OUT, L, OUT, dtype=torch.float64))
    with pytest.raises(UsageError, match="transpose"):
        ffn_statistics.ffn_kronecker_block(at, g, B, ("W_2", "W_1"))
    with pytest.raises(UsageError, match="part"):
        ffn_statistics.ffn_diagonal(at, g, B, part="all")  # pyright: ignore
    with pytest.raises(UsageError, match="W_1"):
        ffn.ffn_blocks(at, g, B)["W_3", "W_1"]

"""Third derivatives of norms and the softmax against autograd on the same maps written out."""

import pytest
import torch
from torch.func import jvp

from curvescope.closed_form import norms
from curvescope.closed_form import softmax as soft
from curvescope.core.errors import ShapeError
from curvescope.core.seeds import generator
from selection import a_half, a_third

CASES = [
    (kind, d, eps)
    for kind in ("layernorm", "rmsnorm")
    for d in (1, 2, 3, 5)
    for eps in (0.0, 1e-5, 0.3)
    if not (kind == "layernorm" and d == 1 and eps == 0)
]
TOL = 1e-12


def draw(n, *shape, stream=0):
    source = generator(11, *shape, stream)
    return [torch.randn(*shape, generator=source, dtype=torch.float64) for _ in range(n)]


def written_out(x, gamma=1.0, beta=0.0, *, kind, eps):
    if kind == "layernorm":
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return gamma * x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 + beta


def along(f, *directions):
    """Derivative of f along each direction in turn, one forward mode inside the other."""
    if not directions:
        return f
    first, *rest = directions
    return along(lambda *x: jvp(f, x, first)[1], *rest)


def close(found, expected, scale):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= TOL * scale, (found, expected)


def norm_case(kind, d, eps):
    x, *rest = draw(7, 3, d)
    x = 1.5 * x + 0.7
    at = norms.norm_point(x, kind=kind, eps=eps)
    unit = 1 / float(at.sigma.min())
    return x, at, max(unit, unit**3), rest


@pytest.mark.parametrize(("kind", "d", "eps"), a_third(CASES, shift=0))
def test_norm_along_directions(kind, d, eps):
    x, at, scale, (u, v, w, *_) = norm_case(kind, d, eps)
    size = 10 * scale * float(u.abs().max() * v.abs().max() * w.abs().max())

    def f(x):
        return written_out(x, kind=kind, eps=eps)

    close(norms.norm_second_along(at, u, v), along(f, (u,), (v,))(x), size)
    close(norms.norm_third_along(at, u, v, w), along(f, (u,), (v,), (w,))(x), size)


@pytest.mark.parametrize(("kind", "d", "eps"), a_third(CASES, shift=1))
def test_norm_with_a_moving_gain_and_a_cotangent(kind, d, eps):
    x, at, scale, (dx, g, more, *_) = norm_case(kind, d, eps)
    gamma, dgamma = draw(2, d, stream=1)
    delta = (dx, dgamma)
    size = 30 * scale * float(dx.abs().max()) ** 2 * float(g.abs().max() + more.abs().max())

    def f(x, gamma):
        return written_out(x, gamma, 0.4, kind=kind, eps=eps)

    found = norms.norm_third_derivative(at, dx, gamma=gamma, dgamma=dgamma)
    close(found, along(f, delta, delta, delta)(x, gamma), 30 * size)
    still = norms.norm_third_derivative(at, dx, gamma=gamma)
    close(still, along(lambda x: f(x, gamma), (dx,), (dx,), (dx,))(x), 30 * size)
    leaves = x.clone().requires_grad_(), gamma.expand_as(x).clone().requires_grad_()
    s = (g * along(f, (dx, dgamma.expand_as(x)), (dx, dgamma.expand_as(x)))(*leaves)).sum()
    expected = torch.autograd.grad(s, leaves)
    for one, two in zip(
        norms.norm_third_product(at, g, dx, gamma=gamma, dgamma=dgamma), expected, strict=True
    ):
        close(one, two, 30 * size)
    no_gain = norms.norm_third_product(at, g, dx, gamma=gamma)[0]
    close(no_gain, norms.norm_third_along(at, dx, dx, gamma * g), size)


@pytest.mark.parametrize(("kind", "d", "eps"), CASES)
def test_norm_tensor_is_every_contraction_and_symmetric(kind, d, eps):
    _, at, scale, (u, v, w, *_) = norm_case(kind, d, eps)
    T = norms.norm_third_tensor(at)
    assert T.shape == (3, d, d, d, d)
    for order in ((0, 2, 1, 3, 4), (0, 1, 3, 2, 4), (0, 1, 2, 4, 3)):
        close(T.permute(order), T, scale)
    size = 10 * scale * float(u.abs().max() * v.abs().max() * w.abs().max())
    found = torch.einsum("nabce,nb,nc,ne->na", T, u, v, w)
    close(norms.norm_third_along(at, u, v, w), found, size)
    (gamma,) = draw(1, d, stream=2)
    close(norms.norm_third_tensor(at, gamma), gamma[:, None, None, None] * T, scale)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_is_homogeneous_without_eps(kind):
    """x̂(cx) = x̂(x), so by Euler D³x̂[x,u,v] = −2 D²x̂[u,v], and D³ falls with the third power of the scale."""
    x, u, v, w = draw(4, 2, 6)
    at = norms.norm_point(x, kind=kind)
    expected = -2 * norms.norm_second_along(at, u, v)
    close(norms.norm_third_along(at, x, u, v), expected, 10 * float(expected.abs().max()))
    far = norms.norm_third_along(norms.norm_point(10 * x, kind=kind), u, v, w)
    near = norms.norm_third_along(at, u, v, w)
    close(1000 * far, near, 10 * float(near.abs().max()))


@pytest.mark.parametrize(("kind", "d", "eps"), a_half(CASES, shift=0))
def test_norm_supremum_is_attained_and_never_exceeded(kind, d, eps):
    _, at, _, _ = norm_case(kind, d, eps)
    bound, slack = norms.norm_third_supremum(at), 1e-12 * at.sigma[:, 0] ** -3
    for trial in range(20):
        u, v, w = (r / r.norm(dim=-1, keepdim=True) for r in draw(3, 3, d, stream=trial + 5))
        for three in ((u, v, w), (u, u, v), (u, u, u)):
            assert bool((norms.norm_third_along(at, *three).norm(dim=-1) <= bound + slack).all())
    (u,) = draw(1, 3, d, stream=3)
    u = norms.project(u, kind)
    if at.multiplicity:
        x = at.x_hat / at.x_hat.norm(dim=-1, keepdim=True)
        u = u - x * (x * u).sum(-1, keepdim=True)
        assert torch.allclose(bound, 3 / (d * at.sigma[:, 0] ** 3), rtol=1e-14)
    if kind == "layernorm" and d == 1:
        assert not bound.any()
        return
    u = u / u.norm(dim=-1, keepdim=True)
    assert bool(((norms.norm_third_along(at, u, u, u).norm(dim=-1) - bound).abs() <= slack).all())


def probabilities(*shape, sharp=1.0):
    z, *rest = draw(6, *shape)
    return (sharp * z).softmax(-1), sharp * z, rest


@pytest.mark.parametrize("sharp", [0.5, 1.0, 8.0])
def test_softmax_and_logsumexp_along_directions(sharp):
    p, z, (u, v, w, q, g) = probabilities(3, 5, sharp=sharp)
    directions = [(u,), (v,), (w,), (q,)]

    def softmax(z):
        e = z.exp()
        return e / e.sum(-1, keepdim=True)

    def log_sum(z):
        return z.exp().sum(-1).log()

    close(soft.softmax_second_along(p, u, v), along(softmax, *directions[:2])(z), 10)
    close(soft.softmax_third_along(p, u, v, w), along(softmax, *directions[:3])(z), 100)
    close(soft.logsumexp_third(p, u, v, w), along(log_sum, *directions[:3])(z), 100)
    close(soft.logsumexp_fourth(p, u, v, w, q), along(log_sum, *directions)(z), 1000)
    leaf = z.clone().requires_grad_()
    s = (g * along(softmax, (u,), (v,))(leaf)).sum()
    close(soft.softmax_third_along(p, u, v, g), torch.autograd.grad(s, leaf)[0], 100)
    found = soft.cumulants(p, u)
    for k, name in enumerate(("mean", "variance", "third", "fourth"), start=1):
        close(getattr(found, name), along(log_sum, *[(u,)] * k)(z), 1000)
    close(found.third, soft.logsumexp_third(p, u, u, u), 100)
    close(found.fourth, soft.logsumexp_fourth(p, u, u, u, u), 1000)


def test_softmax_tensors_hold_every_contraction():
    p, _, (u, v, w, q, _) = probabilities(2, 4)
    T3, T4 = soft.logsumexp_third_tensor(p), soft.softmax_third_tensor(p)
    close(torch.einsum("nabc,na,nb,nc->n", T3, u, v, w), soft.logsumexp_third(p, u, v, w), 10)
    close(torch.einsum("nabce,na,nb,nc,ne->n", T4, u, v, w, q), soft.logsumexp_fourth(p, u, v, w, q), 100)
    for T in (T3, T4):
        close(T.transpose(1, -1), T, 1.0)
        close(T.transpose(1, 2), T, 1.0)
        close(T.sum(-1), torch.zeros_like(T.sum(-1)), 1.0)  # a shift of all logits changes nothing


@pytest.mark.parametrize("q", [1e-13, 0.1])
def test_cumulants_keep_their_digits(q):
    """Outcomes 1 and 0, far from the origin: κ₃ = q(1−q)(1−2q), κ₄ = q(1−q)(1−6q(1−q)) to the last digits."""
    q = torch.tensor(q, dtype=torch.float64)
    p, u = torch.stack([q, 1 - q]), torch.tensor([1.0, 0.0], dtype=torch.float64) + 2.0**30
    found, v = soft.cumulants(p, u), q * (1 - q)
    assert abs(float(found.variance / v - 1)) < 1e-12
    assert abs(float(found.third / (v * (1 - 2 * q)) - 1)) < 1e-12
    assert abs(float(found.fourth / (v * (1 - 6 * v)) - 1)) < 1e-12


def test_wrong_widths_are_refused():
    p, _, (u, *_) = probabilities(2, 4)
    with pytest.raises(ShapeError, match="over 4 entries"):
        soft.cumulants(p, u[:, :3])

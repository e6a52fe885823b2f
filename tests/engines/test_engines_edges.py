"""At the edges of a product: vectors of any kind, a caller's modes, modules that hold parameters twice."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.errors import CurvescopeError


def drawn(make, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


X, Y = drawn(lambda: (torch.randn(6, 8).double(), torch.randint(0, 5, (6,))))


def net() -> nn.Module:
    return drawn(lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)).double())


def direction(operator: cs.LinearOperator) -> Tensor:
    return torch.randn(operator.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


# ------------------------------------------------------------------------------------ parameters held twice


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.o = nn.Linear(8, 6), nn.Linear(6, 5)
        self.f = partial(F.linear, weight=self.l.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.tanh(self.f(x)))


class Turned(Partial):
    """A view of a parameter, in a list."""

    def __init__(self) -> None:
        super().__init__()
        turned = [self.double().l.weight.T]
        self.f = lambda x: x @ turned[0]


@pytest.mark.parametrize("make", [Partial, Turned])
def test_the_loss_elsewhere_of_a_module_that_holds_parameters_twice_is_refused(make):
    m = drawn(lambda: make().double())
    P = cs.Problem(m, (X, Y))
    elsewhere = P.at({"l.weight": 2 * m.l.weight.detach()})
    with pytest.raises(
        cs.UsageError, match=r"in a closure or a list.* cannot be evaluated at other parameters"
    ):
        elsewhere.loss_value()
    with pytest.raises(
        cs.UsageError, match=r"in a closure or a list.* cannot be evaluated at other parameters"
    ):
        elsewhere.gradient()


def test_the_loss_elsewhere_where_the_parameters_held_twice_stay():
    m = drawn(lambda: Partial().double())
    P, moved = cs.Problem(m, (X, Y)), {"o.weight": 2 * m.o.weight.detach(), "l.weight": m.l.weight.detach()}
    found = P.at(moved).loss_value()
    m.o.weight.data.mul_(2)
    assert found == pytest.approx(P.loss_value(), rel=1e-14)


# ------------------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_a_call_does_not_count(dtype):
    P = cs.Problem(net().float(), (X.float(), Y))
    fresh = (cs.Hessian(P), cs.GGN(P, engine="autograd"), cs.MonteCarloFisher(P, seed=0))
    v = direction(fresh[0]).float()
    want = [operator @ v for operator in fresh]
    with torch.autocast("cpu", dtype=dtype):
        inside = (cs.Hessian(P), cs.GGN(P, engine="autograd"), cs.MonteCarloFisher(P, seed=0))
        found = [operator @ v for operator in inside]
        value, gradient = P.loss_value(), P.gradient()
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
    assert value == P.loss_value()
    assert torch.equal(gradient, P.gradient())


# ---------------------------------------------------------------------------------------------------- terms


@pytest.mark.parametrize("how", ["in place", "through NumPy"])
def test_weights_that_are_written_to_are_counted_anew(how):
    w = torch.ones(6, dtype=torch.float64)
    P = cs.Problem(net(), [cs.Batch(X, Y, w)])
    H = cs.Hessian(P)
    v = direction(H)
    for _ in range(3):
        H @ v
    if how == "in place":
        w[:2] = 5.0
    else:
        w.numpy()[:2] = 5.0
    fresh = cs.Problem(net(), [cs.Batch(X, Y, w.clone())])
    assert P.num_terms == fresh.num_terms == 14
    assert torch.equal(H @ v, cs.Hessian(fresh) @ v)
    assert torch.equal(cs.Hessian(P) @ v, cs.Hessian(fresh) @ v)


# -------------------------------------------------------------------------------------------------- vectors


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_transforms_of_torch_func_are_refused(transform):
    H = cs.Hessian(cs.Problem(net(), (X, Y)))
    v = direction(H)
    uses = {
        "vmap": lambda: torch.func.vmap(lambda u: H @ u)(torch.stack([v, v])),
        "grad": lambda: torch.func.grad(lambda u: (H @ u).sum())(v),
        "jvp": lambda: torch.func.jvp(lambda u: H @ u, (v,), (v,)),
    }
    with pytest.raises(cs.UsageError, match="expected a plain vector, got one inside a transform"):
        uses[transform]()


KINDS = {
    "big endian": lambda v: v.astype(">f8"),
    "long double": lambda v: v.astype(np.longdouble),
    "backwards": lambda v: v[::-1].copy()[::-1],
    "float32 of torch": lambda v: torch.tensor(v, dtype=torch.float32),
    "integers of torch": lambda v: torch.tensor(v, dtype=torch.int64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_real_numbers_of_any_kind_are_a_vector(kind):
    H = cs.Hessian(cs.Problem(net(), (X, Y)))
    v = np.round(8 * direction(H).numpy())
    assert torch.equal(torch.as_tensor(H @ KINDS[kind](v)), H @ torch.tensor(v))


def test_numpy_and_torch_are_rounded_alike():
    H = cs.Hessian(cs.Problem(net().float(), (X.float(), Y)))
    v = direction(H)
    assert torch.equal(H @ v, torch.from_numpy(H @ v.numpy()))
    assert (H @ v).dtype == torch.float32


@pytest.mark.parametrize("entry", [float("nan"), float("inf")])
def test_a_vector_that_is_not_finite_is_named(entry):
    H = cs.Hessian(cs.Problem(net(), (X, Y)))
    v = direction(H)
    v[3] = entry
    with pytest.raises(cs.UsageError, match="expected a vector of finite numbers"):
        H @ v


# ------------------------------------------------------------------------------------------- batch norm


class Normed(nn.Module):
    """Batch norm with the statistics of the batch, in one of the ways that lead there."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.e, self.o = way, nn.Linear(8, 6), nn.Linear(6, 5)
        self.b = nn.BatchNorm1d(6, track_running_stats=way != "no statistics")

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        if self.way == "functional":
            return self.o(torch.tanh(F.batch_norm(h, None, None, training=True)))
        if self.way == "train mode inside":
            self.b.training = True
        return self.o(torch.tanh(self.b(h)))


@pytest.mark.filterwarnings("ignore:batch norm uses its running statistics")
@pytest.mark.filterwarnings("ignore:batch norm without running statistics uses those of each batch")
@pytest.mark.parametrize("way", ["no statistics", "functional", "train mode inside"])
def test_statistics_of_the_batch(way):
    m = drawn(lambda: Normed(way).double())
    P = cs.Problem(m, (X, Y))
    H = cs.Hessian(P)
    v = direction(H)
    leaves = {name: p.detach().requires_grad_() for name, p in m.named_parameters()}
    loss = F.cross_entropy(torch.func.functional_call(m, leaves, X), Y)
    kept = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, **kept)
    inner = sum((g * t).sum() for g, t in zip(first, P.space().scatter(v).values(), strict=True))
    second = torch.autograd.grad(inner, list(leaves.values()), **kept)
    want = P.space().gather(dict(zip(leaves, second, strict=True)))
    for _ in range(4):
        assert relative(H @ v, want) < 1e-12


def test_weights_that_became_undefined_are_named():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    H = cs.Hessian(cs.Problem(net, (x, x[:, :2].clone()), loss="mse"))
    v = torch.ones(H.shape[1], dtype=torch.float64)
    H @ v
    net[2].weight.data[0, 0] = torch.nan
    with pytest.raises(CurvescopeError, match=r"NaN or infinite weights in 2\.weight"):
        H @ v

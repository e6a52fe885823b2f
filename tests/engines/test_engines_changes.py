# ruff: noqa: E501
"""Whatever changes about a model or its data between two products, the second is of what there is then.

Each case makes a small model, takes products of its Hessian and its GGN until they are replayed, changes one
thing the way people do, and compares with the second derivative of the user's own module, taken by double
backward without any code of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
from selection import some

V, D, T = 7, 4, 5
SCALES = {"now": 1.0}
GAIN = 1.0


def half(x: Tensor) -> Tensor:
    return x / 2


class Net(nn.Module):
    """Everything that a forward pass may depend on, besides parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b, self.u = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, V)
        self.norm, self.act = nn.LayerNorm(D), nn.GELU()
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("keep", torch.ones(D, dtype=torch.bool))
        self.register_buffer("shift", torch.zeros(D, dtype=torch.int64))
        self.register_buffer("cache", torch.ones(D), persistent=False)
        self.plain = torch.ones(D, dtype=torch.float64)
        self.power, self.flags = 1.0, {"square": False}
        self.steps: list[Any] = [torch.tanh]
        self.tensors = [torch.ones(D, dtype=torch.float64)]
        self.fn: Callable[[Tensor], Tensor] = torch.sin
        self.options = Options()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.e(x)) * self.scale * self.keep * self.cache + self.shift
        h = self.act(self.a(h)) * self.plain * self.tensors[0] * self.power
        for step in self.steps:
            h = step(h)
        h = h**2 if self.flags["square"] else h
        return self.u(self.fn(self.b(h)) * SCALES["now"] * GAIN * self.options.gain)


class Options:
    def __init__(self) -> None:
        self.gain = 1.0


class Gated(nn.Module):
    """What a gated layer looks like, with a scale that only sometimes is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(D, D) for _ in range(3))
        self.act_fn: Any = F.silu
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.scale


class GatedMLP(Gated):
    pass


class LearnedMLP(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self._buffers["scale"]
        self.scale = nn.Parameter(torch.tensor(1.0))


class PlainMLP(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self._buffers["scale"]
        self.scale = torch.ones((), dtype=torch.float64)


class MyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.is_causal, self.scaling = nn.Linear(D, 3 * D), True, None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=self.scaling)
        return x + y.transpose(1, 2).flatten(2)


class Inner(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.e, self.inner, self.u = nn.Embedding(V, D), inner, nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.u(self.inner(self.e(x)))


@dataclass
class Case:
    """A module on data, and what is done to them."""

    make: Callable[[], nn.Module]
    change: Callable[[Any, Tensor, Tensor], Any]


def set_(path: str, value: Any) -> Callable[[Any, Tensor, Tensor], None]:
    def change(m: Any, x: Tensor, y: Tensor) -> None:
        *holders, name = path.split(".")
        for holder in holders:
            m = getattr(m, holder)
        setattr(m, name, value)

    return change


def do(action: Callable[[Any], Any]) -> Callable[[Any, Tensor, Tensor], Any]:
    return lambda m, x, y: action(m)


def hooked(state: dict[str, float]) -> nn.Module:
    net = Net()
    net.a.register_forward_hook(lambda m, i, o: o * state["gain"])
    return net


def scaled(h: Tensor) -> Tensor:
    return h * scaled.by  # pyright: ignore[reportFunctionMemberAccess]


scaled.by = 1.0  # pyright: ignore[reportFunctionMemberAccess]


def tuned(fn: Callable[[Tensor], Tensor]) -> nn.Module:
    net = Net()
    net.fn = fn
    return net


STATE = {"gain": 1.0}
LISTED = [1.0]


def in_closure(values: list[float]) -> nn.Module:
    net = Net()
    net.fn = lambda h: h * values[0]
    return net


def patched(m: Any, x: Tensor, y: Tensor) -> None:
    own = m.a.forward
    m.a.forward = lambda h: own(h) * 2


def permute(m: Any) -> None:
    m.a.weight.data = m.a.weight.data[torch.tensor([1, 0, 3, 2])].clone()


def train(m: nn.Module, x: Tensor, y: Tensor) -> None:
    optimiser = torch.optim.Adam(m.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(m.train()(x).flatten(0, 1), y.flatten()).backward()
        optimiser.step()


CASES = {
    "float buffer filled": Case(Net, do(lambda m: m.scale.fill_(0.3))),
    "float buffer through data": Case(Net, do(lambda m: m.scale.data.fill_(0.3))),
    "float buffer through numpy": Case(Net, do(lambda m: m.scale.numpy().fill(0.3))),
    "float buffer replaced": Case(Net, set_("scale", torch.tensor(0.3).double())),
    "buffer that is not saved": Case(Net, do(lambda m: m.cache.data.mul_(0.5))),
    "bool buffer through data": Case(Net, do(lambda m: m.keep.data[:2].fill_(False))),
    "bool buffer through numpy": Case(Net, do(lambda m: m.keep.numpy()[:2].fill(False))),
    "integer buffer through data": Case(Net, do(lambda m: m.shift.data[:2].fill_(1))),
    "integer buffer through numpy": Case(Net, do(lambda m: m.shift.numpy()[:2].fill(1))),
    "tensor attribute in place": Case(Net, do(lambda m: m.plain.mul_(0.5))),
    "tensor attribute through data": Case(Net, do(lambda m: m.plain.data.mul_(0.5))),
    "tensor attribute replaced": Case(Net, set_("plain", torch.full((D,), 0.4).double())),
    "tensor in a list": Case(Net, do(lambda m: m.tensors[0].numpy().fill(0.5))),
    "tensor in a list replaced": Case(Net, do(lambda m: m.tensors.__setitem__(0, 0.3 * torch.ones(D).double()))),
    "number": Case(Net, set_("power", 0.5)),
    "number in a dictionary": Case(Net, do(lambda m: m.flags.update(square=True))),
    "function": Case(Net, set_("fn", torch.cos)),
    "function of the user's": Case(Net, set_("fn", half)),
    "function in a list": Case(Net, do(lambda m: m.steps.append(torch.sin))),
    "attribute of an object": Case(Net, set_("options.gain", 0.5)),
    "object replaced": Case(Net, lambda m, x, y: (setattr(m, "options", Options()), setattr(m.options, "gain", 2.0))),
    "activation replaced": Case(Net, set_("act", nn.Tanh())),
    "activation of another form": Case(Net, do(lambda m: setattr(m.act, "approximate", "tanh"))),
    "class of an object": Case(Net, do(lambda m: setattr(m.act, "__class__", nn.Tanh))),
    "attribute of a function": Case(lambda: tuned(scaled), do(lambda m: setattr(scaled, "by", 0.4))),
    "epsilon of a norm": Case(Net, set_("norm.eps", 0.5)),
    "submodule replaced": Case(Net, lambda m, x, y: setattr(m, "a", nn.Linear(D, D).double())),
    "parameter replaced": Case(Net, lambda m, x, y: setattr(m.a, "weight", nn.Parameter(m.a.weight.data * 2))),
    "forward of an instance": Case(Net, patched),
    "hook added": Case(Net, do(lambda m: m.a.register_forward_hook(lambda mod, i, o: o * 2))),
    "hook before": Case(Net, do(lambda m: m.a.register_forward_pre_hook(lambda mod, i: (i[0] * 2,)))),
    "hook that writes in place": Case(Net, do(lambda m: m.u.register_forward_hook(lambda mod, i, o: o.mul_(2)))),
    "hook that reads a changed dictionary": Case(lambda: hooked(STATE), do(lambda m: STATE.update(gain=0.4))),
    "closure over a list": Case(lambda: in_closure(LISTED), do(lambda m: LISTED.__setitem__(0, 0.4))),
    "global dictionary": Case(Net, do(lambda m: SCALES.update(now=0.4))),
    "global number": Case(Net, do(lambda m: globals().update(GAIN=0.4))),
    "weights by an optimiser": Case(Net, train),
    "weights through data": Case(Net, do(lambda m: m.a.weight.data.mul_(1.5))),
    "signs through data": Case(Net, do(lambda m: m.a.weight.data.neg_())),
    "rows through data": Case(Net, do(permute)),
    "weights through numpy": Case(Net, do(lambda m: m.b.weight.detach().numpy().__imul__(1.5))),
    "one weight through data": Case(Net, do(lambda m: m.b.weight.data[0, 1].add_(1e-3))),
    "embedding row through data": Case(Net, do(lambda m: m.e.weight.data[3].mul_(2))),
    "weights loaded": Case(Net, do(lambda m: m.load_state_dict({k: t * 1.5 for k, t in m.state_dict().items()}))),
    "inputs in place": Case(Net, lambda m, x, y: x[0].fill_(3)),
    "inputs through numpy": Case(Net, lambda m, x, y: x.numpy()[0].fill(3)),
    "targets in place": Case(Net, lambda m, x, y: y[0].fill_(3)),
    "targets through numpy": Case(Net, lambda m, x, y: y.numpy()[0].fill(3)),
    "targets that do not count any more": Case(Net, lambda m, x, y: y[:1].fill_(-100)),
    "scale of a gated layer": Case(lambda: Inner(GatedMLP()), do(lambda m: m.inner.scale.fill_(0.3))),
    "scale of a gated layer, learned": Case(lambda: Inner(LearnedMLP()), do(lambda m: m.inner.scale.data.fill_(0.3))),
    "scale of a gated layer, a plain tensor": Case(lambda: Inner(PlainMLP()), do(lambda m: m.inner.scale.fill_(0.3))),
    "activation of a gated layer": Case(lambda: Inner(GatedMLP()), set_("inner.act_fn", torch.sigmoid)),
    "epsilon of an RMS norm": Case(lambda: Inner(MyRMSNorm()), set_("inner.eps", 0.7)),
    "causal or not": Case(lambda: Inner(Attention()), set_("inner.is_causal", False)),
    "scale of scores": Case(lambda: Inner(Attention()), set_("inner.scaling", 3.0)),
    "train mode": Case(Net, do(lambda m: m.train())),
    "frozen": Case(Net, do(lambda m: m.a.requires_grad_(False))),
    "gradients left behind": Case(Net, lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()).backward()),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _globals():
    yield
    SCALES["now"], STATE["gain"], LISTED[0] = 1.0, 1.0, 1.0
    globals()["GAIN"] = scaled.by = 1.0  # pyright: ignore[reportFunctionMemberAccess]


def setup(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double(), torch.randint(0, V, (3, T)), torch.randint(0, V, (3, T))


def truth(m: nn.Module, x: Tensor, y: Tensor, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    """H v of the mean loss by double backward of the module itself, in eval mode."""
    modes = [(part, part.training) for part in m.modules()]
    frozen = [p for p in m.parameters() if not p.requires_grad]
    m.eval()
    for p in frozen:
        p.requires_grad_(True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = F.cross_entropy(m(x).flatten(0, 1), y.flatten())
    names, parameters = zip(*m.named_parameters(), strict=True)
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    inner = sum((g * vectors[name]).sum() for name, g in zip(names, first, strict=True))
    found = torch.autograd.grad(inner, parameters, allow_unused=True, materialize_grads=True)
    for p in frozen:
        p.requires_grad_(False)
    for part, training in modes:
        part.training = training
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("products", some([4, 1], 1), ids=["replayed", "kept"])
@pytest.mark.parametrize("name", CASES)
def test_the_product_is_of_what_there_is_now(name, products):
    case = CASES[name]
    m, x, y = setup(case.make)
    P = cs.Problem(m, (x, y))
    H, G, R = cs.Hessian(P), cs.GGN(P), cs.Functional(P)
    v = torch.randn(H.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(products):
        for operator in (H, G, R):
            operator @ v
    case.change(m, x, y)
    want = P.space().gather(truth(m, x, y, P.space().scatter(v)))
    after, size = H @ v, want.norm()
    assert (after - want).norm() < 1e-10 * size
    assert (G @ v + R @ v - want).norm() < 1e-10 * size
    assert (cs.Hessian(cs.Problem(m, (x, y))) @ v - want).norm() < 1e-10 * size  # a new problem too


def test_attribute_of_a_class():
    class Scaled(Net):
        gain = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    m, x, y = setup(Scaled)
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(4):
        H @ v
    Scaled.gain = 0.5
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()
    Scaled.forward = lambda self, x: Net.forward(self, x) * 3
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()


def test_global_hooks():
    m, x, y = setup(Net)
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(4):
        H @ v
    handle = nn.modules.module.register_module_forward_hook(
        lambda mod, i, o: o * 2 if isinstance(mod, nn.Linear) else None
    )
    try:
        want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
        assert (H @ v - want).norm() < 1e-10 * want.norm()
    finally:
        handle.remove()
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()


def test_what_nobody_can_see_is_asked(monkeypatch):
    """A function of another library, exchanged there: only the module's own answer shows it."""
    m, x, y = setup(Net)
    m.steps = [lambda h: torch.nn.functional.softsign(h)]
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(4):
        H @ v
    monkeypatch.setattr(torch.nn.functional, "softsign", torch.tanh)
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()


def test_a_column_that_a_sine_would_hide():
    """sin(355) is nearly 0: weights of a checksum must not have such holes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(768, 4), nn.Tanh(), nn.Linear(4, 3))
        x, y = torch.randn(5, 768), torch.randint(0, 3, (5,))
    x[:, 354] *= 100
    P = cs.Problem(net, (x, y))
    H = cs.Hessian(P)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(0))
    H @ v
    for column in (354, 709, 0):
        net[0].weight.data[0, column] += 5e-4
        fresh = cs.Hessian(P) @ v
        assert torch.equal(H @ v, fresh)


def test_a_module_that_counts_its_calls_is_replayed_all_the_same():
    class Counting(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    m, x, y = setup(Counting)
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    for _ in range(5):
        H @ v
    before = m.calls
    H @ v
    assert m.calls == before + 1  # asked once, nothing built
    m.power = 0.5
    want = H.space.gather(truth(m, x, y, H.space.scatter(v)))
    assert (H @ v - want).norm() < 1e-10 * want.norm()


def test_how_often_a_first_product_calls_the_module():
    m, x, y = setup(Net)
    calls = []
    m.e.register_forward_hook(lambda *_: calls.append(1))
    H = cs.Hessian(cs.Problem(m, (x, y)))
    v = torch.randn(H.shape[0], dtype=torch.float64)
    H @ v
    assert len(calls) == 6  # asked, autograd's product, its head, our product and outputs; then the data
    calls.clear()
    H @ v
    assert len(calls) == 1  # asked

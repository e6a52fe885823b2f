# ruff: noqa: E501
"""Whatever changes about a model or its data between two products, the second is of what there is then.

Each case makes a small model, takes products of its Hessian, or of the two parts of it, until they are replayed, changes one
thing the way people do, and compares with the second derivative of the user's own module, taken by double
backward without any code of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import changing_net
import pytest
import torch
import torch.nn.functional as F
from changing_net import (
    SCALES,
    Attention,
    D,
    GatedMLP,
    Inner,
    LearnedMLP,
    MyRMSNorm,
    Net,
    Options,
    PlainMLP,
    module_and_data,
    truth,
)
from torch import Tensor, nn

import curvescope as cs
from selection import pairs, some


def half(x: Tensor) -> Tensor:
    return x / 2


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
    optimizer = torch.optim.Adam(m.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(m.train()(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


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
    "global number": Case(Net, do(lambda m: setattr(changing_net, "GAIN", 0.4))),
    "weights by an optimizer": Case(Net, train),
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
    changing_net.GAIN = scaled.by = 1.0  # pyright: ignore[reportFunctionMemberAccess]


TOGETHER = {"hessian": [cs.Hessian], "ggn and functional": [cs.GGN, cs.FunctionalHessian]}


LIKE_ANOTHER = [  # noticed as the same change of another tensor, or the same tensor changed in another way, is
    "float buffer filled",
    "float buffer through numpy",
    "function in a list",
    "activation of another form",
    "hook that writes in place",
    "hook that reads a changed dictionary",
    "weights through data",
    "targets in place",
    "float buffer through data",
    "bool buffer through data",
    "integer buffer through numpy",
    "tensor attribute through data",
    "tensor in a list replaced",
    "function of the user's",
    "object replaced",
    "activation replaced",
    "hook before",
    "rows through data",
    "weights through numpy",
    "embedding row through data",
    "weights loaded",
    "inputs in place",
    "targets through numpy",
    "scale of a gated layer, learned",
    "causal or not",
    "signs through data",
    "tensor attribute replaced",
    "bool buffer through numpy",
    "class of an object",
    "scale of a gated layer, a plain tensor",
]
DIFFERENT = [name for name in CASES if name not in LIKE_ANOTHER]


@pytest.mark.parametrize("products", some([3, 1], 1), ids=["replayed", "kept"])
@pytest.mark.parametrize(
    ("name", "parts"),
    pairs(DIFFERENT, [*TOGETHER]) + some([(name, parts) for name in LIKE_ANOTHER for parts in TOGETHER], 0),
)
def test_the_product_is_of_what_there_is_now(name, parts, products):
    case = CASES[name]
    m, x, y = module_and_data(case.make)
    P = cs.Problem(m, (x, y), params="*")
    operators = [make(P) for make in TOGETHER[parts]]
    v = torch.randn(P.space().size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(products):
        for operator in operators:
            operator @ v
    case.change(m, x, y)
    want = P.space().gather(truth(m, x, y, P.space().scatter(v)))
    assert (sum(operator @ v for operator in operators) - want).norm() < 1e-10 * want.norm()
    if parts == "hessian":  # of a new problem too
        fresh = cs.Hessian(cs.Problem(m, (x, y), params="*")) @ v
        assert (fresh - want).norm() < 1e-10 * want.norm()

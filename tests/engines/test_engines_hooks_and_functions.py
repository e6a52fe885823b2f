"""Backward hooks, torch.compile and hand-written backwards do not enter a product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

import curvescope as cs

V, D = 5, 4
INPUTS = torch.randint(0, V, (2, 3), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, V, (2, 3), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Attention and a nonlinearity that can be exchanged."""

    def __init__(self, f: Any = torch.sin):
        super().__init__()
        torch.manual_seed(0)
        self.e, self.a, self.o = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.attention, self.f = nn.MultiheadAttention(D, 2, batch_first=True), f
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.o(self.f(self.a(h)))


def problem(net: nn.Module) -> cs.Problem:
    return cs.Problem(net, (INPUTS, TARGETS))


def double_backward() -> Tensor:
    """The Hessian of the plain network, from autograd alone."""
    net = Net()
    parameters = list(net.parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = F.cross_entropy(net(INPUTS).flatten(0, 1), TARGETS.flatten())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([g.flatten() for g in first])
    rows = [torch.autograd.grad(x, parameters, retain_graph=True, materialize_grads=True) for x in flat]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def _on_tensor(net: Net, called: list[int]) -> Any:
    def forward_hook(_: Any, __: Any, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(lambda g: (called.append(1), g * 2)[1])

    return net.a.register_forward_hook(forward_hook)


def _on_every_tensor(net: Net, called: list[int]) -> Any:
    """Set a hook without asking if the output requires a gradient, and keep the gradient in it."""

    def forward_hook(_: Any, __: Any, y: Tensor) -> None:
        y.register_hook(lambda g: (called.append(1), g * 2)[1])
        y.retain_grad()

    return net.a.register_forward_hook(forward_hook)


def _on_node(name: str) -> Any:
    """Set a hook on the node of autograd's graph that makes an output."""

    def install(net: Net, called: list[int]) -> Any:
        def doubled(*gradients: Any) -> Any:
            called.append(1)
            return tuple(None if g is None else 2 * g for g in gradients[0])

        def forward_hook(_: Any, __: Any, y: Tensor) -> None:
            if y.grad_fn is not None:
                getattr(y.grad_fn, name)(doubled)

        return net.a.register_forward_hook(forward_hook)

    return install


def _scaled(called: list[int]) -> Any:
    return lambda module, gi, *go: (called.append(1), tuple(None if g is None else 2 * g for g in gi))[1]


HOOKS = {
    "full": lambda net, called: net.a.register_full_backward_hook(_scaled(called)),
    "pre": lambda net, called: net.a.register_full_backward_pre_hook(_scaled(called)),
    "old": lambda net, called: net.f_module.register_backward_hook(_scaled(called)),
    "global": lambda net, called: register_module_full_backward_hook(_scaled(called)),
    "tensor": _on_tensor,
    "every tensor": _on_every_tensor,
    "node": _on_node("register_hook"),
    "node, before": _on_node("register_prehook"),
    "parameter": lambda net, called: net.a.weight.register_hook(lambda g: (called.append(1), g * 2)[1]),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_backward_hooks_do_not_enter_products_and_stay(kind: str, checkpoint: bool) -> None:
    truth, ggn = problem(Net()), cs.GGN(problem(Net())).to_dense()
    net, called = Net(), []
    if checkpoint:
        net, truth = LayeredNet(), problem(LayeredNet())
        ggn = cs.GGN(truth).to_dense()
    if kind == "old":
        net.f_module = net.a
    H = cs.Hessian(problem(net), checkpoint=checkpoint)
    before = H.to_dense()  # hooks that come after the first product do not enter either
    handle = HOOKS[kind](net, called)
    try:
        assert torch.allclose(H.to_dense(), before, atol=1e-12)
        p = problem(net)
        assert p.loss_value() == pytest.approx(truth.loss_value(), rel=1e-12)
        torch.testing.assert_close(p.gradient(), truth.gradient())
        torch.testing.assert_close(
            cs.Hessian(p, checkpoint=checkpoint).to_dense(), cs.Hessian(truth).to_dense()
        )
        torch.testing.assert_close(cs.GGN(p).to_dense(), ggn)
        assert not called
        F.cross_entropy(net(INPUTS).flatten(0, 1), TARGETS.flatten()).backward()
        assert called
    finally:
        handle.remove()


class LayeredNet(Net):
    """With repeated layers, which can be computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2)]).double()
        self.a = self.layers[0]
        self.a.weight = self.layers.get_parameter("0.0.weight")

    def forward(self, x: Tensor) -> Tensor:
        h = self.e(x)
        for layer in self.layers:
            h = layer(h)
        return self.o(h)


def test_hooks_are_there_in_order_after_an_error() -> None:
    class Failing(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails and torch.is_grad_enabled():
                raise ValueError("no")
            return y

    net, order = Failing(), []
    for i in range(3):
        net.a.register_full_backward_hook(lambda *_, i=i: order.append(i))
    p = problem(net)
    net.fails = True
    with pytest.raises(ValueError, match="no"):
        p.gradient()
    net.fails = False
    net(INPUTS).sum().backward()
    assert order == [0, 1, 2]


class WrongSecond(torch.autograd.Function):
    """sin, whose backward uses a value without a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.c = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.c


class Right(torch.autograd.Function):
    """sin, with a backward that can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.saved_tensors[0].cos()


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -g


class StraightThrough(Reversed):
    """Rounding, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g


class Once(WrongSecond):
    """Marked as what it is."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ["auto", "autograd"])
@pytest.mark.parametrize("function", [WrongSecond, Reversed, StraightThrough, Once])
def test_function_without_second_derivative_is_refused_by_name(
    function: Any, engine: Any, dtype: torch.dtype
) -> None:
    net = Net(function.apply).to(dtype)
    H = cs.Hessian(problem(net), engine=engine)
    for _ in range(2):
        with pytest.raises(cs.CurvescopeError, match=function.__name__):
            _ = H @ torch.ones(H.shape[1], dtype=dtype)


def test_function_that_comes_after_the_first_product_is_refused() -> None:
    net = Net()
    H = cs.Hessian(problem(net))
    v = torch.ones(H.shape[1], dtype=torch.float64)
    for _ in range(4):
        _ = H @ v
    net.f = WrongSecond.apply
    with pytest.raises(cs.CurvescopeError, match="WrongSecond"):
        _ = H @ v


def test_first_order_products_need_a_right_first_derivative_only() -> None:
    truth = cs.GGN(problem(Net())).to_dense()
    torch.testing.assert_close(cs.GGN(problem(Net(WrongSecond.apply))).to_dense(), truth)
    for make in (cs.GGN, cs.EmpiricalFisher, cs.KFAC, cs.Jacobian):
        with pytest.raises(cs.CurvescopeError, match="Reversed"):
            make(problem(Net(Reversed.apply))).to_dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [Reversed, StraightThrough])
def test_gradient_needs_a_right_first_derivative(function: Any, dtype: torch.dtype) -> None:
    p = problem(Net(function.apply).to(dtype))
    for ask in (p.gradient, p.value_and_gradient, lambda: p.gradient("a.weight")):
        for _ in range(2):
            with pytest.raises(cs.CurvescopeError, match=function.__name__):
                ask()
    with pytest.raises(cs.CurvescopeError, match=function.__name__):
        cs.per_sample(p).gradients()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [Right, WrongSecond, Once])
def test_gradient_needs_no_second_derivative(function: Any, dtype: torch.dtype) -> None:
    net, plain = Net(function.apply).to(dtype), problem(Net().to(dtype))
    net.e.padding_idx = 0
    plain.model.module.e.padding_idx = 0  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(problem(net).gradient(), plain.gradient())


def test_gradient_of_a_loss_with_a_wrong_function_is_refused() -> None:
    def loss_fn(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(Reversed.apply(module(batch[0])).flatten(0, 1), batch[1].flatten())  # pyright: ignore

    p = cs.Problem(Net(), (INPUTS, TARGETS), loss_fn=loss_fn)
    with pytest.raises(cs.CurvescopeError, match="Reversed"):
        p.gradient()


def test_function_that_comes_after_the_first_gradient_is_refused() -> None:
    net = Net(Right.apply)
    p = problem(net)
    p.gradient()
    net.f = Reversed.apply
    with pytest.raises(cs.CurvescopeError, match="Reversed"):
        p.gradient()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("around", [torch.tanh, torch.relu])
def test_function_with_second_derivative_is_answered(around: Any, dtype: torch.dtype) -> None:
    def plain(x: Tensor) -> Tensor:
        return around(x.sin())

    def custom(x: Tensor) -> Tensor:
        return around(Right.apply(x))

    truth = cs.Hessian(problem(Net(plain).to(dtype))).to_dense()
    torch.testing.assert_close(cs.Hessian(problem(Net(custom).to(dtype))).to_dense(), truth)


@pytest.mark.parametrize("tied", [False, True])
def test_function_beside_a_padding_row_is_answered(tied: bool) -> None:
    def net(f: Any) -> Net:
        made = Net(f)
        made.e.padding_idx = int(INPUTS[0, 0])
        if tied:
            made.o.weight = made.e.weight
        return made

    truth = cs.Hessian(problem(net(torch.sin)))
    H = cs.Hessian(problem(net(Right.apply)))
    torch.testing.assert_close(H.to_dense(), truth.to_dense())
    with pytest.raises(cs.CurvescopeError, match="WrongSecond"):
        cs.Hessian(problem(net(WrongSecond.apply))).to_dense()


@pytest.mark.parametrize("function", [WrongSecond, Once, StraightThrough])
def test_curvature_of_samples_needs_a_right_second_derivative(function: Any) -> None:
    v = torch.ones(cs.Hessian(problem(Net())).shape[0], 1).double()
    samples = cs.per_sample(problem(Net(function.apply)))
    for ask in (lambda: samples.products(v), lambda: samples.forms(v), samples.traces):
        with pytest.raises(cs.CurvescopeError, match=function.__name__):
            ask()


def test_first_derivatives_of_samples_do_not() -> None:
    v = torch.ones(cs.Hessian(problem(Net())).shape[0], 1).double()
    samples, plain = (cs.per_sample(problem(Net(f))) for f in (WrongSecond.apply, torch.sin))
    torch.testing.assert_close(samples.gradients(), plain.gradients())
    torch.testing.assert_close(samples.products(v, "ggn"), plain.products(v, "ggn"))
    right = cs.per_sample(problem(Net(Right.apply)))
    torch.testing.assert_close(right.products(v), plain.products(v))


def test_hessian_of_the_net_is_that_of_double_backward() -> None:
    H = cs.Hessian(problem(Net())).to_dense()  # over blocks by role, in another order
    torch.testing.assert_close(torch.linalg.eigvalsh(H), torch.linalg.eigvalsh(double_backward()))


def _whole(net: Net) -> nn.Module:
    return torch.compile(net, backend="aot_eager")  # pyright: ignore[reportReturnType]


def _in_place(net: Net) -> nn.Module:
    net.compile(backend="aot_eager")
    return net


def _part(net: Net) -> nn.Module:
    net.a = torch.compile(net.a, backend="aot_eager")  # pyright: ignore[reportAttributeAccessIssue]
    return net


def _function(net: Net) -> nn.Module:
    net.f = torch.compile(torch.sin, backend="aot_eager")
    return net


@pytest.mark.parametrize("compiled", [_whole, _in_place, _part, _function])
def test_compiled_module_is_measured_and_not_compiled_again(compiled: Any) -> None:
    from torch._dynamo.utils import counters

    truth = cs.Hessian(problem(Net())).to_dense()
    torch._dynamo.reset()
    net = compiled(Net())

    def step() -> int:
        F.cross_entropy(net(INPUTS).flatten(0, 1), TARGETS.flatten()).backward()
        return counters["stats"]["unique_graphs"]

    step()
    graphs = step()
    p = problem(net)
    torch.testing.assert_close(cs.Hessian(p).to_dense(), truth)
    cs.GGN(p).to_dense()
    cs.KFAC(p)
    p.gradient()
    assert step() == graphs > 0

"""Products and diagonals of a closure's loss against the operators of the same problem."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from optimizers_known import OPTIMIZERS, closure_for, data, network
from torch import nn

import curvescope as cs
from curvescope import optim
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.optim.base import diagonal_of
from curvescope.optim.objective import StepCurvature, StepObjective, flatten

NET = network()
PARAMETERS = list(NET.parameters())
PROBLEM = cs.Problem(NET, [data()])


def objective(made=None) -> StepObjective:
    found = StepObjective(
        closure_for("newton", NET)() if made is None else made, PARAMETERS, lambda what: None
    )
    found.gradient(curved=True)
    return found


def dense(op) -> torch.Tensor:
    """A matrix over blocks in the order of a module's parameters, each in its own layout."""
    names = [name for name, _ in NET.named_parameters()]
    columns = []
    for e in torch.eye(op.shape[0], dtype=torch.float64):
        tree, at = {}, 0
        for name, p in zip(names, PARAMETERS, strict=True):
            tree[name] = e[at : at + p.numel()].reshape(p.shape)
            at += p.numel()
        image = op @ tree
        columns.append(torch.cat([image[name].reshape(-1) for name in names]))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize(("kind", "operator"), [("hessian", cs.Hessian), ("ggn", cs.GGN)])
@pytest.mark.parametrize("made", ["pair", "problem"])
def test_products_are_those_of_the_operators(kind, operator, made):
    found = objective(PROBLEM if made == "problem" else None)
    ours = StepCurvature(found, kind) @ torch.eye(31, dtype=torch.float64)
    torch.testing.assert_close(ours, dense(operator(PROBLEM)))
    torch.testing.assert_close(ours, ours.T)


def test_the_block_of_a_parameter_is_a_part_of_the_hessian():
    found, start = objective(), 0
    whole = StepCurvature(found) @ torch.eye(31, dtype=torch.float64)
    for i, p in enumerate(PARAMETERS):
        n = p.numel()
        part = StepCurvature(found, block=i) @ torch.eye(n, dtype=torch.float64)
        torch.testing.assert_close(part, whole[start : start + n, start : start + n])
        start += n


@pytest.mark.parametrize(
    ("estimate", "kind"), [("hutchinson", "hessian"), ("ggn", "ggn"), ("bartlett", "ggn")]
)
def test_diagonals_have_the_right_mean(estimate, kind):
    found = objective(PROBLEM)
    truth = (StepCurvature(found, kind) @ torch.eye(31, dtype=torch.float64)).diagonal()
    draws = torch.stack(
        [flatten(diagonal_of(found, estimate, num_probes=1, seed=0, step=step)) for step in range(300)]
    )
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - truth).abs() <= 4 * error + 1e-12).all()
    once = flatten(diagonal_of(found, estimate, num_probes=300, seed=0, step=0))
    torch.testing.assert_close(once, draws.mean(0))


def test_gauss_newton_needs_outputs_and_bartlett_a_problem():
    X, y = data()
    bare = objective(nn.functional.cross_entropy(NET(X), y))
    with pytest.raises(UsageError, match="needs the outputs"):
        bare.product(PARAMETERS, "ggn")
    with pytest.raises(UsageError, match="draws targets from the model"):
        diagonal_of(bare, "bartlett", num_probes=1, seed=0, step=0)


def test_a_loss_of_other_parameters_is_refused():
    x = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(UsageError, match="depends on none"):
        objective((x**2).sum())


def test_a_linear_loss_has_zero_products():
    found = StepObjective(sum(p.sum() for p in PARAMETERS), PARAMETERS, lambda what: None)
    found.gradient(curved=True)
    assert all((v == 0).all() for v in found.product([p.detach() for p in PARAMETERS]))


def test_attention_of_torch_is_differentiated_twice():
    """Its fused form, which a closure calls, has no second derivative; the plain one stands in for it."""
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(4, 2, dim_feedforward=4, dropout=0.0, batch_first=True).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    found = optim.SharpnessGD(net.parameters(), first_products=3)
    found.step(lambda: net(x).square().mean())
    assert found.sharpness > 0
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    opt = optim.NewtonCG([q], max_products=2)
    first = opt.step(lambda: nn.functional.scaled_dot_product_attention(q, q, q).square().sum())
    assert opt.step(lambda: nn.functional.scaled_dot_product_attention(q, q, q).square().sum()) < first


CLIPS = {
    "hook": lambda p: p.register_hook(lambda g: g.clamp(-1e-3, 1e-3)),
    "post": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_on_gradients_are_refused(name, kind):
    """They would act on curvature too: a clamp makes most of it zero."""
    net = network()
    handles = [CLIPS[kind](p) for p in net.parameters()]
    opt, closure = OPTIMIZERS[name](net.parameters()), closure_for(name, net)
    with pytest.raises(UsageError, match="hook on its gradient"):
        opt.step(closure)
    for handle in handles:
        handle.remove()
    opt.step(closure)


def test_operators_do_not_see_hooks():
    clipped = network()
    before = cs.Hessian(cs.Problem(clipped, [data()])).to_dense()
    for p in clipped.parameters():
        CLIPS["hook"](p)
    torch.testing.assert_close(cs.Hessian(cs.Problem(clipped, [data()])).to_dense(), before)


@dataclass
class Output:
    """As Hugging Face's models return."""

    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize("wrap", [lambda L, z: {"loss": L, "logits": z}, Output])
def test_an_output_with_a_loss_is_as_good_as_the_loss(wrap):
    X, y = data()
    z = NET(X)
    loss = nn.functional.cross_entropy(z, y)
    assert objective(wrap(loss, z)).loss is loss or torch.equal(objective(wrap(loss, z)).loss, loss)
    with pytest.raises(UsageError, match="got dict"):
        objective({"logits": z})


class Noisy(nn.Module):
    """Dropout and batch norm in train mode."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)
        ).double()

    def forward(self, x):
        return self.body(x)


def test_the_second_call_draws_what_the_first_drew():
    """At rate 0 both calls are of one point, so that they are one number; and the generator goes on as if
    there had been one call."""
    net, (X, y), seen = Noisy(), data(), []

    def closure():
        seen.append(nn.functional.cross_entropy(net(X), y))
        return seen[-1]

    opt = optim.NewtonCG(net.parameters(), lr=0.0, max_products=2)
    torch.manual_seed(7)
    opt.step(closure)
    ahead = torch.rand(3)
    assert torch.equal(seen[0].detach(), seen[1])
    torch.manual_seed(7)
    other = Noisy()
    torch.manual_seed(7)
    nn.functional.cross_entropy(other(X), y)
    assert torch.equal(ahead, torch.rand(3))
    opt.step(closure)
    assert not torch.equal(seen[2].detach(), seen[0].detach())
    other(X)
    assert net.body[1].num_batches_tracked == other.body[1].num_batches_tracked == 2
    torch.testing.assert_close(net.body[1].running_mean, other.body[1].running_mean)


def test_a_compiled_module_is_named():
    """What torch raises in the second derivative of one; compiling itself takes seconds."""

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return Once.apply(g)

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g):
            return g.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")

    x = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(UsageError, match="_orig_mod"):
        optim.HutchinsonAdam([x]).step(lambda: (Compiled.apply(x) ** 2).sum())


def test_a_function_with_one_derivative_is_refused():
    """Its second would be zero, and no error."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    x = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(CurvescopeError, match="without a second derivative"):
        optim.HutchinsonAdam([x]).step(lambda: Square.apply(x).sum())


class Sine(torch.autograd.Function):
    """sin, with a backward that is right, and differentiable if its subclass makes it so."""

    @staticmethod
    def forward(ctx, x):
        c = x.cos()
        ctx.save_for_backward(x, c)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[1]  # a constant for autograd


class RightSine(Sine):
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def sines(function):
    """An embedding with a padding row that occurs, and one of the functions."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 3), nn.Linear(3, 5)).double()
    nn.init.normal_(net[0].weight)
    x, y = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 0, 4])

    def closure():
        z = net[2](function(net[1](net[0](x))))
        return nn.functional.cross_entropy(z, y), z

    return net, closure


MAKE = {
    "newton": lambda p: optim.NewtonCG(p, curvature="hessian"),
    "sharpness": optim.SharpnessGD,
    "clipped": optim.ClippedNewton,
    "hutchinson": optim.HutchinsonAdam,
}


@pytest.mark.parametrize("kind", MAKE)
def test_steps_with_wrong_second_derivatives_are_refused_each_time(kind):
    net, closure = sines(Sine.apply)
    opt, before = MAKE[kind](net.parameters()), [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        with pytest.raises(CurvescopeError, match="Sine"):
            opt.step(closure)
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", MAKE)
def test_steps_with_right_functions_are_those_without(kind):
    (net, closure), (plain, other) = sines(RightSine.apply), sines(torch.sin)
    for module, loss in ((net, closure), (plain, other)):
        opt = MAKE[kind](module.parameters())
        for _ in range(2):
            opt.step(loss)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_backward_hooks_of_modules_are_refused():
    net, _ = sines(torch.sin)
    net[1].register_full_backward_hook(lambda module, into, out: tuple(2 * g for g in into))

    def hooked():
        x, y = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 0, 4])
        return nn.functional.cross_entropy(net(x).tanh(), y)

    with pytest.raises(CurvescopeError, match="differ from a finite difference"):
        optim.SharpnessGD(net.parameters()).step(hooked)

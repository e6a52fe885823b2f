"""Losses of models that are sure: float32 is right to a rounding of what is left, not of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope.losses import as_loss
from curvescope.losses.base import Loss

B, T, C = 3, 4, 6
SURE = [3.0, 8.0, 14.0]  # how far the largest logit is above the others: 1 − p from 0.2 to 4e-6
FLOAT32 = 3e-6


def logits(above: float) -> Tensor:
    """(B, T, C): each position is sure of class (b + t) mod C, and the others differ."""
    source = torch.Generator().manual_seed(0)
    z = torch.randn(B, T, C, generator=source) + 5.0
    return z.scatter_add(-1, _sure()[..., None], torch.full((B, T, 1), above))


def _sure() -> Tensor:
    return (torch.arange(B)[:, None] + torch.arange(T)) % C


def _hard(wrong: bool) -> Tensor:
    y = _sure()
    if wrong:  # of one position the model is sure, and wrong; another does not count
        y[0, 0] = (y[0, 0] + 1) % C
        y[1, 1] = -100
    return y


def _soft() -> Tensor:
    q = torch.nn.functional.one_hot(_sure(), C).float()
    q[0, 1] = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    return q.movedim(-1, 1)


CASES = {
    "all right": (cs.CrossEntropy(), _hard(wrong=False)),
    "one wrong": (cs.CrossEntropy(), _hard(wrong=True)),
    "smoothed": (cs.CrossEntropy(label_smoothing=1e-4), _hard(wrong=True)),
    "torch's": (as_loss(nn.CrossEntropyLoss()), _hard(wrong=False)),
    "torch's, weighted": (
        as_loss(nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, C))),
        _hard(wrong=True),
    ),
    "torch's, smoothed": (
        as_loss(nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, C), label_smoothing=1e-4)),
        _hard(wrong=False),
    ),
    "torch's, soft": (as_loss(nn.CrossEntropyLoss()), _soft()),
}


def quantities(loss: Loss, z: Tensor, targets: Tensor, u: Tensor, *, outer: bool = True) -> dict[str, Tensor]:
    """Value, and first and second derivative: by formula, and by autograd of the value."""
    z = z.clone().requires_grad_()
    value = loss.sum(z, targets, None)
    (first,) = torch.autograd.grad(value, z, create_graph=True)
    (second,) = torch.autograd.grad(first, z, u)
    at = z.detach()
    return {
        "value": value.detach(),
        "slope": loss.gradient(at, targets, None),
        "slope by autograd": first.detach(),
        "curvature": loss.hessian_product(at, targets, None, torch.stack([u, -2 * u]))[0],
        "curvature by autograd": second,
        "root": loss.root(at, targets, None, u),
    } | ({"outer": loss.term_outer_product(at, targets, None, u)} if outer else {})


@pytest.mark.parametrize("above", SURE)
@pytest.mark.parametrize("case", CASES)
def test_float32_is_right_where_the_model_is_sure(case, above):
    loss, targets = CASES[case]
    z, u = logits(above), torch.randn(B, T, C, generator=torch.Generator().manual_seed(1))
    if case.startswith("torch"):
        z, u = z.movedim(-1, 1).contiguous(), u.movedim(-1, 1).contiguous()
    outer = case != "torch's, smoothed"  # with class weights too, it has no empirical Fisher
    found = quantities(loss, z, targets, u, outer=outer)
    wide = targets.double() if targets.is_floating_point() else targets
    want = quantities(loss, z.double(), wide, u.double(), outer=outer)
    for name, x in found.items():
        error = (x.double() - want[name]).norm() / want[name].norm()
        assert error < FLOAT32 * (30 if "smoothed" in case else 1), (name, float(error))


@pytest.mark.parametrize("smoothing", [1e-6, 1e-3])
def test_a_little_smoothing(smoothing):
    """ε is not 1 − (1 − ε): where the model is sure its slope is of the size of ε."""
    z, y = logits(14.0), _hard(wrong=False)
    loss = cs.CrossEntropy(label_smoothing=smoothing)
    u = torch.ones_like(z).cumsum(-1)
    found, want = quantities(loss, z, y, u), quantities(loss, z.double(), y, u.double())
    for name in ("slope", "slope by autograd"):
        assert (found[name].double() - want[name]).norm() < 1e-4 * want[name].norm()


@pytest.mark.parametrize("engine", ["auto", "autograd"])
def test_an_infinite_logit_is_undefined(engine):
    z = torch.tensor([[torch.inf, 1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    for loss in (cs.CrossEntropy(), as_loss(nn.CrossEntropyLoss())):
        value = loss.sum(z, torch.tensor([0]), None)
        assert value.isnan()
        assert torch.autograd.grad(value, z)[0].isnan().any()
    net = nn.Linear(2, 3)
    with torch.no_grad():
        net.weight[0] = 3e38
    problem = cs.Problem(net, (torch.full((2, 2), 10.0), torch.tensor([0, 1])))
    with pytest.raises(cs.CurvescopeError, match="not finite"):
        cs.Hessian(problem, engine=engine) @ torch.ones(9)


@pytest.mark.parametrize("case", CASES)
def test_float64_is_torch_s(case):
    """The formulas are those of PyTorch's own function."""
    loss, targets = CASES[case]
    z = logits(3.0).double()
    if case.startswith("torch"):
        z = z.movedim(-1, 1).contiguous()
        targets = targets.double() if targets.is_floating_point() else targets
        weight = loss.options["weight"]
        weight, smoothing = None if weight is None else weight.double(), loss.label_smoothing
        want = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, reduction="sum")(z, targets)
    else:
        smoothing = loss.label_smoothing
        flat = z.flatten(0, 1), targets.flatten()
        want = nn.CrossEntropyLoss(label_smoothing=smoothing, reduction="sum")(*flat)
    torch.testing.assert_close(loss.sum(z, targets, None), want)


@pytest.mark.parametrize("above", SURE)
@pytest.mark.parametrize(
    "options", [{}, {"pos_weight": torch.tensor(3.0)}, {"weight": torch.linspace(0.5, 2, C)}]
)
def test_two_classes(options, above):
    """Of entries that are sure and right, one that is sure and wrong, one in the middle."""
    loss = as_loss(nn.BCEWithLogitsLoss(**options))
    z = torch.randn(B, C, generator=torch.Generator().manual_seed(0)).sign() * above + torch.linspace(0, 1, C)
    y = (z > 0).float()
    y[0, 0] = 1 - y[0, 0]
    u = torch.randn(B, C, generator=torch.Generator().manual_seed(1))
    found, want = quantities(loss, z, y, u), quantities(loss, z.double(), y.double(), u.double())
    for name, x in found.items():
        assert (x.double() - want[name]).norm() < FLOAT32 * want[name].norm(), name
    theirs = nn.BCEWithLogitsLoss(**{k: v.double() for k, v in options.items()}, reduction="sum")
    torch.testing.assert_close(want["value"], theirs(z.double(), y.double()))
    middle = quantities(loss, torch.zeros(B, C).double(), y.double(), u.double())
    share = y.double() * float(options.get("pos_weight", 1.0)) + 1 - y.double()
    torch.testing.assert_close(middle["curvature"], u * share * options.get("weight", torch.ones(C)) / 4)


def test_a_logit_may_be_minus_infinity():
    """A class that cannot be has no share in anything."""
    z, y = logits(3.0).double(), _hard(wrong=False)
    z[..., 5] = -torch.inf
    y = torch.where(y == 5, 0, y)
    u = torch.ones_like(z).cumsum(-1)
    found = quantities(cs.CrossEntropy(), z, y, u)
    small = quantities(cs.CrossEntropy(), z[..., :5], y, u[..., :5])
    for name, x in found.items():
        if name == "value":
            torch.testing.assert_close(x, small[name])
        else:
            torch.testing.assert_close(x[..., :5], small[name])
            assert not x[..., 5].any(), name

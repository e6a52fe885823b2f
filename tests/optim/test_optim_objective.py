"""Products and diagonals of a closure's loss against the operators of the same problem."""

from __future__ import annotations

import pytest
import torch
from optimisers_known import closure_for, data, network
from torch import nn

import curvescope as cs
from curvescope import optim
from curvescope.core.errors import UsageError
from curvescope.optim.diagonals import diagonal_of
from curvescope.optim.objective import Objective, StepCurvature, flatten

NET = network()
PARAMETERS = list(NET.parameters())
PROBLEM = cs.Problem(NET, [data()])


def objective(made=None) -> Objective:
    found = Objective(closure_for("newton", NET)() if made is None else made, PARAMETERS, lambda what: None)
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
    found = Objective(sum(p.sum() for p in PARAMETERS), PARAMETERS, lambda what: None)
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

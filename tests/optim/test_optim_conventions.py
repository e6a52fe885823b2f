"""What torch.optim promises, held by every optimiser of the room."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from optimisers_known import OPTIMISERS, closure_for, data, network, weights
from torch import nn

import curvescope as cs
from curvescope import optim
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError

ALL = pytest.mark.parametrize("name", OPTIMISERS)


def begun(name: str, steps: int = 3):
    net = network()
    opt = OPTIMISERS[name](net.parameters())
    closure = closure_for(name, net)
    losses = [float(opt.step(closure)) for _ in range(steps)]
    return net, opt, closure, losses


@ALL
def test_it_is_one_of_torch_and_the_loss_falls(name):
    net, opt, _, losses = begun(name, 12)
    assert isinstance(opt, torch.optim.Optimizer)
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in net.parameters())


@ALL
def test_the_state_goes_through_a_file(name):
    """A run that is saved after three steps, and loaded into fresh objects, ends at the same bits."""
    net, opt, closure, _ = begun(name)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = network(seed=5)
    other.load_state_dict(saved["net"])
    again = OPTIMISERS[name](other.parameters())
    again.load_state_dict(saved["opt"])
    for _ in range(3):
        opt.step(closure)
    for _ in range(3):
        again.step(closure_for(name, other))
    assert torch.equal(weights(net), weights(other))
    assert opt.work == again.work | ({"losses": again.work["losses"] - 1} if name == "kfac" else {})  # layers


@ALL
def test_what_is_loaded_is_not_shared(name):
    _, opt, _, _ = begun(name)
    state, work = opt.state_dict(), opt.work
    other = network()
    again = OPTIMISERS[name](other.parameters())
    again.load_state_dict(state)
    again.step(closure_for(name, other))
    assert opt.work == work != again.work


@ALL
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_alike(name, how):
    net, opt, closure, _ = begun(name)
    other, again = how((net, opt))
    opt.step(closure)
    again.step(closure_for(name, other))
    assert torch.equal(weights(net), weights(other))


@ALL
def test_schedulers_set_its_rate(name):
    net = network()
    opt = OPTIMISERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0 if step else 1.0)
    opt.step(closure_for(name, net))
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.0
    before = weights(net)
    opt.step(closure_for(name, net))
    assert torch.equal(weights(net), before)


@ALL
def test_groups_have_their_own_rate(name):
    net = network()
    first, last = list(net[0].parameters()), list(net[2].parameters())
    groups = [{"params": first, "lr": 0.0}, {"params": last}]
    if name.startswith("newton"):
        with pytest.raises(UsageError, match="one parameter group"):
            OPTIMISERS[name](groups)
        return
    opt = OPTIMISERS[name](groups[:1])
    opt.add_param_group(groups[1])
    held, moved = [p.detach().clone() for p in first], [p.detach().clone() for p in last]
    opt.step(closure_for(name, net))
    assert all(torch.equal(a, b) for a, b in zip(first, held, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(last, moved, strict=True))


@ALL
def test_a_group_that_is_added_later_joins_in(name):
    if name.startswith("newton"):
        pytest.skip("one group")
    net = network()
    opt = OPTIMISERS[name](net[2].parameters())
    closure = closure_for(name, net)
    opt.step(closure)
    opt.add_param_group({"params": list(net[0].parameters())})
    before = net[0].weight.detach().clone()
    opt.step(closure)
    assert not torch.equal(net[0].weight, before)


@ALL
def test_frozen_and_unused_parameters_stay(name):
    net = network()
    net[0].weight.requires_grad_(False)
    net.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    opt = OPTIMISERS[name](net.parameters())
    before = net[0].weight.clone(), net.unused.detach().clone()
    opt.step(closure_for(name, net))
    assert torch.equal(net[0].weight, before[0])
    assert torch.equal(net.unused, before[1])


@ALL
def test_it_says_what_it_needs(name):
    net = network()
    opt, closure = OPTIMISERS[name](net.parameters()), closure_for(name, net)
    with pytest.raises(UsageError, match="needs a closure"):
        opt.step()
    with pytest.raises(UsageError, match="the loss has no graph"):
        opt.step(lambda: torch.zeros(()))
    with pytest.raises(UsageError, match="expected a closure that returns the loss"):
        opt.step(lambda: 3.0)
    with pytest.raises(ValueError, match="lr"):
        OPTIMISERS[name](net.parameters(), lr=-1.0)
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    with pytest.raises(CurvescopeError, match=r"the loss is nan|NaN"):
        opt.step(closure)


@ALL
def test_steps_are_hooked_and_called_under_no_grad(name):
    net = network()
    opt, seen = OPTIMISERS[name](net.parameters()), []
    opt.register_step_post_hook(lambda *given: seen.append(1))
    with torch.no_grad():
        opt.step(closure_for(name, net))
    assert seen == [1]


def test_a_backward_in_the_closure_is_named():
    net, (X, y) = network(), data()
    opt = optim.SharpnessGD(net.parameters())

    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(X), y)
        loss.backward()
        return loss

    with pytest.raises(UsageError, match="leave loss"):
        opt.step(closure)


def test_parameters_of_two_precisions_are_refused():
    two = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    with pytest.raises(ShapeError, match="one dtype"):
        optim.SharpnessGD(two)


@pytest.mark.parametrize("name", ["newton", "newton-ggn", "sharpness", "block", "hutchinson", "clipped"])
def test_a_problem_is_as_good_as_its_loss(name):
    """However its data are cut."""
    (X, y), nets = data(), [network(), network()]
    for net, closure in zip(
        nets,
        [closure_for(name, nets[0]), lambda: cs.Problem(nets[1], [(X[:5], y[:5]), (X[5:], y[5:])])],
        strict=True,
    ):
        opt = OPTIMISERS[name](net.parameters())
        for _ in range(3):
            opt.step(closure)
    torch.testing.assert_close(weights(nets[0]), weights(nets[1]))


def test_kfac_knows_its_layers_by_any_name():
    """The same parameters inside another module: layers are looked for again, and none is stepped without."""
    nets = [network(), network()]
    (X, y), seen = data(), []
    for net, later in ((nets[0], nets[0]), (nets[1], nn.Sequential(nets[1]))):
        opt = OPTIMISERS["kfac"](net.parameters())
        opt.param_groups[0]["every"] = 10
        opt.step(lambda net=net: cs.Problem(net, [(X, y)]))
        before = weights(net)
        opt.step(lambda later=later: cs.Problem(later, [(X, y)]))
        seen.append((weights(net) - before).norm())
    assert seen[1] == pytest.approx(seen[0], rel=0.5)  # targets are drawn anew

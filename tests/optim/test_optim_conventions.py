"""What torch.optim promises, held by every optimizer of the package."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from optimizers_known import OPTIMIZERS, PROBLEMS, closure_for, data, network, weights
from torch import nn

import curvescope as cs
from curvescope import optim
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError

ALL = pytest.mark.parametrize("name", OPTIMIZERS)


def begun(name: str, steps: int = 3):
    net = network()
    opt = OPTIMIZERS[name](net.parameters())
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
    again = OPTIMIZERS[name](other.parameters())
    again.load_state_dict(saved["opt"])
    for _ in range(3):
        opt.step(closure)
    for _ in range(3):
        again.step(closure_for(name, other))
    assert torch.equal(weights(net), weights(other))
    assert opt.work == again.work


@ALL
def test_what_is_loaded_is_not_shared(name):
    _, opt, _, _ = begun(name)
    state, work = opt.state_dict(), opt.work
    other = network()
    again = OPTIMIZERS[name](other.parameters())
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
    opt = OPTIMIZERS[name](net.parameters())
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
            OPTIMIZERS[name](groups)
        return
    opt = OPTIMIZERS[name](groups[:1])
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
    opt = OPTIMIZERS[name](net[2].parameters())
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
    opt = OPTIMIZERS[name](net.parameters())
    before = net[0].weight.clone(), net.unused.detach().clone()
    opt.step(closure_for(name, net))
    assert torch.equal(net[0].weight, before[0])
    assert torch.equal(net.unused, before[1])


@ALL
def test_it_says_what_it_needs(name):
    net = network()
    opt, closure = OPTIMIZERS[name](net.parameters()), closure_for(name, net)
    with pytest.raises(UsageError, match="needs a closure"):
        opt.step()
    with pytest.raises(UsageError, match="the loss has no graph"):
        opt.step(lambda: torch.zeros(()))
    with pytest.raises(UsageError, match="expected a closure that returns the loss"):
        opt.step(lambda: 3.0)
    with pytest.raises(ValueError, match="lr"):
        OPTIMIZERS[name](net.parameters(), lr=-1.0)
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
    with pytest.raises(CurvescopeError, match=r"the loss is nan|NaN"):
        opt.step(closure)


@ALL
def test_steps_are_hooked_and_called_under_no_grad(name):
    net = network()
    opt, seen = OPTIMIZERS[name](net.parameters()), []
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


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_precisions_are_refused(name, dtype):
    with pytest.raises(ShapeError, match="float32 or float64"):
        OPTIMIZERS[name]([nn.Parameter(torch.zeros(2, dtype=dtype))])


@ALL
def test_parameters_may_come_by_name(name):
    """As a dictionary, which is how a model of this package has them."""
    nets = [network(), network()]
    for net, given in zip(nets, (nets[0].parameters(), cs.load(nets[1]).parameters()), strict=True):
        opt = OPTIMIZERS[name](given)
        opt.step(closure_for(name, net))
    assert torch.equal(weights(nets[0]), weights(nets[1]))


@ALL
@pytest.mark.parametrize("other", ["sharpness", "block", "hutchinson", "clipped", "kfac", "newton", "adamw"])
def test_the_state_of_another_optimizer_is_refused(name, other):
    if name.split("-")[0] == other:
        pytest.skip("its own")
    net = network()
    if other == "adamw":
        theirs = torch.optim.AdamW(net.parameters())
        closure_for("", net)()[0].backward()
        theirs.step()
    else:
        theirs = begun(other, 1)[1]
    with pytest.raises(UsageError, match="expected the state of a"):
        OPTIMIZERS[name](net.parameters()).load_state_dict(theirs.state_dict())


@ALL
def test_parameters_that_one_loss_leaves_out_stay(name):
    """As in torch.optim: no momentum and no weight decay without a gradient; they join in again later."""
    if name in ("newton", "newton-ggn"):
        pytest.skip("neither")
    net, (X, y) = network(), data()
    options = {"weight_decay": 0.1} if name.split("-")[0] in ("hutchinson", "clipped") else {}
    opt, closure = OPTIMIZERS[name](net.parameters(), **options), closure_for(name, net)
    for _ in range(2):
        opt.step(closure)
    head = nn.Sequential(net[2])
    half = torch.tanh(X[:, [0, 1, 2, 0]])
    before = net[0].weight.detach().clone()
    if name in PROBLEMS:
        opt.step(lambda: cs.Problem(head, [(half, y)]))
    else:
        opt.step(lambda: (nn.functional.cross_entropy(z := head(half), y), z))
    assert torch.equal(net[0].weight, before)
    opt.step(closure)
    assert not torch.equal(net[0].weight, before)


@pytest.mark.parametrize("name", ["newton", "newton-ggn", "sharpness", "block", "hutchinson", "clipped"])
def test_a_problem_is_as_good_as_its_loss(name):
    """However its data are cut."""
    (X, y), nets = data(), [network(), network()]
    for net, closure in zip(
        nets,
        [closure_for(name, nets[0]), lambda: cs.Problem(nets[1], [(X[:5], y[:5]), (X[5:], y[5:])])],
        strict=True,
    ):
        opt = OPTIMIZERS[name](net.parameters())
        for _ in range(3):
            opt.step(closure)
    torch.testing.assert_close(weights(nets[0]), weights(nets[1]))


def test_kfac_knows_its_layers_by_any_name():
    """The same parameters inside another module: layers are looked for again, and none is stepped without."""
    nets = [network(), network()]
    (X, y), seen = data(), []
    for net, later in ((nets[0], nets[0]), (nets[1], nn.Sequential(nets[1]))):
        opt = OPTIMIZERS["kfac"](net.parameters())
        opt.param_groups[0]["every"] = 10
        opt.step(lambda net=net: cs.Problem(net, [(X, y)]))
        before = weights(net)
        opt.step(lambda later=later: cs.Problem(later, [(X, y)]))
        seen.append((weights(net) - before).norm())
    assert seen[1] == pytest.approx(seen[0], rel=0.5)  # targets are drawn anew


@pytest.mark.parametrize("left", [["0.bias"], ["0.weight"], ["2.weight", "2.bias"]])
@pytest.mark.parametrize("later", [False, True])
def test_kfac_of_a_part_is_of_that_part(left, later):
    """Without some parameters, from the first or frozen later, the inverse is that of the rest of K."""
    net, (X, y) = network(), data()
    own = dict(net.named_parameters())
    options = {"lr": 1.0, "damping": 0.1, "max_change": None, "kind": "ggn"}
    given = [p for name, p in own.items() if later or name not in left]
    opt = optim.KFACDescent(given, **options)
    if later:
        opt.step(lambda: cs.Problem(net, [(X, y)]))
        for name in left:
            own[name].requires_grad_(False)
    K = cs.KFAC(cs.Problem(net, [(X, y)], params="*"), kind="ggn")
    g = K.space.gather({n: v for n, v in _gradients(net, X, y).items() if n not in left})
    rows = torch.cat([torch.full((b.size,), b.parameter not in left) for b in K.space])
    damped = torch.as_tensor(K.to_dense()) + 0.1 * torch.eye(len(g), dtype=torch.float64)
    expected = torch.zeros_like(g)
    expected[rows] = torch.linalg.solve(damped[rows][:, rows], g[rows])
    before = {name: p.detach().clone() for name, p in own.items()}
    opt.step(lambda: cs.Problem(net, [(X, y)]))
    moved = K.space.gather({name: before[name] - p.detach() for name, p in own.items()})
    torch.testing.assert_close(moved, expected)


def _gradients(net, X, y):
    functional = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    loss = nn.functional.cross_entropy(torch.func.functional_call(net, functional, X), y)
    return dict(zip(functional, torch.autograd.grad(loss, list(functional.values())), strict=True))

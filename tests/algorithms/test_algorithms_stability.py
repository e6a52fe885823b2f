"""The largest stable learning rate, against training with torch's own optimizers around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import curvescope as cs
from curvescope.algorithms import Sharpness, preconditioned_sharpness
from curvescope.core.operator import Diagonal, FunctionOperator, Matrix
from selection import most

STEPS = 300
FROZEN = 1 - 1e-13  # β₂ of a mean of squares that stays what it is
Make = Callable[[nn.Module, float], torch.optim.Optimizer]


def quadratic(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Two linear maps on the same inputs, summed; the best outputs are zero, so all parameters go to zero."""
    source = torch.Generator().manual_seed(seed)
    module = nn.Linear(3, 2).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=source, dtype=torch.float64))
    return module, torch.randn(8, 3, generator=source, dtype=torch.float64)


def hessian(module: nn.Module, x: torch.Tensor, **options: Any) -> cs.Hessian:
    return cs.Hessian(cs.Problem(module, (x, torch.zeros(8, 2).double()), "mse_mean"), **options)


def with_squares(optimizer: torch.optim.Optimizer, key: str, **more: Any) -> torch.optim.Optimizer:
    """A state in which the mean of squares differs from entry to entry and does not change any more."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            squares = torch.linspace(0.5, 3, p.numel(), dtype=torch.float64).reshape(p.shape) ** 2
            optimizer.state[p] = {key: squares, **{k: v(p) for k, v in more.items()}}
    return optimizer


def adam(kind: type, **settings: Any) -> Make:
    def make(module: nn.Module, lr: float) -> torch.optim.Optimizer:
        found = kind(module.parameters(), lr=lr, betas=(0.9, FROZEN), **settings)
        more = {"exp_avg": torch.zeros_like, "step": lambda p: torch.tensor(1e15)}
        return with_squares(found, "exp_avg_sq", **more)

    return make


def two_groups(module: Any) -> list[dict[str, Any]]:
    return [{"params": [module.weight], "weight_decay": 2.0}, {"params": [module.bias], "weight_decay": 0.0}]


def two_rates(module: Any, lr: float) -> torch.optim.Optimizer:
    groups = [{"params": [module.weight]}, {"params": [module.bias], "lr": lr / 4}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.5)


def decayed_groups(module: Any, lr: float) -> torch.optim.Optimizer:
    found = torch.optim.AdamW(two_groups(module), lr=lr, betas=(0.9, FROZEN))
    found.param_groups[1]["lr"] = lr / 2
    more = {"exp_avg": torch.zeros_like, "step": lambda p: torch.tensor(1e15)}
    return with_squares(found, "exp_avg_sq", **more)


def rmsprop(module: Any, lr: float) -> torch.optim.Optimizer:
    found = torch.optim.RMSprop(module.parameters(), lr=lr, alpha=FROZEN, momentum=0.5)
    more = {"momentum_buffer": torch.zeros_like, "step": lambda p: torch.tensor(0.0)}
    return with_squares(found, "square_avg", **more)


SGD: Any = torch.optim.SGD
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m, lr: SGD(m.parameters(), lr=lr),
    "momentum": lambda m, lr: SGD(m.parameters(), lr=lr, momentum=0.9),
    "Nesterov": lambda m, lr: SGD(m.parameters(), lr=lr, momentum=0.9, nesterov=True),
    "dampening": lambda m, lr: SGD(m.parameters(), lr=lr, momentum=0.8, dampening=0.5),
    "weight decay": lambda m, lr: SGD(m.parameters(), lr=lr, momentum=0.5, weight_decay=1.5),
    "decay of a group": lambda m, lr: SGD(two_groups(m), lr=lr),
    "two rates": two_rates,
    "RMSprop": rmsprop,
    "Adam": adam(torch.optim.Adam),
    "Adam, decay in the gradient": adam(torch.optim.Adam, weight_decay=3.0),
    "AdamW": adam(torch.optim.AdamW, weight_decay=0.3),
    "AdamW, groups": decayed_groups,
}


def length(module: nn.Module) -> float:
    return math.hypot(*(float(p.detach().norm()) for p in module.parameters()))


def lengths(make: Make, lr: float) -> list[float]:
    """The length of the parameters after each step over that before the first, until the end is plain."""
    module, x = quadratic()
    optimizer, first, found = make(module, lr), length(module), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (module(x) ** 2).mean().backward()
        optimizer.step()
        found.append(length(module) / first)
        if found[-1] < 0.05 or found[-1] > 200:
            break
    return found


@pytest.mark.parametrize("name", most(list(OPTIMIZERS), but=["decay of a group", "AdamW"]))
def test_training_converges_just_below_and_diverges_just_above(name: str):
    make, (module, x) = OPTIMIZERS[name], quadratic()
    found = preconditioned_sharpness(hessian(module, x), make(module, 0.1))
    assert found.converged
    assert found.learning_rate == pytest.approx(0.1)
    assert found.ratio == pytest.approx(0.1 / found.max_learning_rate)
    assert found.num_products == 8
    assert lengths(make, 0.97 * found.max_learning_rate)[-1] < 0.1
    # a mean of squares does move once gradients are huge, and brings them back
    assert max(lengths(make, 1.03 * found.max_learning_rate)) > 100


def test_the_formulas_say_which_bound_it_is():
    module, x = quadratic()
    H = hessian(module, x)
    top = float(torch.linalg.eigvalsh(H.to_dense()).max())

    def of(name: str) -> Sharpness:
        return preconditioned_sharpness(H, OPTIMIZERS[name](module, 0.1))

    assert of("SGD").formula == "2 / λ_max"
    assert of("SGD").max_learning_rate == pytest.approx(2 / top)
    assert of("momentum").max_learning_rate == pytest.approx(2 * 1.9 / top)
    assert of("momentum").optimizer == "SGD with momentum 0.9"
    assert of("Nesterov").max_learning_rate == pytest.approx(2 * 1.9 / 2.8 / top)
    assert of("dampening").formula == "2 (1 + β) / ((1 − dampening) λ_max)"
    assert of("Adam").formula == "2 (1 + β) / ((1 − β) λ_max)"
    assert of("Adam").max_learning_rate == pytest.approx(38 / of("Adam").value)
    assert any("preconditioner" in word for word in of("Adam").assumed)
    assert any("proportion" in word for word in of("two rates").assumed)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_state_of_adam_is_read_with_its_corrections(amsgrad):
    module, x = quadratic()
    H = hessian(module, x)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, betas=(0.8, 0.95), eps=1e-2, amsgrad=amsgrad)
    for _ in range(3):
        optimizer.zero_grad()
        (module(x) ** 2).mean().backward()
        optimizer.step()
    found = preconditioned_sharpness(H, optimizer)
    key = "max_exp_avg_sq" if amsgrad else "exp_avg_sq"
    names = dict(module.named_parameters())
    v = {name: optimizer.state[p][key] / (1 - 0.95**3) for name, p in names.items()}
    P = H.space.gather({name: (1 - 0.8**3) * (each.sqrt() + 1e-2) for name, each in v.items()})
    dense = H.to_dense() / P.sqrt()[:, None] / P.sqrt()
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(dense).max()), rel=1e-9)
    assert found.value > 0
    assert found.optimizer == "Adam"


def test_preconditioners_of_ones_own_and_other_operators():
    module, x = quadratic()
    H = hessian(module, x)
    p = torch.linspace(1, 4, 8).double()
    truth = float(torch.linalg.eigvalsh(H.to_dense() / p.sqrt()[:, None] / p.sqrt()).max())
    by_operator = preconditioned_sharpness(H, Diagonal(p), learning_rate=0.5, momentum=0.9)
    by_function = preconditioned_sharpness(H, lambda V: V / p.sqrt()[:, None])
    assert by_operator.value == pytest.approx(truth)
    assert by_function.value == pytest.approx(truth)
    assert by_operator.max_learning_rate == pytest.approx(3.8 / truth)
    assert by_operator.ratio == pytest.approx(0.5 * truth / 3.8)
    assert by_function.max_learning_rate == pytest.approx(2 / truth)
    assert math.isnan(by_function.ratio)
    damped = preconditioned_sharpness(H, Diagonal(p - 0.5), damping=0.5)
    assert damped.value == pytest.approx(truth)
    plain = preconditioned_sharpness(H)
    assert plain.value == pytest.approx(float(torch.linalg.eigvalsh(H.to_dense()).max()))
    # the names of parameters are found through the algebra
    assert preconditioned_sharpness(2 * H, SGD(module.parameters(), lr=0.1)).value == pytest.approx(
        2 * plain.value
    )
    some = preconditioned_sharpness(H.block("bias"), SGD(module.parameters(), lr=0.1))
    assert any("1 other parameters" in word for word in some.assumed)
    negative = preconditioned_sharpness(Matrix(-torch.eye(3).double()))
    assert negative.max_learning_rate == math.inf


def test_float32_and_saving(tmp_path):
    module, x = quadratic()
    p = torch.linspace(1, 4, 8).double()
    H = hessian(module, x)
    small = FunctionOperator(lambda V: (H @ V.double()).float(), H.shape, dtype=torch.float32, symmetric=True)
    found = preconditioned_sharpness(small, Diagonal(p.float()))
    assert found.value == pytest.approx(preconditioned_sharpness(H, Diagonal(p)).value, rel=1e-4)
    assert Sharpness.load(found.save(tmp_path)).max_learning_rate == found.max_learning_rate


def untrained(module: Any) -> torch.optim.Optimizer:
    return SGD([module.weight], lr=0.1)


def groups_that_differ(module: Any) -> torch.optim.Optimizer:
    return SGD([{"params": [module.weight], "momentum": 0.5}, {"params": [module.bias]}], lr=0.1)


WRONG: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "not trained": (untrained, {}, "SGD does not train bias, which is part of the operator"),
    "several momenta": (groups_that_differ, {}, "expected one momentum for all parameters, got 0, 0.5"),
    "no state": (lambda m: torch.optim.Adam(m.parameters()), {}, "Adam has no state of weight yet"),
    "another kind": (
        lambda m: torch.optim.Adagrad(m.parameters()),
        {},
        "one of SGD, Adam, AdamW, RMSprop, got",
    ),
    "uphill": (lambda m: SGD(m.parameters(), lr=0.1, maximize=True), {}, "got maximize=True"),
    "no rate": (lambda m: SGD(m.parameters(), lr=0.0), {}, "expected a learning rate above 0, got 0"),
    "rate twice": (
        lambda m: SGD(m.parameters(), lr=0.1),
        {"learning_rate": 0.1},
        "damping, learning_rate, momentum and nesterov",
    ),
    "no root": (lambda m: Matrix(torch.eye(8).double()), {}, r"with inverse_root, Matrix\(8 × 8"),
    "damped function": (lambda m: lambda V: V, {"damping": 0.1}, "expected no damping with a function"),
    "damped optimizer": (
        lambda m: SGD(m.parameters(), lr=0.1),
        {"damping": 0.1},
        "damping, learning_rate, momentum and nesterov",
    ),
    "a word": (lambda m: "adam", {}, "expected an optimizer of torch, an operator or a function, got str"),
    "another size": (
        lambda m: Diagonal(torch.ones(3).double()),
        {},
        r"an inverse root of \(8, 8\) in torch.float64",
    ),
    "too much momentum": (lambda m: None, {"momentum": 1.0}, "expected a momentum below 1"),
    "negative rate": (lambda m: None, {"learning_rate": -1.0}, "expected a finite learning_rate above 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_one_sentence(name: str):
    make, options, message = WRONG[name]
    module, x = quadratic()
    with pytest.raises(cs.UsageError, match=message) as caught:
        preconditioned_sharpness(hessian(module, x), make(module), **options)
    assert "\n" not in str(caught.value)


def test_an_operator_without_names_takes_no_optimizer():
    module, _ = quadratic()
    with pytest.raises(cs.UsageError, match="has no named parameters to look up in the optimizer"):
        preconditioned_sharpness(Matrix(torch.eye(8).double()), SGD(module.parameters(), lr=0.1))


def test_weight_decay_may_be_beside_the_gradient_in_some_groups():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.randint(2, (12,))
    one, two = list(module[0].parameters()), list(module[2].parameters())
    adam = torch.optim.Adam(
        [
            {"params": one, "weight_decay": 0.3, "decoupled_weight_decay": True},
            {"params": two, "weight_decay": 0.2},
        ],
        lr=0.01,
    )
    for _ in range(3):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        adam.step()
    with torch.no_grad():
        adam.state[two[1]]["exp_avg_sq"][0] = 0.0  # never had a gradient
    H = cs.Hessian(cs.Problem(module, (x, y)), engine="autograd")
    names = dict(module.named_parameters())
    v = H.space.gather({name: adam.state[p]["exp_avg_sq"] for name, p in names.items()})
    W = H.space.gather({name: torch.full_like(p, 0.2 * (name[0] == "2")) for name, p in names.items()})
    apart = H.space.gather({name: torch.full_like(p, 0.3 * (name[0] == "0")) for name, p in names.items()})
    root = ((1 - 0.9**3) * ((v / (1 - 0.999**3)).sqrt() + 1e-8)).rsqrt().masked_fill(v == 0, 0.0)
    seen = root[:, None] * (H.to_dense() + torch.diag(W)) * root + torch.diag(apart * 1.9 / 0.1)
    found = cs.preconditioned_sharpness(H, adam)
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(seen)[-1]), rel=1e-8)
    assert any("never had a gradient" in word for word in found.assumed)


SEEN = torch.tensor([[0, 1, 2, 3]])  # training never looks up token 4
UNSEEN = torch.tensor([[0, 1, 4, 3]])
ADAPTIVE: dict[str, tuple[type, dict[str, Any]]] = {
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop, centered": (torch.optim.RMSprop, {"centered": True}),
    "RMSprop, momentum": (torch.optim.RMSprop, {"momentum": 0.9, "foreach": True}),
    "RMSprop, centered, momentum": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5, "eps": 1e-3}),
    "Adam": (torch.optim.Adam, {"foreach": True}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "Adam, fused": (torch.optim.Adam, {"fused": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.0}),
}


@pytest.mark.parametrize("still_group", [False, True], ids=["one rate", "a group of rate zero"])
@pytest.mark.parametrize("name", ADAPTIVE)
def test_entries_that_never_had_a_gradient_stay_where_they_are(name: str, still_group: bool):
    kind, settings = ADAPTIVE[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
    targets = torch.tensor([[1, 2, 3, 0]])
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters()}]
    optimizer = kind(groups, lr=0.01, **settings)
    if still_group:
        optimizer.param_groups[1]["lr"] = 0.0

    def loss(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(net(x).flatten(0, 1), targets.flatten())

    for _ in range(5):
        optimizer.zero_grad()
        loss(SEEN).backward()
        optimizer.step()
    params = list(net.parameters())
    g = torch.cat([part.flatten() for part in torch.autograd.grad(loss(UNSEEN), params, create_graph=True)])
    rows = [torch.autograd.grad(entry, params, retain_graph=True) for entry in g]
    H = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])
    state, group = [optimizer.state[p] for p in params], optimizer.param_groups[0]

    def flat(key: str) -> torch.Tensor:
        return torch.cat([each[key].flatten() for each in state])

    if kind is torch.optim.RMSprop:
        v = flat("square_avg")
        P = (v - flat("grad_avg") ** 2 if group["centered"] else v).sqrt() + group["eps"]
    else:
        v = flat("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
        P = (1 - 0.9**5) * ((v / (1 - 0.999**5)).sqrt() + group["eps"])
    still = v == 0
    rate = torch.ones_like(v)
    rate[15:] = 0.0 if still_group else 1.0
    root = (rate / P).sqrt().masked_fill(still, 0.0)
    found = preconditioned_sharpness(cs.Hessian(cs.Problem(net, [(UNSEEN, targets)])), optimizer)
    assert int(still.sum()) == 3
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(root[:, None] * H * root)[-1]), rel=1e-8)
    assert any("3 entries never had a gradient" in word for word in found.assumed)


@pytest.mark.parametrize(
    "name",
    ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "LBFGS", "NAdam", "RAdam", "Rprop", "SparseAdam"],
)
def test_other_optimizers_are_refused_by_name(name: str):
    module, x = quadratic()
    optimizer = getattr(torch.optim, name)(module.parameters())
    with pytest.raises(cs.UsageError, match=name):
        preconditioned_sharpness(hessian(module, x), optimizer)

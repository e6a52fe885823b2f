"""What becomes of a module and its data between and during products: numbers are right, or refused."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import curvescope as cs
from curvescope.core.progress import listening
from curvescope.core.seeds import generator
from oracles import drawn
from selection import a_half


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


X, Y = normal(12, 5), torch.arange(12) % 3


def net() -> nn.Sequential:
    def make() -> nn.Sequential:
        inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        return nn.Sequential(*inner, nn.Tanh(), nn.Linear(5, 3)).double()

    found = drawn(make)
    assert isinstance(found, nn.Sequential)
    return found


def truth(m: nn.Module, v: Tensor) -> Tensor:
    """H v by double backward over the module's own parameters, frozen ones too."""
    leaves = {name: p.detach().requires_grad_() for name, p in m.named_parameters()}
    space = cs.load(m).space()
    loss = F.cross_entropy(torch.func.functional_call(m, leaves, (X.to(m[0].bias.dtype),)), Y)
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    inner = sum((g * t).sum() for g, t in zip(first, space.scatter(v).values(), strict=True))
    return space.gather(dict(zip(leaves, torch.autograd.grad(inner, list(leaves.values())), strict=True)))


def direction(H: cs.LinearOperator) -> Tensor:
    return normal(H.shape[1], seed=1)


# ------------------------------------------------------------------------------------------------- data


class Other:
    """Data that are others each time they are read."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self):
        self.times += 1
        return iter([(X * self.times, Y)])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


PAIRS = TensorDataset(X, Y)
DATA = {
    "shuffled": lambda: DataLoader(PAIRS, batch_size=5, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=5),
    "others each time": Other,
    "several lengths": lambda: [(X[:1], Y[:1]), (X[1:8], Y[1:8]), (X[8:], Y[8:])],
}


@pytest.mark.parametrize("name", DATA)
def test_data_are_read_once_and_stay(name):
    m = net()
    H = cs.Hessian(cs.Problem(m, DATA[name]()))
    v = direction(H)
    for _ in range(3):
        torch.testing.assert_close(H @ v, truth(m, v), rtol=1e-10, atol=1e-13)


# ----------------------------------------------------------------------------------- parameters and parts


class Symmetric(nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return W.triu() + W.triu(1).T


def swap(m: nn.Sequential) -> None:
    m[0].weight, m[2].weight = m[2].weight, m[0].weight


FOLLOWED = {
    "orthogonal": lambda m: parametrizations.orthogonal(m[0]),
    "Cayley": lambda m: parametrizations.orthogonal(m[0], orthogonal_map="cayley"),
    "spectral norm": lambda m: parametrizations.spectral_norm(m[0]).eval(),
    "symmetric": lambda m: parametrize.register_parametrization(m[0], "weight", Symmetric()),
    "replaced": lambda m: setattr(m[2], "weight", nn.Parameter(normal(5, 5))),
    "swapped": swap,
    "frozen": lambda m: m.requires_grad_(False),
    "one frozen": lambda m: m[0].weight.requires_grad_(False),
}
STRUCTURE = ("orthogonal", "Cayley", "spectral norm", "symmetric")


@pytest.mark.parametrize("name", a_half(list(FOLLOWED), shift=0))
def test_parameters_that_are_made_or_become_others_are_followed(name):
    m = net()
    if name in STRUCTURE:
        FOLLOWED[name](m)
    problem = cs.Problem(m, (X, Y), params="*")
    H = cs.Hessian(problem)
    v = direction(H)
    H @ v
    if name not in STRUCTURE:
        FOLLOWED[name](m)
    flags = [p.requires_grad for p in m.parameters()]
    for op in (H, H, cs.Hessian(problem)):
        torch.testing.assert_close(op @ v, truth(m, v), rtol=1e-10, atol=1e-13)
    assert flags == [p.requires_grad for p in m.parameters()]


REFUSED = {name: FOLLOWED[name] for name in STRUCTURE} | {
    "tied": lambda m: setattr(m[2], "weight", m[0].weight),
    "no bias": lambda m: setattr(m[2], "bias", None),
    "wider": lambda m: setattr(m[0], "weight", nn.Parameter(normal(7, 5))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parameters_of_other_names_or_shapes_are_refused(name):
    problem = cs.Problem(net(), (X, Y))
    H = cs.Hessian(problem)
    v = direction(H)
    REFUSED[name](problem.model.module)
    for use in (lambda: H @ v, problem.gradient, lambda: cs.GGN(problem) @ v):
        with pytest.raises(cs.CurvescopeError, match="have other names or shapes than when it was loaded"):
            use()


# ------------------------------------------------------------------------------------------------ threads


@pytest.mark.parametrize("where", ["callback", "thread"])
def test_a_model_that_changes_inside_an_algorithm_is_refused(where):
    m = net()
    H, steps, said = cs.Hessian(cs.Problem(m, (X, Y))), [], []

    def write(what: str, done: int, total: int) -> None:
        steps.append(done)
        if len(steps) == 2:
            with torch.no_grad():
                m[0].weight.mul_(1.5)

    def work() -> None:
        try:
            with listening(write):
                cs.spectral_density(H, num_probes=1, num_steps=6)
        except cs.CurvescopeError as error:
            said.append(str(error))

    thread = threading.Thread(target=work) if where == "thread" else None
    (thread.start(), thread.join()) if thread else work()
    assert "changed" in said[0]
    v = direction(H)
    torch.testing.assert_close(H @ v, truth(m, v), rtol=1e-10, atol=1e-13)


def test_a_graph_whose_numbers_were_written_to_is_made_anew_or_refused():
    m = net()
    engine, times = cs.Hessian(cs.Problem(m, (X, Y))).engine, []

    def work() -> int:
        times.append(1)
        if len(times) % 2:  # as another thread would, in the middle
            with torch.no_grad():
                m[0].weight.mul_(1.1)
            raise RuntimeError("one of the variables needed for gradient computation has been modified")
        return 5

    assert engine.consistent(work) == 5
    with pytest.raises(cs.CurvescopeError, match="changed"), engine.frozen():
        engine.consistent(work)
    with pytest.raises(ZeroDivisionError):
        engine.consistent(lambda: 1 // 0)


@pytest.mark.usefixtures("interruptible")
def test_twenty_interrupts_leave_the_module_as_it_was():
    m = net()
    m[0].weight.requires_grad_(False)
    problem = cs.Problem(m, (X, Y), params="*")
    H = cs.Hessian(problem)
    v = direction(H)
    acts = [
        lambda: cs.Hessian(problem) @ v,
        lambda: H @ v,
        problem.gradient,
        lambda: cs.trace(H, num_probes=2),
    ]

    def state() -> list[object]:
        parts = [(sorted(vars(part)), part.training, sorted(part._parameters)) for part in m.modules()]
        return [*parts, *[(id(p), p.requires_grad) for p in m.parameters()]]

    before, heard = state(), 0
    for i in range(20):
        act = acts[i % 4]
        start = time.perf_counter()
        act()
        when = (time.perf_counter() - start) * (i + 1) / 21
        timer = threading.Timer(when, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            act()
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            heard += 1
        timer.join()
        assert state() == before
    assert heard >= 18  # Python drops one that comes while a finalizer runs
    torch.testing.assert_close(H @ v, truth(m, v), rtol=1e-10, atol=1e-13)


def test_a_layer_of_a_loss_fn_that_was_written_to_is_followed():
    m, other = net(), drawn(lambda: nn.Linear(3, 3)).double()
    problem = cs.Problem(
        m, (X, Y), loss_fn=lambda model, batch: other(model(batch[0])[..., :3]).square().mean()
    )
    H = cs.Hessian(problem)
    v = direction(H)
    before = H @ v
    with torch.no_grad():
        other.weight.mul_(1.4)
    after = H @ v
    assert float((after - before).norm()) > 1e-3 * float(before.norm())
    torch.testing.assert_close(after, cs.Hessian(problem, engine="autograd") @ v, rtol=1e-10, atol=1e-13)


def test_a_copy_that_is_made_meanwhile_is_no_change():
    class Net(nn.Module):
        """A class of which no object was ever copied."""

        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return self.inner(x)

    module = Net()
    H = cs.Hessian(cs.Problem(module, (X, Y)))
    v = normal(H.shape[0])
    with H.frozen():
        before = H @ v
        copy.deepcopy(module)
        torch.testing.assert_close(H @ v, before, rtol=0, atol=0)

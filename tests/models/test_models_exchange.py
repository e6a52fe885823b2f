"""Parts of a module are exchanged for a while: left in any order, after errors, one thread at a time."""

import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

from curvescope.models.running import patching
from curvescope.models.running.patching import (
    Change,
    evaluating,
    locked,
    parameters_at,
    patched,
    uninterrupted,
)


def test_a_place_is_put_back_in_whatever_order_blocks_are_left():
    held = {"a": 1}
    first, second = patched([Change(held, "a", 2)]), patched([Change(held, "a", 3)])
    first.__enter__()
    second.__enter__()
    assert held["a"] == 3
    first.__exit__(None, None, None)
    assert held["a"] == 3
    second.__exit__(None, None, None)
    assert held == {"a": 1}


def test_what_was_not_there_is_gone_again():
    layer = nn.Linear(2, 2)
    with patched([Change(vars(layer), "forward", lambda x: x)]):
        assert layer(5) == 5
    assert "forward" not in vars(layer)


def test_what_somebody_else_wrote_stays():
    held = {"a": 1}
    with patched([Change(held, "a", 2)]):
        held["a"] = 7
    assert held == {"a": 7}


def test_of_two_changes_of_one_place_the_later_counts():
    held = {"a": 1}
    with patched([Change(held, "a", 2), Change(held, "a", 3)]):
        assert held["a"] == 3
    assert held == {"a": 1}


def test_after_an_error_everything_is_as_it_was():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    modes = []
    net[1].register_forward_hook(lambda m, i, o: modes.append(m.training))
    net.append(nn.Linear(3, 3))  # which does not fit
    with pytest.raises(RuntimeError), evaluating(net):
        net(torch.ones(1, 2))
    assert modes == [False]
    assert net.training
    assert net[1].training


def test_tied_parameters_are_exchanged_in_all_their_places():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    own = net[0].weight
    with patched(parameters_at(net, {"0.weight": torch.zeros(2, 2)})):
        assert not net(torch.ones(1, 2)).any()
    assert net[0].weight is own
    assert net[1].weight is own


def test_threads_take_turns_with_modules_that_share_a_part():
    shared = nn.Linear(2, 2)
    left, right = nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared)
    inside, most = [0], [0]

    def work(module: nn.Module) -> None:
        for _ in range(50):
            with locked(module), locked(module):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                threading.Event().wait(1e-4)
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(m,)) for m in (left, right, left)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert most == [1]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_the_middle_leaves_the_module_as_it_was():
    net = nn.Sequential(*(nn.Dropout() for _ in range(50)))

    class Interrupting(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            signal.raise_signal(signal.SIGINT)

    held = Interrupting(a=1)
    changes = [*(Change(vars(m), "training", False) for m in net), Change(held, "a", 2)]
    with pytest.raises(KeyboardInterrupt), patched(changes):
        pass
    assert all(m.training for m in net)
    assert held["a"] == 1


class Interrupting:
    """A lock, or a frozen parameter, whose use brings Ctrl-C just when it has taken effect."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.frozen, self.times = inner, True, 0

    def acquire(self, timeout: float) -> bool:
        found = self.inner.acquire(timeout=timeout)
        signal.raise_signal(signal.SIGINT)
        return found

    def release(self) -> None:
        self.inner.release()

    def requires_grad_(self, wanted: bool) -> None:
        self.frozen = not wanted
        if not wanted and not self.times:
            self.times += 1
            signal.raise_signal(signal.SIGINT)


def entered_elsewhere(module: nn.Module) -> bool:
    """Whether another thread gets the module."""
    found = threading.Event()

    def enter() -> None:
        with locked(module):
            found.set()

    threading.Thread(target=enter, daemon=True).start()
    return found.wait(2)


@pytest.mark.usefixtures("interruptible")
def test_a_lock_that_was_taken_when_an_interrupt_came_is_let_go(monkeypatch):
    layer = nn.Linear(2, 2)
    lock = threading.RLock()
    monkeypatch.setitem(patching._locks, layer, (0, Interrupting(lock)))
    block = locked(layer)
    with pytest.raises(KeyboardInterrupt):
        block.__enter__()
    monkeypatch.setitem(patching._locks, layer, (0, lock))
    assert entered_elsewhere(layer)
    assert not any(layer is other for other in patching._held_by_thread.modules)


@pytest.mark.usefixtures("interruptible")
def test_frozen_parameters_are_frozen_again_after_an_interrupt():
    frozen = [Interrupting(None) for _ in range(3)]
    block = patching.thawed(frozen)
    block.__enter__()
    assert not any(p.frozen for p in frozen)
    with pytest.raises(KeyboardInterrupt):
        block.__exit__(None, None, None)
    assert all(p.frozen for p in frozen)


def test_a_thread_that_waits_gets_the_module_in_the_end():
    layer, inside, leave = nn.Linear(2, 2), threading.Event(), threading.Event()

    def hold() -> None:
        with locked(layer):
            inside.set()
            leave.wait(5)

    threading.Thread(target=hold, daemon=True).start()
    assert inside.wait(2)
    threading.Timer(0.25, leave.set).start()  # longer than the patience of one try
    with locked(layer):
        assert leave.is_set()

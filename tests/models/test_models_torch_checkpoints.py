"""Torch's checkpoints are passed through in a pass of ours, and are as they were after it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import curvescope as cs
from curvescope.models.running import torch_checkpoints
from curvescope.models.running.torch_checkpoints import HELPERS, passing_through

PLACE = vars(torch.utils.checkpoint)


@pytest.fixture(autouse=True)
def as_it_was():
    before = dict(PLACE)
    yield
    assert before == PLACE


class Counted:
    """x ↦ tanh x, and how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh()


def calls(reentrant: bool) -> int:
    """How often a checkpointed function runs in a forward and a backward pass."""
    x, function = torch.ones(2, requires_grad=True), Counted()
    y = checkpoint(function, x, use_reentrant=reentrant).sum()
    y.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 1 - torch.ones(2).tanh() ** 2)
    return function.calls


def test_this_torch_has_all_helpers():
    assert HELPERS.keys() <= PLACE.keys()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_function_is_called_once(reentrant: bool):
    assert calls(reentrant) == 2
    with passing_through():
        assert calls(reentrant) == 1
        with passing_through():
            assert calls(reentrant) == 1
        assert calls(reentrant) == 1
    assert calls(reentrant) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_other_threads_have_torchs_own(reentrant: bool):
    found: list[int] = []
    with passing_through():
        thread = threading.Thread(target=lambda: found.append(calls(reentrant)))
        thread.start()
        thread.join()
    assert found == [2]


def test_blocks_may_be_left_in_any_order():
    first, second = passing_through(), passing_through()
    inside, left = threading.Event(), threading.Event()

    def work() -> None:
        with second:
            inside.set()
            left.wait()
            assert calls(False) == 1

    thread = threading.Thread(target=work)
    with first:
        thread.start()
        inside.wait()
    assert calls(False) == 2
    left.set()
    thread.join()


def test_a_checkpoint_that_was_begun_outside_goes_on_inside():
    x, function = torch.ones(2, requires_grad=True), Counted()
    y = checkpoint(function, x, use_reentrant=False).sum()
    with passing_through():
        y.backward()
    assert function.calls == 2


def test_the_context_of_the_forward_pass_is_entered_as_torch_does():
    seen: list[str] = []

    @contextmanager
    def noted(word: str):
        seen.append(word)
        yield

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        contexts: Callable = lambda: (noted("forward"), noted("again"))  # noqa: E731
        checkpoint(Counted(), x, use_reentrant=False, context_fn=contexts)

    with passing_through():
        run()
        assert seen == ["forward"]
        with torch.no_grad():
            run()
    assert seen == ["forward"]


class Fails(nn.Module):
    """A layer behind a checkpoint, in which something goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def inner(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ZeroDivisionError("in the checkpoint")
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_after_an_error_everything_is_as_it_was():
    problem = cs.Problem(Fails(), (torch.ones(3, 2), torch.zeros(3, dtype=torch.long)))
    with pytest.raises(ZeroDivisionError):
        problem.gradient()
    assert calls(False) == 2


def test_checkpoints_of_an_unknown_torch_are_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch_checkpoints, "HELPERS", {"gone": lambda: None})
    monkeypatch.setattr(torch_checkpoints, "LAST", "gone")
    with passing_through():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).requires_grad
    with pytest.raises(cs.UsageError, match="does not support in this version of torch"), passing_through():
        calls(False)

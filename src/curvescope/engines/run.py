"""How the module is run: as it is, or with our kernels inside; its layers kept, or computed again.

A runner is bound to a problem and gives its outputs as a function of leaves. Everything it puts into the
user's module stands there for one call, as a list of changes that `Model.forward` makes and takes back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from curvescope.data.batches import Batch
from curvescope.engines.checkpoint import Context, checkpointed, traced
from curvescope.engines.recompute_check import Repeats, Trace
from curvescope.kernels.attention.hf import differentiated
from curvescope.kernels.backends import casting
from curvescope.kernels.head import LinearHead
from curvescope.kernels.substitute import FindHead, Head, PlainAttention, Substitute
from curvescope.models.running.exchange import Change, evaluation, exchanged
from curvescope.models.running.fused import Fused
from curvescope.problem import Leaves, Problem

Changes = Callable[[], list[Change]]
"""Further changes of the module; asked for once before every pass."""


class Runner(ABC):
    """The outputs of a problem's module, as a function of leaves."""

    name: str
    checkpoint: bool
    repeats: Repeats  # of layers that are computed again

    @abstractmethod
    def outputs(
        self,
        batch: Batch,
        leaves: Mapping[str, Tensor],
        *,
        second_order: bool,
        lazy: bool,
        more: Changes = list,
    ) -> Tensor | LinearHead:
        """The outputs z.

        Args:
            batch: A placed one.
            leaves: In place of the parameters.
            second_order: Whether they will be differentiated twice, or only once (and Jᵀu in u).
            lazy: Whether the last linear map may be left to the loss.
            more: Changes of the module for this pass.
        """


@final
class PlainRunner(Runner):
    """The module as it is, with attention that has second derivatives."""

    name = "autograd"

    def __init__(self, problem: Problem, *, checkpoint: bool = False):
        self.checkpoint, self.repeats, self._problem = checkpoint, Repeats(), problem

    def outputs(
        self,
        batch: Batch,
        leaves: Mapping[str, Tensor],
        *,
        second_order: bool,
        lazy: bool,
        more: Changes = list,
    ) -> Tensor | LinearHead:
        layers = _again(self._problem, [], PlainAttention, self.repeats) if self.checkpoint else []
        with PlainAttention():
            return self._problem.outputs(batch, leaves, changes=[*layers, *more()])


@final
class FusedRunner(Runner):
    """The module with our kernels in it.

    Args:
        problem: What is run.
        fused: The kernels that fit its module.
        head: Which linear map makes the outputs, if one does.
        checkpoint: Whether layers are computed again instead of being kept.
    """

    name = "fast"

    def __init__(self, problem: Problem, fused: Fused, head: Head | None, *, checkpoint: bool = False):
        self.checkpoint, self.repeats, self._problem = checkpoint, Repeats(), problem
        self._fused, self._head = fused, head

    def outputs(
        self,
        batch: Batch,
        leaves: Mapping[str, Tensor],
        *,
        second_order: bool,
        lazy: bool,
        more: Changes = list,
    ) -> Tensor | LinearHead:
        problem = self._problem
        changes = kernel_changes(problem, self._fused, second_order=second_order)
        around = partial(kernels, second_order=second_order)
        layers = _again(problem, changes, around, self.repeats) if self.checkpoint else []
        head = self._head if lazy else None
        if head is not None and not problem.loss.takes_head(batch.targets, head.axis):
            head = None
        with kernels(second_order=second_order, head=head) as mode:
            z = problem.outputs(batch, leaves, changes=[*changes, *layers, *more()])
        if mode.placeholder is None:
            return z
        if head is not None and mode.head is not None and head.made(z, mode.placeholder):
            return mode.head
        return self.outputs(batch, leaves, second_order=second_order, lazy=False, more=more)


def kernel_changes(problem: Problem, fused: Fused, *, second_order: bool) -> list[Change]:
    """Our kernels in the module, unless autocast is on: types are then PyTorch's to choose."""
    return [] if casting() else fused.changes(problem.model.module, second_order=second_order)


@contextmanager
def kernels(*, second_order: bool, head: Head | None = None) -> Iterator[Substitute]:
    """PyTorch's functions are ours inside; attention that has no counterpart of ours is plain."""
    with (
        differentiated(second_order=second_order),
        PlainAttention(),
        Substitute(second_order=second_order, head=None if head is None else head.number) as mode,
    ):
        yield mode


def find_head(problem: Problem, fused: Fused, batch: Batch) -> tuple[Head | None, Tensor]:
    """Which linear map makes the outputs of a module with our kernels on a placed batch; these outputs."""
    changes = kernel_changes(problem, fused, second_order=False)
    with torch.no_grad(), kernels(second_order=False), FindHead() as mode:
        z = problem.outputs(batch, changes=changes)
    return mode.place(z), z


def refuse_lost(problem: Problem, batch: Batch) -> None:
    """Raise where derivatives would get lost if layers were computed again: one pass on a placed batch."""
    trace = Trace(problem.model)
    layers = traced(problem.model, _inside(problem, [], PlainAttention), trace)

    def outputs(leaves: Leaves) -> Tensor:
        with PlainAttention():
            return problem.outputs(batch, leaves, changes=layers)

    _, z = problem.differentiable(tuple(dict(problem.model.named_parameters())), outputs, lambda z: [z])
    trace.check([z])


def _again(problem: Problem, changes: list[Change], kernels: Context, repeats: Repeats) -> list[Change]:
    """Layers that are computed again."""
    return checkpointed(problem.model, _inside(problem, changes, kernels), repeats)


def _inside(problem: Problem, changes: list[Change], kernels: Context) -> Callable[[nn.Module], Context]:
    """What a layer is computed again in: eval mode, these changes, these kernels.

    What else stands in the module while it is called is found here, once, and of it a layer that is computed
    again gets what is its own: a model of a hundred layers has a hundred times as much.
    """
    model, module = problem.model, problem.model.module
    settings = [*model.settings(module), *model.attention(module)]
    settings += [] if model.sharding is None else model.sharding.without_hooks()
    places = {id(vars(part)) for part in module.modules()}

    def context(layer: nn.Module) -> Context:
        own = {id(vars(part)) for part in layer.modules()}
        here = [c for c in (*settings, *changes) if id(c.holder) in own or id(c.holder) not in places]

        @contextmanager
        def again() -> Iterator[None]:
            # Without the lock: on a GPU autograd computes layers again in threads of its own, while the one
            # that holds the lock waits for them.
            with exchanged([*evaluation(layer), *here]), kernels():
                yield

        return again

    return context

"""Running the module, with or without our kernels, with layers stored or recomputed.

A runner is bound to a problem and gives its outputs as a function of leaves. Everything it changes in the
user's module is a list of changes that `Model.forward` applies for one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from curvescope.data.batches import Batch
from curvescope.engines.checkpoint import Context, RecomputeCheck, Trace, checkpointed, traced
from curvescope.kernels.attention.hf import differentiated
from curvescope.kernels.backends import casting
from curvescope.kernels.function_mode import FindHead, HeadLocation, PlainAttention, Substitute
from curvescope.kernels.head import LinearHead
from curvescope.models.running.fused import Fused
from curvescope.models.running.patching import Change, evaluation, patched
from curvescope.problem import Leaves, Problem

Changes = Callable[[], list[Change]]
"""Function that returns further changes of the module, called once before every pass."""


@final
class Runner:
    """Outputs of a problem's module as a function of leaves.

    Args:
        problem: The problem whose module runs.
        fused: Kernels that fit its module; without them, the module only gets attention with second
            derivatives.
        head: Linear map that makes the outputs, if there is one.
        checkpoint: Recompute layers instead of storing them.

    Attributes:
        repeats: Compares the outputs of recomputed layers with the original ones.
    """

    def __init__(
        self,
        problem: Problem,
        fused: Fused | None = None,
        head: HeadLocation | None = None,
        *,
        checkpoint: bool = False,
    ):
        self.checkpoint, self.recompute_check, self._problem = checkpoint, RecomputeCheck(), problem
        self._fused, self._head = fused, head
        self.name = "autograd" if fused is None else "fast"

    def outputs(
        self,
        batch: Batch,
        leaves: Mapping[str, Tensor],
        *,
        second_order: bool,
        lazy: bool,
        more: Changes = list,
    ) -> Tensor | LinearHead:
        """Compute the outputs z.

        Args:
            batch: A batch on the model's device.
            leaves: Tensors that replace the parameters.
            second_order: True if the outputs will be differentiated twice, not only once (and Jᵀu in u).
            lazy: If True, the loss may compute the last linear map.
            more: Function that returns changes of the module for this pass; called once.
        """
        if self._fused is None:
            layers = self._layers([], PlainAttention)
            with PlainAttention():
                return self._problem.outputs(batch, leaves, changes=[*layers, *more()])
        loss, head = self._problem.loss, self._head if lazy else None
        if head is not None and not loss.takes_head(batch.targets, head.axis):
            head = None
        kernels_in_module = kernel_changes(self._problem, self._fused, second_order=second_order)
        layers = self._layers(kernels_in_module, partial(kernels, second_order=second_order))
        with kernels(second_order=second_order, head=head) as mode:
            z = self._problem.outputs(batch, leaves, changes=[*kernels_in_module, *layers, *more()])
        if mode.placeholder is None:
            return z
        if head is not None and mode.head is not None and head.made(z, mode.placeholder):
            return mode.head
        return self.outputs(batch, leaves, second_order=second_order, lazy=False, more=more)

    def _layers(self, changes: list[Change], around: Context) -> list[Change]:
        """Return changes that recompute layers, with the given changes and kernels in them."""
        if not self.checkpoint:
            return []
        inside = _inside(self._problem, changes, around)
        return checkpointed(self._problem.model, inside, self.recompute_check)


def kernel_changes(problem: Problem, fused: Fused, *, second_order: bool) -> list[Change]:
    """Return changes that put our kernels into the module, unless autocast is on, which chooses dtypes
    itself.
    """
    return [] if casting() else fused.changes(problem.model.module, second_order=second_order)


@contextmanager
def kernels(*, second_order: bool, head: HeadLocation | None = None) -> Iterator[Substitute]:
    """Replace PyTorch's functions by our kernels inside; other attention becomes plain."""
    with (
        differentiated(second_order=second_order),
        PlainAttention(),
        Substitute(second_order=second_order, head=None if head is None else head.number) as mode,
    ):
        yield mode


def find_head(problem: Problem, fused: Fused, batch: Batch) -> tuple[HeadLocation | None, Tensor]:
    """Return the linear map that makes the outputs of a module with our kernels on a placed batch, and its
    outputs.
    """
    changes = kernel_changes(problem, fused, second_order=False)
    with torch.no_grad(), kernels(second_order=False), FindHead() as mode:
        z = problem.outputs(batch, changes=changes)
    return mode.place(z), z


def refuse_lost(problem: Problem, batch: Batch) -> None:
    """Raise if recomputing layers would lose derivatives; this runs one pass on a placed batch."""
    trace = Trace(problem.model)
    layers = traced(problem.model, _inside(problem, [], PlainAttention), trace)

    def outputs(leaves: Leaves) -> Tensor:
        with PlainAttention():
            return problem.outputs(batch, leaves, changes=layers)

    _, z = problem.differentiable(tuple(dict(problem.model.named_parameters())), outputs, lambda z: [z])
    trace.check([z])


def _inside(problem: Problem, changes: list[Change], kernels: Context) -> Callable[[nn.Module], Context]:
    """Return the context in which a layer is recomputed: eval mode, these changes, these kernels.

    Other changes of the module during the call are collected once; a recomputed layer only gets those of its
    own submodules, to save time in models with many layers.
    """
    model, module = problem.model, problem.model.module
    settings = [*model.settings(module), *model.attention(module)]
    settings += [] if model.sharding is None else model.sharding.without_hooks()
    attribute_ids = {id(vars(part)) for part in module.modules()}

    def context(layer: nn.Module) -> Context:
        attribute_dicts = {id(vars(part)) for part in layer.modules()}
        local_changes = [
            c
            for c in (*settings, *changes)
            if id(c.holder) in attribute_dicts or id(c.holder) not in attribute_ids
        ]

        @contextmanager
        def again() -> Iterator[None]:
            # Without the lock: on a GPU, autograd recomputes layers in its own threads, while the thread that
            # holds the lock waits for them.
            with patched([*evaluation(layer), *local_changes]), kernels():
                yield

        return again

    return context

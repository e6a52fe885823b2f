"""Release gathered parameters of a layer after its forward pass and gather them again in its backward pass.

An autograd graph keeps the full parameters of all layers until its backward pass, which for a sharded model
is the complete model on every rank. Inside `releasing_parameters` the graph instead stores how to gather them
again, one layer at a time. Tensors gathered again have no autograd history, so this only supports first
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple, final

import torch
from torch import Tensor


class _ReleasedView(NamedTuple):
    """Description of a saved view of one of a layer's released parameters."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@final
class _GatheredLayer:
    """Gathered parameters of the layer whose backward pass is running."""

    def __init__(self) -> None:
        self._layer: object = None
        self._parameters: Sequence[Tensor] = ()

    def take(self, layer: object, gather: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the parameters of a layer, after releasing those of the previous layer."""
        if self._layer is not layer:
            self._parameters = ()
            self._parameters, self._layer = gather(), layer
        return self._parameters


_slot: ContextVar[_GatheredLayer | None] = ContextVar("curvescope_releasing", default=None)


@contextmanager
def releasing_parameters() -> Iterator[None]:
    """Inside, layers release gathered parameters after their forward pass (first derivatives only)."""
    token = _slot.set(_GatheredLayer())
    try:
        yield
    finally:
        _slot.reset(token)


def release_parameters(
    parameters: Sequence[Tensor], gather: Callable[[], Sequence[Tensor]]
) -> AbstractContextManager[object]:
    """Return a context for the forward pass of a layer whose graph does not keep these parameters.

    Args:
        parameters: Gathered parameters of the layer.
        gather: Function that gathers them again; all ranks call it at the same point of their backward
            passes.
    """
    slot, layer = _slot.get(), object()
    if slot is None:
        return nullcontext()
    numbers = {t.untyped_storage().data_ptr(): i for i, t in enumerate(parameters) if t.numel()}

    def pack(t: Tensor) -> Tensor | _ReleasedView:
        number = numbers.get(t.untyped_storage().data_ptr())
        return (
            t
            if number is None
            else _ReleasedView(number, tuple(t.shape), t.stride(), int(t.storage_offset()))
        )

    def unpack(x: Tensor | _ReleasedView) -> Tensor:
        if isinstance(x, Tensor):
            return x
        with torch.no_grad():
            return slot.take(layer, gather)[x.number].as_strided(x.size, x.stride, x.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

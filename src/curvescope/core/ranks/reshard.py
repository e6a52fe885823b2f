"""Whole parameters of a layer, let go between its forward and its backward pass and gathered again there.

A graph holds the parameters of all layers until its backward pass comes by: of a model that is spread over
ranks, that is all of it. Inside `releasing` it holds in their place how to gather them again, those of one
layer at a time. Tensors gathered again have no autograd history, so this only supports first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple, final

import torch
from torch import Tensor


class _Gone(NamedTuple):
    """A view of one of a layer's parameters."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@final
class _Slot:
    """The parameters of the layer whose backward pass is under way."""

    def __init__(self) -> None:
        self._layer: object = None
        self._wholes: Sequence[Tensor] = ()

    def take(self, layer: object, again: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Those of a layer; the ones before are let go first."""
        if self._layer is not layer:
            self._wholes = ()
            self._wholes, self._layer = again(), layer
        return self._wholes


_slot: ContextVar[_Slot | None] = ContextVar("curvescope_releasing", default=None)


@contextmanager
def releasing() -> Iterator[None]:
    """Inside, layers let go of whole parameters; forward and backward pass, without a graph of the latter."""
    token = _slot.set(_Slot())
    try:
        yield
    finally:
        _slot.reset(token)


def let_go(wholes: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> AbstractContextManager[object]:
    """Inside, a layer is computed with these parameters, and the graph does not keep them.

    Args:
        wholes: As they are now.
        again: Gathers the same; all ranks ask for it at the same place of their backward passes.
    """
    slot, layer = _slot.get(), object()
    if slot is None:
        return nullcontext()
    numbers = {t.untyped_storage().data_ptr(): i for i, t in enumerate(wholes) if t.numel()}

    def pack(t: Tensor) -> Tensor | _Gone:
        number = numbers.get(t.untyped_storage().data_ptr())
        return t if number is None else _Gone(number, tuple(t.shape), t.stride(), int(t.storage_offset()))

    def unpack(x: Tensor | _Gone) -> Tensor:
        if isinstance(x, Tensor):
            return x
        with torch.no_grad():
            return slot.take(layer, again)[x.number].as_strided(x.size, x.stride, x.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

"""Products that somebody writes down, so that an algorithm which was stopped does not take them again.

An algorithm is deterministic: begun again from the same seed it asks for the same products in the same order.
Whoever keeps them answers those that are known, and the algorithm comes to where it was with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

from torch import Tensor

from curvescope.core.operator import LinearOperator


class Recorder(ABC):
    """Keeps the products of one piece of work, in the order in which they are asked for."""

    @abstractmethod
    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """A V for columns V (n, k): the one that is known, or a new one, which is kept."""


_recorder: ContextVar[Recorder | None] = ContextVar("curvescope_recorder", default=None)


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Give the products of the algorithms inside to `recorder`."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def recorded(op: LinearOperator) -> Iterator[LinearOperator]:
    """The operator whose products are kept, where somebody records; algorithms inside do not record again."""
    recorder = _recorder.get()
    if recorder is None:
        yield op
        return
    with recording(None):
        yield Recorded(op, recorder)


@final
class Recorded(LinearOperator):
    """An operator that asks its recorder for products; in everything else it is the operator itself."""

    def __init__(self, op: LinearOperator, recorder: Recorder):
        self.op, self.recorder = op, recorder
        self.shape, self.dtype, self.device = op.shape, op.dtype, op.device
        self.symmetric, self.psd, self.pieces = op.symmetric, op.psd, op.pieces

    def __getattr__(self, name: str) -> Any:
        if name == "op":  # before it is set, as while unpickling
            raise AttributeError(name)
        return getattr(self.op, name)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.recorder.product(self.op, V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.recorder.product(self.op.T, U)

    def in_blocks(self) -> LinearOperator:
        own = self.op.in_blocks()
        return self if own is self.op else Recorded(own, self.recorder)

    def __repr__(self) -> str:
        return repr(self.op)

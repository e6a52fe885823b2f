"""Recording of products, so that a stopped algorithm need not compute them again.

An algorithm is deterministic: with the same seed it requests the same products in the same order. A recorder
returns the products that it has stored, so the algorithm reaches its previous state with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

from torch import Tensor

from curvescope.core.operator import LinearOperator


class ProductRecorder(ABC):
    """Store of the products of one piece of work, in the order of the requests."""

    @abstractmethod
    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """Return A V for columns V (n, k): the stored product, or a new one, which is then stored."""


_recorder: ContextVar[ProductRecorder | None] = ContextVar("curvescope_recorder", default=None)


@contextmanager
def recording(recorder: ProductRecorder | None) -> Iterator[None]:
    """Record the products of all algorithms inside the context with `recorder`."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def recorded(op: LinearOperator) -> Iterator[LinearOperator]:
    """Yield the operator, wrapped if a recorder is active; nested algorithms do not record again."""
    recorder = _recorder.get()
    if recorder is None:
        yield op
        return
    with recording(None):
        yield RecordedOperator(op, recorder)


@final
class RecordedOperator(LinearOperator):
    """Operator that gets its products from a recorder, and is otherwise like the wrapped one."""

    def __init__(self, op: LinearOperator, recorder: ProductRecorder):
        self.op, self.recorder = op, recorder
        self.shape, self.dtype, self.device = op.shape, op.dtype, op.device
        self.symmetric, self.psd, self.shards = op.symmetric, op.psd, op.shards

    def __getattr__(self, name: str) -> Any:
        if name == "op":  # not set yet, as during unpickling
            raise AttributeError(name)
        return getattr(self.op, name)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.recorder.product(self.op, V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.recorder.product(self.op.T, U)

    def in_blocks(self) -> LinearOperator:
        reordered = self.op.in_blocks()
        return self if reordered is self.op else RecordedOperator(reordered, self.recorder)

    def __repr__(self) -> str:
        return repr(self.op)

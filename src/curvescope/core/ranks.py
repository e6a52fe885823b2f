"""Errors that every rank raises together, so that none waits for one that has stopped.

Processes (ranks) that compute one thing meet in collective operations. If one of them raises on the way to
the next, the others wait there for it. So what a rank does alone between two of them (looking at a number,
writing a file, its own share of a product) stands in a `together` block: at its end the ranks tell each other
what went wrong, and all of them raise the same sentence. No collective operation may stand inside a block.

Only what is declared with `in_step` is agreed on: one rank of a training job may look at a model on its own.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from curvescope.core.errors import CurvescopeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Ranks(NamedTuple):
    """Those that are in step; None is every rank there is."""

    group: ProcessGroup | None


_in_step: ContextVar[_Ranks | None] = ContextVar("in_step", default=None)
_ALONE = nullcontext()


@contextmanager
def in_step(group: ProcessGroup | None = None) -> Iterator[None]:
    """Inside, every rank of the group, by default all there are, takes the same steps in this thread."""
    token = _in_step.set(_Ranks(group))
    try:
        yield
    finally:
        _in_step.reset(token)


def alone() -> bool:
    """Whether this process computes by itself."""
    return _in_step.get() is None


def together() -> AbstractContextManager[None]:
    """A block that raises on every rank in step if it raises on one of them; in one process it does nothing.

    All raise a CurvescopeError with the rank and its sentence, the lowest rank's if there are several. Where
    every rank says the same, each raises its own error as it is.
    """
    ranks = _in_step.get()
    return _ALONE if ranks is None else _agreed(ranks)


@contextmanager
def _agreed(ranks: _Ranks) -> Iterator[None]:
    import torch.distributed as dist

    error = None
    try:
        yield
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    said: list[tuple[str, str | None] | None] = [None] * dist.get_world_size(ranks.group)
    dist.all_gather_object(said, None if error is None else _sentence(error), group=ranks.group)
    if error is not None and len(set(said)) == 1:
        raise error
    for rank, sentence in enumerate(said):
        if sentence is not None:
            raise CurvescopeError(f"rank {rank}: {sentence[0]}", hint=sentence[1]) from error


def _sentence(error: BaseException) -> tuple[str, str | None]:
    """The message and the hint."""
    if isinstance(error, CurvescopeError):
        return error.message, error.hint
    return traceback.format_exception_only(error)[-1].strip(), None

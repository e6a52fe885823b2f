"""Errors that all ranks raise together, so that no rank waits for one that has stopped.

Ranks (processes) that compute one result meet in collective operations. If one rank raises before the next
one, the others wait forever. So work that a rank does alone between two collective operations (checking a
number, writing a file, its part of a product) belongs in a `shared_errors` block. At the end of the block the
ranks exchange their errors, and all of them raise the same message. A block must not contain a collective
operation.

Ranks are in step only inside `in_step`: one rank of a training job may measure a model alone. A `Division`
describes how ranks in step divide products; operators read it from `current_division`. If models are sharded
instead, functions that load models check `loads_sharded`.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from curvescope.core.errors import CurvescopeError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class _RankGroup(NamedTuple):
    """Ranks in step; a group of None means all ranks."""

    group: ProcessGroup | None


class Division(ABC):
    """Division of the work of a product over ranks; `op` is an operator of `curvescope.operators`."""

    @abstractmethod
    def undivided(self, op: Any, V: Tensor, rows: Any, columns: Any) -> tuple[Tensor, float]:
        """Return the sum over all batches applied to V (n, k), and N: the same on every rank."""

    @abstractmethod
    def frozen(self, op: Any) -> AbstractContextManager[None]:
        """Freeze `op` on all ranks; raise on all of them if one finds a change."""


_in_step: ContextVar[_RankGroup | None] = ContextVar("in_step", default=None)
PieceDivision = Literal["never", "auto", "always"]
_piece_division: ContextVar[PieceDivision] = ContextVar("piece_division", default="never")
_division: ContextVar[Division | None] = ContextVar("division", default=None)
_loads_sharded: ContextVar[bool] = ContextVar("loads_sharded", default=False)
_NO_SHARED_ERRORS = nullcontext()


@contextmanager
def in_step(group: ProcessGroup | None = None) -> Iterator[None]:
    """Declare that all ranks of the group, by default all ranks, take the same steps in this thread."""
    token = _in_step.set(_RankGroup(group))
    try:
        yield
    finally:
        _in_step.reset(token)


@contextmanager
def use_division(
    division: Division | None, *, pieces: PieceDivision = "never", models: bool = False
) -> Iterator[None]:
    """Set how ranks divide their work inside.

    Args:
        division: Division of products; None if each rank computes complete products.
        pieces: Setting of whether ranks compute different pieces of a study instead.
        models: If True, models that are loaded are sharded over the ranks.
    """
    tokens = _division.set(division), _piece_division.set(pieces), _loads_sharded.set(models)
    try:
        yield
    finally:
        _division.reset(tokens[0])
        _piece_division.reset(tokens[1])
        _loads_sharded.reset(tokens[2])


@contextmanager
def single_process() -> Iterator[None]:
    """Inside, this rank works alone, without any exchange with other ranks."""
    token = _in_step.set(None)
    try:
        with use_division(None):
            yield
    finally:
        _in_step.reset(token)


def is_single_process() -> bool:
    """Return True if this process computes alone."""
    return _in_step.get() is None


def current_division() -> Division | None:
    """Return how this process divides products over ranks; None in a single process."""
    return _division.get()


def piece_division() -> PieceDivision:
    """Return the setting of whether ranks compute different pieces of a study."""
    return _piece_division.get()


def loads_sharded() -> bool:
    """Return True if a model that is loaded now should be sharded over the ranks in step."""
    return _loads_sharded.get()


def rank_and_size() -> tuple[int, int]:
    """Return the number of this rank among those in step, and their count; (0, 1) for a single process."""
    ranks = _in_step.get()
    if ranks is None:
        return 0, 1
    dist = _dist()
    return dist.get_rank(ranks.group), dist.get_world_size(ranks.group)


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 while the others wait, and return its result on every rank."""
    rank, _ = rank_and_size()
    result: Any = None
    with shared_errors():
        if rank == 0:
            with single_process():
                result = work()
    return gather_objects(result)[0]


def group_in_step() -> ProcessGroup | None:
    """Return the process group of the ranks in step; None for all ranks."""
    ranks = _in_step.get()
    return None if ranks is None else ranks.group


def gather_objects(value: T) -> list[T]:
    """Gather one value from each rank in step, in the order of ranks."""
    ranks = _in_step.get()
    if ranks is None:
        return [value]
    dist = _dist()
    values: list[Any] = [None] * dist.get_world_size(ranks.group)
    dist.all_gather_object(values, value, group=ranks.group)
    return values


def shared_errors() -> AbstractContextManager[None]:
    """Return a context that raises on every rank in step if one rank raises; a no-op in a single process.

    All ranks raise a CurvescopeError with the lowest failed rank and its message. If all ranks have the same
    message, each raises its own error unchanged.
    """
    ranks = _in_step.get()
    return _NO_SHARED_ERRORS if ranks is None else _shared_errors(ranks)


@contextmanager
def _shared_errors(ranks: _RankGroup) -> Iterator[None]:
    error = None
    try:
        yield
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    dist = _dist()
    messages: list[tuple[str, str | None] | None] = [None] * dist.get_world_size(ranks.group)
    dist.all_gather_object(messages, None if error is None else _message_and_hint(error), group=ranks.group)
    if error is not None and len(set(messages)) == 1:
        raise error
    for rank, sentence in enumerate(messages):
        if sentence is not None:
            raise CurvescopeError(f"rank {rank}: {sentence[0]}", hint=sentence[1]) from error


def _dist() -> Any:
    """Import torch.distributed, which a single process does not need."""
    import torch.distributed

    return torch.distributed


def _message_and_hint(error: BaseException) -> tuple[str, str | None]:
    """Message and hint of an error."""
    if isinstance(error, CurvescopeError):
        return error.message, error.hint
    return traceback.format_exception_only(error)[-1].strip(), None

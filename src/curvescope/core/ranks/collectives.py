"""Errors that every rank raises together, so that none waits for one that has stopped.

Processes (ranks) that compute one thing meet in collective operations. If one of them raises on the way to
the next, the others wait there for it. So what a rank does alone between two of them (looking at a number,
writing a file, its own share of a product) stands in a `together` block: at its end the ranks tell each other
what went wrong, and all of them raise the same sentence. No collective operation may stand inside a block.

Only what is declared with `in_step` is agreed on: one rank of a training job may look at a model on its own.
How ranks in step divide products among them is a `Division`, which operators ask for (`dividing`). Where they
cut models instead, whoever loads one asks (`spreading`).
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


class _Ranks(NamedTuple):
    """Those that are in step; None is every rank there is."""

    group: ProcessGroup | None


class Division(ABC):
    """Division of the work of a product over ranks; the operator is one of `operators`."""

    @abstractmethod
    def undivided(self, op: Any, V: Tensor, rows: Any, columns: Any) -> tuple[Tensor, float]:
        """The sum over all batches applied to V (n, k), and N: the same on every rank."""

    @abstractmethod
    def frozen(self, op: Any) -> AbstractContextManager[None]:
        """Freeze `op` on all ranks; raise on all of them if one finds a change."""


_in_step: ContextVar[_Ranks | None] = ContextVar("in_step", default=None)
Apart = Literal["never", "auto", "always"]
_pieces_apart: ContextVar[Apart] = ContextVar("pieces_apart", default="never")
_division: ContextVar[Division | None] = ContextVar("division", default=None)
_spreading: ContextVar[bool] = ContextVar("spreading", default=False)
_ALONE = nullcontext()


@contextmanager
def in_step(group: ProcessGroup | None = None) -> Iterator[None]:
    """Inside, every rank of the group, by default all there are, takes the same steps in this thread."""
    token = _in_step.set(_Ranks(group))
    try:
        yield
    finally:
        _in_step.reset(token)


@contextmanager
def dividing_by(
    division: Division | None, *, pieces: Apart = "never", models: bool = False
) -> Iterator[None]:
    """Inside, operators divide their products so; None: each rank computes all of them.

    Args:
        division: Of products.
        pieces: Whether ranks take pieces of a study apart from each other instead.
        models: Whether a model that is loaded is spread over the ranks.
    """
    tokens = _division.set(division), _pieces_apart.set(pieces), _spreading.set(models)
    try:
        yield
    finally:
        _division.reset(tokens[0])
        _pieces_apart.reset(tokens[1])
        _spreading.reset(tokens[2])


@contextmanager
def by_itself() -> Iterator[None]:
    """Inside, this rank works alone, whatever the others do."""
    token = _in_step.set(None)
    try:
        with dividing_by(None):
            yield
    finally:
        _in_step.reset(token)


def alone() -> bool:
    """Return True if this process computes by itself."""
    return _in_step.get() is None


def dividing() -> Division | None:
    """Return how this process divides products over ranks; None in a single process."""
    return _division.get()


def pieces_apart() -> Apart:
    """Return True if ranks take pieces of a study apart from each other."""
    return _pieces_apart.get()


def spreading() -> bool:
    """Return True if a model that is loaded here is to be spread over the ranks in step."""
    return _spreading.get()


def place() -> tuple[int, int]:
    """This rank among those in step, and their number; (0, 1) for a process by itself."""
    ranks = _in_step.get()
    if ranks is None:
        return 0, 1
    dist = _dist()
    return dist.get_rank(ranks.group), dist.get_world_size(ranks.group)


def from_first(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 while the others wait, and return its result on every rank."""
    rank, _ = place()
    found: Any = None
    with together():
        if rank == 0:
            with by_itself():
                found = work()
    return everyone(found)[0]


def group_in_step() -> ProcessGroup | None:
    """The group that is in step; None is every rank there is."""
    ranks = _in_step.get()
    return None if ranks is None else ranks.group


def everyone(value: T) -> list[T]:
    """The values that the ranks in step give here, in their order."""
    ranks = _in_step.get()
    if ranks is None:
        return [value]
    dist = _dist()
    found: list[Any] = [None] * dist.get_world_size(ranks.group)
    dist.all_gather_object(found, value, group=ranks.group)
    return found


def together() -> AbstractContextManager[None]:
    """A block that raises on every rank in step if it raises on one of them; in one process it does nothing.

    All raise a CurvescopeError with the rank and its sentence, the lowest rank's if there are several. Where
    every rank says the same, each raises its own error as it is.
    """
    ranks = _in_step.get()
    return _ALONE if ranks is None else _agreed(ranks)


@contextmanager
def _agreed(ranks: _Ranks) -> Iterator[None]:
    error = None
    try:
        yield
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    dist = _dist()
    said: list[tuple[str, str | None] | None] = [None] * dist.get_world_size(ranks.group)
    dist.all_gather_object(said, None if error is None else _sentence(error), group=ranks.group)
    if error is not None and len(set(said)) == 1:
        raise error
    for rank, sentence in enumerate(said):
        if sentence is not None:
            raise CurvescopeError(f"rank {rank}: {sentence[0]}", hint=sentence[1]) from error


def _dist() -> Any:
    """torch.distributed, which a process by itself does not load."""
    import torch.distributed

    return torch.distributed


def _sentence(error: BaseException) -> tuple[str, str | None]:
    """The message and the hint."""
    if isinstance(error, CurvescopeError):
        return error.message, error.hint
    return traceback.format_exception_only(error)[-1].strip(), None

"""One loop for all long computations: named pieces of work, with progress, saved as they finish.

On disk the products of the current piece are saved too, so that it resumes in the middle.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

from curvescope.core.errors import CurvescopeError
from curvescope.core.number_format import duration
from curvescope.core.progress import Progress
from curvescope.core.ranks import is_single_process, shared_errors
from curvescope.core.result import Result
from curvescope.runs.pieces import Pieces
from curvescope.runs.ranks.piece_rounds import do_round, rounds
from curvescope.runs.verification.checks import Verification

if TYPE_CHECKING:
    from curvescope.core.config import Config
    from curvescope.operators.base import CurvatureOperator
    from curvescope.problem import Problem

R = TypeVar("R", bound=Result)
LONG_SECONDS = 20.0  # remaining seconds from which on the loop announces them
CONTENTS = "contents"
"""Name of the entry of a state that identifies the model and data of its pieces."""


class PieceStore(ABC):
    """Storage of pieces on disk, separate for different contents of model and data."""

    @abstractmethod
    def at(self, contents: str, names: Sequence[str] = ()) -> MutableMapping[str, Result]:
        """Return the pieces of these contents only; `names` lists all pieces of the run."""

    @abstractmethod
    def tell(self, line: str) -> None:
        """Show an early result to the user."""

    @abstractmethod
    def warn(self, line: str) -> None:
        """Show a warning to the user, and write it to the log if there is one."""

    @abstractmethod
    def verified(self, found: Verification) -> None:
        """Save the result of the check of an operator, passed or not."""


State = PieceStore | MutableMapping[str, Result]
"""Storage from which a stopped run resumes: a piece store, or any mapping of finished pieces by name."""


@final
@dataclass(frozen=True)
class Piece:
    """Named piece of work; `work` gets the results of the pieces that it needs."""

    name: str
    work: Callable[..., Result]
    words: str = ""  # text for the progress display; by default the name
    answer: Callable[[Result], str] | None = None  # one line on the result, shown while other pieces run
    kind: str = ""  # pieces of one kind take about equally long
    needs: tuple[str, ...] = ()  # names of earlier pieces


class Planned(NamedTuple):
    """Settings of a study and the function from settings to pieces, so that the rest can be planned again."""

    cfg: Config
    problem: Problem
    pieces: Callable[[Any], Sequence[Piece]]  # takes a configuration whose adjustable settings may differ


class Pace(ABC):
    """Controller that keeps a run within a time budget."""

    @abstractmethod
    def pieces(self, planned: Planned, done: Collection[str], state: State | None) -> Sequence[Piece]:
        """Return all pieces as planned from now on; called before each piece."""


_pace: ContextVar[Pace | None] = ContextVar("curvescope_pace", default=None)


@contextmanager
def use_pace(pace: Pace | None) -> Iterator[None]:
    """Keep studies that pass `planned` within the time of `pace`, inside the context."""
    token = _pace.set(pace)
    try:
        yield
    finally:
        _pace.reset(token)


@final
@dataclass(frozen=True)
class Contents(Result):
    """Fingerprint of model and data, stored as the entry CONTENTS of a state."""

    digest: str


@final
class FinishedPieces:
    """Finished pieces by name."""

    def __init__(self, pieces: MutableMapping[str, Result]):
        self._pieces = pieces

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def take(self, kind: type[R], name: str) -> R:
        """Return the piece of this name; raise if its class is not `kind`."""
        found = self._pieces[name]
        if not isinstance(found, kind):
            raise CurvescopeError(
                f"expected a {kind.__name__} as the piece {name!r}, got a {type(found).__name__}",
                hint="remove the state to start again",
            )
        return found


def work_through(
    pieces: Iterable[Piece],
    *,
    contents: str = "",
    progress: Progress | None = None,
    state: State | None = None,
    planned: Planned | None = None,
) -> FinishedPieces:
    """Compute the pieces that `state` does not have yet, in order, and store each when it is done.

    If `state` is a piece store, every kind of operator is checked before its first product (`verification`).

    Args:
        contents: Fingerprint of the model and data; "" if everything follows from the settings. A mapping
            with pieces of other contents is emptied first; a piece store separates contents itself.
        progress: Called with (words, number, total) at the start of each piece that is not stored yet.
        planned: Lets a run with a time budget plan its pieces again during the run; it may leave some out.
    """
    todo = list(pieces)
    names = [piece.name for piece in todo]
    assert len({*names, CONTENTS}) == len(names) + 1, f"two pieces have the same name: {sorted(names)}"
    with shared_errors():
        finished = _finished_pieces(state, contents, names)
    from curvescope.core.operator.first_product_hooks import on_first_product

    check, kind = None, type
    if isinstance(state, PieceStore):
        from curvescope.runs.verification import verification

        check, kind = partial(_verify_or_raise, state, verification.verify_by_all), verification.kind_of
    with on_first_product(check, kind), _forward_warnings(state):
        _do_in_order(todo, finished, progress, state, planned)
    return FinishedPieces(finished)


def _verify_or_raise(
    place: PieceStore, verify: Callable[[CurvatureOperator], Verification | None], op: CurvatureOperator
) -> None:
    """Check an operator before its first product; raise if it fails."""
    verification = verify(op)
    if verification is not None:
        place.verified(verification)
        if not verification.passed:
            raise verification.refusal()


@contextmanager
def _forward_warnings(state: State | None) -> Iterator[None]:
    """Forward warnings of this package to the piece store, for instance that memory ran out."""
    if not isinstance(state, PieceStore):
        yield
        return
    logger, ear = logging.getLogger("curvescope"), logging.Handler(logging.WARNING)
    ear.emit = lambda record: state.warn(record.getMessage())
    logger.addHandler(ear)
    try:
        yield
    finally:
        logger.removeHandler(ear)


def _do_in_order(
    todo: Sequence[Piece],
    kept: MutableMapping[str, Result],
    progress: Progress | None,
    state: State | None,
    planned: Planned | None,
) -> None:
    """Compute the pieces that are not stored yet, one after the other."""
    _do_in_rounds(todo, kept, progress, state)
    pace = _pace.get() if planned is not None and is_single_process() else None
    finished = {piece.name for piece in todo if piece.name in kept}
    awaited = Counter(piece.kind for piece in todo if piece.kind and piece.name not in finished)
    while True:
        if pace is not None and planned is not None:
            todo = pace.pieces(planned, finished, state)
        numbered = enumerate(todo, start=1)
        number, piece = next(((n, p) for n, p in numbered if p.name not in finished), (0, None))
        if piece is None:
            return
        start = time.monotonic()
        if progress is not None:
            progress(piece.words or piece.name, number, len(todo))
        with _saving_products(kept, piece.name):
            result = piece.work(*(kept[name] for name in piece.needs))
            with shared_errors():
                kept[piece.name] = result
        finished.add(piece.name)
        if isinstance(state, PieceStore) and piece.answer is not None:
            state.tell(piece.answer(result))
        remaining = (awaited.pop(piece.kind, 1) - 1) * (time.monotonic() - start)
        if isinstance(state, PieceStore) and remaining > LONG_SECONDS and pace is None:
            state.tell(f"about {duration(remaining)} left for the {piece.kind}")


def _do_in_rounds(
    todo: Sequence[Piece],
    finished: MutableMapping[str, Result],
    progress: Progress | None,
    state: State | None,
) -> None:
    """Compute independent pieces in parallel on ranks, if rounds are in use."""
    number = sum(piece.name in finished for piece in todo) + 1
    for pieces in rounds(todo, finished):
        results = do_round(pieces, finished, progress, number, len(todo))
        number += len(pieces)
        for piece in pieces:
            if isinstance(state, PieceStore) and piece.answer is not None:
                state.tell(piece.answer(results[piece.name]))


def _saving_products(finished: MutableMapping[str, Result], name: str) -> AbstractContextManager[None]:
    """Return the context that saves the products of the current piece, on one process or on all ranks."""
    keep = getattr(finished, "inside", None)
    return (
        nullcontext()
        if keep is None or (isinstance(finished, Pieces) and not is_single_process())
        else keep(name)
    )


def _finished_pieces(state: State | None, contents: str, names: Sequence[str]) -> MutableMapping[str, Result]:
    """Return the finished pieces of these contents; clear a mapping with pieces of other contents."""
    if isinstance(state, PieceStore):
        return state.at(contents, names)
    state = {} if state is None else state
    if not contents:
        return state
    begun = state.get(CONTENTS)
    if not isinstance(begun, Contents) or begun.digest != contents:
        for name in list(state):
            del state[name]
        state[CONTENTS] = Contents(contents)
    if isinstance(state, Pieces):
        state.contents = contents
    return state

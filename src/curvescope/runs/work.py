"""One loop for everything that takes a while: named pieces of work, with progress, kept as they are done.

On disk the products of the piece in hand are kept too, so that it goes on in its middle.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar, final

from curvescope.core.errors import CurvescopeError
from curvescope.core.numbers import duration
from curvescope.core.progress import Progress
from curvescope.core.ranks import alone, together
from curvescope.core.result import Result
from curvescope.runs.pieces import Pieces
from curvescope.runs.ranks.rounds import do_round, rounds
from curvescope.runs.verified.checks import Verification

if TYPE_CHECKING:
    from curvescope.operators.base import CurvatureOperator

R = TypeVar("R", bound=Result)
LONG = 20.0  # seconds that are announced
CONTENTS = "contents"
"""The name of the entry of a state that says which model and data its pieces are of."""


class Place(ABC):
    """Where pieces are kept on disk, apart for different contents of model and data."""

    @abstractmethod
    def at(self, contents: str, names: Sequence[str] = ()) -> MutableMapping[str, Result]:
        """The pieces of these contents, none of others; `names` are all that there will be."""

    @abstractmethod
    def tell(self, line: str) -> None:
        """Pass a first answer on to a person."""

    @abstractmethod
    def warn(self, line: str) -> None:
        """Pass something unexpected on to a person, and keep it where there is a log."""

    @abstractmethod
    def verified(self, found: Verification) -> None:
        """Keep what a run found when it checked an operator, passed or not."""


State = Place | MutableMapping[str, Result]
"""What lets a run that was stopped go on: a place, or any mapping with the finished pieces by name."""


@final
@dataclass(frozen=True)
class Piece:
    """A piece of work with a name of its own; `work` is given the results of those that it needs."""

    name: str
    work: Callable[..., Result]
    words: str = ""  # for the progress; by default the name
    answer: Callable[[Result], str] | None = None  # one line of what came out, told while the rest is done
    kind: str = ""  # pieces of one kind take about as long as each other
    needs: tuple[str, ...] = ()  # names of earlier pieces


@final
@dataclass(frozen=True)
class Contents(Result):
    """The fingerprint of model and data; the entry CONTENTS of a state."""

    digest: str


@final
class Finished:
    """The finished pieces, by name."""

    def __init__(self, pieces: MutableMapping[str, Result]):
        self._pieces = pieces

    def take(self, kind: type[R], name: str) -> R:
        """The piece of that name, which is of that kind."""
        found = self._pieces[name]
        if not isinstance(found, kind):
            raise CurvescopeError(
                f"expected a {kind.__name__} as the piece {name!r}, the state has a {type(found).__name__}",
                hint="remove the state to begin anew",
            )
        return found


def work_through(
    pieces: Iterable[Piece],
    *,
    contents: str = "",
    progress: Progress | None = None,
    state: State | None = None,
) -> Finished:
    """Do the pieces that `state` does not have yet, in order, and store each as it is done.

    In a place, every kind of operator is checked before its first product (`verification`).

    Args:
        contents: fingerprint of the model and data; "" where all comes from the settings. A mapping that was
            begun with other contents is emptied and begun anew; a place has pieces of these alone.
        progress: called with (words, number, total) as each piece begins that is not there.
    """
    todo = list(pieces)
    names = [piece.name for piece in todo]
    assert len({*names, CONTENTS}) == len(names) + 1, f"two pieces have one name: {sorted(names)}"
    with together():
        kept = _kept(state, contents, names)
    from curvescope.core.operator.meeting import looking

    look, kind = None, type
    if isinstance(state, Place):
        from curvescope.runs.verified import verification

        look, kind = partial(_verified, state, verification.verify_by_all), verification.kind_of
    with looking(look, kind), _heard(state):
        _work_off(todo, kept, progress, state)
    return Finished(kept)


def _verified(
    place: Place, verify: Callable[[CurvatureOperator], Verification | None], op: CurvatureOperator
) -> None:
    """Check an operator before its first product; raise if it fails."""
    found = verify(op)
    if found is not None:
        place.verified(found)
        if not found.passed:
            raise found.refusal()


@contextmanager
def _heard(state: State | None) -> Iterator[None]:
    """Warnings of this package reach the place, such as that memory ran out."""
    if not isinstance(state, Place):
        yield
        return
    logger, ear = logging.getLogger("curvescope"), logging.Handler(logging.WARNING)
    ear.emit = lambda record: state.warn(record.getMessage())
    logger.addHandler(ear)
    try:
        yield
    finally:
        logger.removeHandler(ear)


def _work_off(
    todo: Sequence[Piece],
    kept: MutableMapping[str, Result],
    progress: Progress | None,
    state: State | None,
) -> None:
    """Do what is not there yet."""
    _do_apart(todo, kept, progress, state)
    awaited = Counter(piece.kind for piece in todo if piece.kind and piece.name not in kept)
    for number, piece in enumerate(todo, start=1):
        if piece.name in kept:
            continue
        start = time.monotonic()
        if progress is not None:
            progress(piece.words or piece.name, number, len(todo))
        with _inside(kept, piece.name):
            done = piece.work(*(kept[name] for name in piece.needs))
            with together():
                kept[piece.name] = done
        if isinstance(state, Place) and piece.answer is not None:
            state.tell(piece.answer(done))
        rest = (awaited.pop(piece.kind, 1) - 1) * (time.monotonic() - start)
        if isinstance(state, Place) and rest > LONG:
            state.tell(f"about {duration(rest)} for the rest of the {piece.kind}")


def _do_apart(
    todo: Sequence[Piece],
    kept: MutableMapping[str, Result],
    progress: Progress | None,
    state: State | None,
) -> None:
    """Do what ranks take apart from each other, if they do."""
    number = sum(piece.name in kept for piece in todo) + 1
    for some in rounds(todo, kept):
        done = do_round(some, kept, progress, number, len(todo))
        number += len(some)
        for piece in some:
            if isinstance(state, Place) and piece.answer is not None:
                state.tell(piece.answer(done[piece.name]))


def _inside(kept: MutableMapping[str, Result], name: str) -> AbstractContextManager[None]:
    """Where products of the piece in hand are kept: by a process alone, or one for all ranks."""
    keep = getattr(kept, "inside", None)
    return nullcontext() if keep is None or (isinstance(kept, Pieces) and not alone()) else keep(name)


def _kept(state: State | None, contents: str, names: Sequence[str]) -> MutableMapping[str, Result]:
    """The finished pieces of these contents; a mapping is emptied if its pieces belong to others."""
    if isinstance(state, Place):
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

"""One loop for everything that takes a while: named pieces of work, with progress, kept as they are done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import TypeVar, final

from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import Progress
from curvescope.core.ranks import together
from curvescope.core.result import Result

R = TypeVar("R", bound=Result)
CONTENTS = "contents"
"""The name of the entry of a state that says which model and data its pieces are of."""


class Place(ABC):
    """Where pieces are kept on disk, apart for different contents of model and data."""

    @abstractmethod
    def at(self, contents: str) -> MutableMapping[str, Result]:
        """The pieces of these contents, none of others."""


State = Place | MutableMapping[str, Result]
"""What lets a run that was stopped go on: a place, or any mapping with the finished pieces by name."""


@final
@dataclass(frozen=True)
class Piece:
    """A piece of work with a name of its own."""

    name: str
    work: Callable[[], Result]
    words: str = ""  # for the progress; by default the name


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

    Args:
        contents: fingerprint of the model and data; "" where all comes from the settings. A mapping that was
            begun with other contents is emptied and begun anew; a place has pieces of these alone.
        progress: called with (words, number, total) as each piece begins.
    """
    todo = list(pieces)
    names = [piece.name for piece in todo]
    assert len({*names, CONTENTS}) == len(names) + 1, f"two pieces have one name: {sorted(names)}"
    with together():
        kept = _kept(state, contents)
    for number, piece in enumerate(todo, start=1):
        if progress is not None:
            progress(piece.words or piece.name, number, len(todo))
        if piece.name not in kept:
            found = piece.work()
            with together():
                kept[piece.name] = found
    return Finished(kept)


def _kept(state: State | None, contents: str) -> MutableMapping[str, Result]:
    """The finished pieces of these contents; a mapping is emptied if its pieces belong to others."""
    if isinstance(state, Place):
        return state.at(contents)
    state = {} if state is None else state
    if not contents:
        return state
    begun = state.get(CONTENTS)
    if not isinstance(begun, Contents) or begun.digest != contents:
        for name in list(state):
            del state[name]
        state[CONTENTS] = Contents(contents)
    return state

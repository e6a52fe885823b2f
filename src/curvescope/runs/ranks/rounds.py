"""Pieces of work that ranks take one each, round by round, where there are enough that need no other.

Each rank does its piece by itself, with all data, then all have what came out of the round. A round takes as
long as its slowest piece; of a run that is stopped the finished rounds are kept.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING

from curvescope.core.progress import Progress
from curvescope.core.ranks import by_itself, everyone, pieces_apart, place, together
from curvescope.core.result import Result

if TYPE_CHECKING:
    from curvescope.runs.work import Piece

ENOUGH = 8  # pieces for each rank, from which on `auto` takes rounds


def rounds(todo: Sequence[Piece], kept: MutableMapping[str, Result]) -> list[list[Piece]]:
    """Pieces that can be done at the same time, as many as there are ranks; none where they are not apart."""
    _, ranks = place()
    wish = pieces_apart()
    missing = [piece for piece in todo if piece.name not in kept]
    if ranks == 1 or wish == "never" or (wish == "auto" and len(missing) < ENOUGH * ranks):
        return []
    found: list[list[Piece]] = []
    there = set(kept)
    while missing:
        ready = [piece for piece in missing if there.issuperset(piece.needs)][:ranks]
        assert ready, "a piece needs earlier ones"
        found.append(ready)
        there.update(piece.name for piece in ready)
        missing = [piece for piece in missing if piece not in ready]
    return found


def do_round(
    some: Sequence[Piece],
    kept: MutableMapping[str, Result],
    progress: Progress | None,
    number: int,
    total: int,
) -> dict[str, Result]:
    """Do a piece on each rank, and keep all of them: what came out, by name.

    Args:
        some: At most as many as there are ranks.
        kept: Finished pieces.
        progress: As in `work_through`.
        number: Of the first of them.
        total: Of all pieces.
    """
    rank, _ = place()
    if progress is not None:
        progress(", ".join(piece.words or piece.name for piece in some), number, total)
    done = None
    with together():
        if rank < len(some):
            piece = some[rank]
            with by_itself():
                done = piece.work(*(kept[name] for name in piece.needs))
    found = {
        piece.name: result for piece, result in zip(some, everyone(done), strict=False) if result is not None
    }
    for name, result in found.items():
        kept[name] = result
    return found

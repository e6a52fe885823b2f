"""Distribute independent pieces of work over ranks, one piece per rank and round.

Each rank computes its piece alone, with all data; then all ranks exchange the results of the round. A round
takes as long as its slowest piece. If a run is stopped, the finished rounds are saved.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING

from curvescope.core.progress import Progress
from curvescope.core.ranks import gather_objects, piece_division, rank_and_size, shared_errors, single_process
from curvescope.core.result import Result

if TYPE_CHECKING:
    from curvescope.runs.resumable_loop import Piece

ENOUGH_PER_RANK = 8  # pieces per rank from which `auto` uses rounds


def rounds(todo: Sequence[Piece], finished: MutableMapping[str, Result]) -> list[list[Piece]]:
    """Return rounds of independent pieces, one per rank; empty if rounds are not used."""
    _, ranks = rank_and_size()
    setting = piece_division()
    missing = [piece for piece in todo if piece.name not in finished]
    if ranks == 1 or setting == "never" or (setting == "auto" and len(missing) < ENOUGH_PER_RANK * ranks):
        return []
    all_rounds: list[list[Piece]] = []
    done = set(finished)
    while missing:
        ready = [piece for piece in missing if done.issuperset(piece.needs)][:ranks]
        assert ready, "a piece needs earlier ones"
        all_rounds.append(ready)
        done.update(piece.name for piece in ready)
        missing = [piece for piece in missing if piece not in ready]
    return all_rounds


def do_round(
    some: Sequence[Piece],
    kept: MutableMapping[str, Result],
    progress: Progress | None,
    number: int,
    total: int,
) -> dict[str, Result]:
    """Compute one piece on each rank and store all of them; return the results by name.

    Args:
        some: Pieces, at most one per rank.
        kept: Finished pieces.
        progress: As in `work_through`.
        number: Number of the first piece of the round.
        total: Number of all pieces.
    """
    rank, _ = rank_and_size()
    if progress is not None:
        progress(", ".join(piece.words or piece.name for piece in some), number, total)
    done = None
    with shared_errors():
        if rank < len(some):
            piece = some[rank]
            with single_process():
                done = piece.work(*(kept[name] for name in piece.needs))
    results = {
        piece.name: result
        for piece, result in zip(some, gather_objects(done), strict=False)
        if result is not None
    }
    for name, result in results.items():
        kept[name] = result
    return results

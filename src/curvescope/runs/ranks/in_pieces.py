"""Products whose vectors are spread over ranks, on disk: each rank writes down the pieces that it has.

`NAME.1-of-4.products` beside the finished pieces is what rank 1 of 4 knows. A product counts as known where
all ranks know their pieces of it, for the same columns bit for bit; with another number of ranks the files
have other names, and all is computed again.
"""

from __future__ import annotations

from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import final

from torch import Tensor

from curvescope.algorithms.recording import Recorder
from curvescope.core.operator import LinearOperator
from curvescope.core.ranks import everyone, from_first, place
from curvescope.runs.disk.journal import Journal
from curvescope.runs.pieces import PRODUCTS, Pieces


@final
class InPieces(Recorder):
    """The products of one piece of work; all ranks in step ask for the same ones.

    Args:
        name: Of the piece of work.
        own: The folder of rank 0, None on the others.
    """

    def __init__(self, name: str, own: Pieces | None):
        self._name, self._own = name, own
        self._journal: Journal | None = None

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """This rank's piece of A V: what all ranks know theirs of, or what they compute."""
        if self._journal is None:
            self._journal = self._opened()
        return self._journal.product(op, V)

    def _opened(self) -> Journal:
        folder, (rank, ranks) = from_first(self._folder), place()
        path = folder / f"{self._name}.{rank}-of-{ranks}{PRODUCTS}"
        tell = self._own.tell if self._own is not None else lambda line: None
        agree = lambda known: all(everyone(known))  # noqa: E731
        return Journal(path, lambda: path, tell, agree=agree, writers=ranks, run=from_first(self._run))

    def _folder(self) -> Path:
        """Where rank 0 keeps the run; it is made now."""
        assert self._own is not None, "rank 0 has it"
        self._own.begin()
        return self._own.folder

    def _run(self) -> str:
        """Of which run the products are."""
        assert self._own is not None, "rank 0 has it"
        return self._own.run + self._own.contents

    def close(self) -> None:
        """Bring the file to the disk, and leave it."""
        if self._journal is not None:
            self._journal.close()

    def remove(self) -> None:
        """The piece is done: forget what this rank has, and what others left that were not as many."""
        if self._journal is not None:
            self._journal.remove()
        if self._own is not None:
            for path in self._own.folder.glob(f"{escape(self._name)}.*-of-*{PRODUCTS}"):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

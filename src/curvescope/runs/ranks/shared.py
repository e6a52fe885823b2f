"""One run folder for several ranks: rank 0 reads and writes, and tells the others what is there.

All ranks have the same pieces: those that rank 0 found, and what rank 0 made of each of the others, so that a
later piece begins with the same bits everywhere. Products of the piece in hand are kept by rank 0 too: it
says whether it knows one, and then every rank takes it from there, or all of them compute it. Of products
whose vectors are spread over the ranks each keeps its piece (`in_pieces`).

Products whose vectors are spread over ranks, on disk: each rank writes down the pieces that it has.

`NAME.1-of-4.products` beside the finished pieces is what rank 1 of 4 knows. A product counts as known where
all ranks know their pieces of it, for the same columns bit for bit; with another number of ranks the files
have other names, and all is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from glob import escape
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from curvescope.algorithms.recording import Recorder, recording
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import LinearOperator
from curvescope.core.ranks import everyone, from_first, place, together
from curvescope.core.result import Result
from curvescope.runs.disk.journal import Journal
from curvescope.runs.folder import AlreadyFinished
from curvescope.runs.pieces import PRODUCTS, Pieces
from curvescope.runs.verified.checks import Verification
from curvescope.runs.work import Place


@final
class OnRanks(Place):
    """The place of rank 0, for all ranks in step; what goes wrong there is raised on all of them.

    Args:
        own: The place; it is used on rank 0 alone.
    """

    def __init__(self, own: Place):
        self._own = own if place()[0] == 0 else None

    def at(self, contents: str, names: Sequence[str] = ()) -> SharedPieces:
        """The pieces of these contents, as rank 0 finds them."""
        if len(set(everyone(str(contents)))) > 1:
            raise CurvescopeError(
                "the ranks do not have the same model and data", hint="give all of them the same files"
            )
        kept, there, finished = None, {}, None
        with together():
            if self._own is not None:
                try:
                    kept = self._own.at(contents, names)
                    there = {name: kept[name] for name in kept}
                except AlreadyFinished as found:
                    finished = found.path
        there, finished, on_disk = everyone((there, finished, isinstance(kept, Pieces)))[0]
        if finished is not None:
            raise AlreadyFinished(finished)
        return SharedPieces(kept, there, on_disk=on_disk)

    def tell(self, line: str) -> None:
        """Rank 0 passes it on."""
        if self._own is not None:
            self._own.tell(line)

    def warn(self, line: str) -> None:
        """Rank 0 passes on what it heard itself."""
        if self._own is not None:
            self._own.warn(line)

    def verified(self, found: Verification) -> None:
        """Rank 0 keeps it."""
        if self._own is not None:
            self._own.verified(found)


@final
class SharedPieces(MutableMapping[str, Result]):
    """Finished pieces, on every rank.

    Args:
        own: Of rank 0, None on the others.
        there: What it has.
        on_disk: Whether rank 0 keeps products of the piece in hand.
    """

    def __init__(self, own: MutableMapping[str, Result] | None, there: dict[str, Result], *, on_disk: bool):
        self._own, self._there, self._on_disk = own, there, on_disk

    def __setitem__(self, name: str, piece: Result) -> None:
        """Rank 0's, on all of them; its file is written first."""
        with together():
            if self._own is not None:
                self._own[name] = piece
        self._there[name] = everyone(piece if place()[0] == 0 else None)[0]  # pyright: ignore[reportArgumentType]

    def __getitem__(self, name: str) -> Result:
        return self._there[name]

    def __delitem__(self, name: str) -> None:
        with together():
            if self._own is not None:
                del self._own[name]
        del self._there[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Keep the products of the piece that is worked on inside, until it is there itself."""
        if not self._on_disk:
            yield
            return
        own = self._own if isinstance(self._own, Pieces) else None
        apart = InPieces(name, own)
        with nullcontext() if own is None else own.inside(name):
            try:
                with recording(Shared(None if own is None else own.journal, apart)):
                    yield
            finally:
                apart.close()
        apart.remove()


@final
class Shared(Recorder):
    """Products that rank 0 has written down, for all ranks.

    Args:
        own: Of rank 0, None on the others.
        apart: Of this rank, for products in pieces.
    """

    def __init__(self, own: Recorder | None, apart: Recorder):
        self._own, self._apart = own, apart

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """A V: what rank 0 knows, or what all of them compute."""
        if op.pieces is not None:
            return self._apart.product(op, V)
        if self._own is not None:
            asked = _Asked(op)
            found = self._own.product(asked, V)
            return found if asked.computed else _from_first(found)
        if everyone("")[0] == COMPUTE:
            return op._matmat(V)
        return _from_first(torch.empty(op.shape[0], V.shape[1], dtype=op.dtype, device=op.device))


COMPUTE, KNOWN = "compute", "known"


def _from_first(product: Tensor) -> Tensor:
    """Rank 0's, on all ranks."""
    from curvescope.distributed.sums import first_of_ranks

    if place()[0] == 0:
        everyone(KNOWN)
    return first_of_ranks(product)


@final
class _Asked(LinearOperator):
    """An operator whose product rank 0 does not know: the others are told to compute it too."""

    def __init__(self, op: LinearOperator):
        self.op, self.computed = op, False
        self.shape, self.dtype, self.device = op.shape, op.dtype, op.device
        self.symmetric, self.psd = op.symmetric, op.psd

    def _matmat(self, V: Tensor) -> Tensor:
        everyone(COMPUTE)
        self.computed = True
        return self.op._matmat(V)


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

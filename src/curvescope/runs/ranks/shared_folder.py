"""One run folder for several ranks: rank 0 reads and writes, and broadcasts the contents.

All ranks have the same pieces, read or computed by rank 0, so that a later piece starts with the same bits
everywhere. Rank 0 also saves the products of the current piece. If it has a product, it broadcasts it; else
all ranks compute it. If vectors are sharded, each rank saves its own piece of a product (`ShardedProducts`).

Sharded products on disk: each rank writes its own pieces.

The file `NAME.1-of-4.products` beside the finished pieces has the products of rank 1 of 4. A product is read
only if every rank has its piece of it, for columns equal bit for bit. With another number of ranks the files
have other names, and everything is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from glob import escape
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from curvescope.algorithms.recorded_products import ProductRecorder, recording
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import LinearOperator
from curvescope.core.ranks import gather_objects, on_first_rank, rank_and_size, shared_errors
from curvescope.core.result import Result
from curvescope.runs.disk.journal import Journal
from curvescope.runs.folder import AlreadyFinished
from curvescope.runs.pieces import PRODUCTS, Pieces
from curvescope.runs.resumable_loop import PieceStore
from curvescope.runs.verification.checks import Verification


@final
class SharedPieceStore(PieceStore):
    """Piece store of rank 0, for all ranks in step; errors on rank 0 are raised on all ranks.

    Args:
        own: The piece store; used on rank 0 only.
    """

    def __init__(self, own: PieceStore):
        self._own = own if rank_and_size()[0] == 0 else None

    def at(self, contents: str, names: Sequence[str] = ()) -> SharedPieces:
        """Return the pieces of these contents, as read by rank 0."""
        if len(set(gather_objects(str(contents)))) > 1:
            raise CurvescopeError(
                "the ranks do not have the same model and data", hint="give all of them the same files"
            )
        own_pieces, pieces, finished = None, {}, None
        with shared_errors():
            if self._own is not None:
                try:
                    own_pieces = self._own.at(contents, names)
                    pieces = {name: own_pieces[name] for name in own_pieces}
                except AlreadyFinished as found:
                    finished = found.path
        pieces, finished, on_disk = gather_objects((pieces, finished, isinstance(own_pieces, Pieces)))[0]
        if finished is not None:
            raise AlreadyFinished(finished)
        return SharedPieces(own_pieces, pieces, on_disk=on_disk)

    def tell(self, line: str) -> None:
        """Show a line on rank 0 only."""
        if self._own is not None:
            self._own.tell(line)

    def warn(self, line: str) -> None:
        """Report a warning of rank 0."""
        if self._own is not None:
            self._own.warn(line)

    def verified(self, found: Verification) -> None:
        """Save the results of a check on rank 0."""
        if self._own is not None:
            self._own.verified(found)


@final
class SharedPieces(MutableMapping[str, Result]):
    """Finished pieces, the same on every rank.

    Args:
        own: Pieces of rank 0; None on other ranks.
        there: Finished pieces of rank 0.
        on_disk: True if rank 0 saves the products of the current piece.
    """

    def __init__(self, own: MutableMapping[str, Result] | None, there: dict[str, Result], *, on_disk: bool):
        self._own, self._there, self._on_disk = own, there, on_disk

    def __setitem__(self, name: str, piece: Result) -> None:
        """Broadcast the piece of rank 0, after rank 0 has written it."""
        with shared_errors():
            if self._own is not None:
                self._own[name] = piece
        self._there[name] = gather_objects(piece if rank_and_size()[0] == 0 else None)[0]  # pyright: ignore[reportArgumentType]

    def __getitem__(self, name: str) -> Result:
        return self._there[name]

    def __delitem__(self, name: str) -> None:
        with shared_errors():
            if self._own is not None:
                del self._own[name]
        del self._there[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Save the products of the current piece until the piece is complete."""
        if not self._on_disk:
            yield
            return
        own = self._own if isinstance(self._own, Pieces) else None
        apart = ShardedProducts(name, own)
        with nullcontext() if own is None else own.inside(name):
            try:
                with recording(SharedProducts(None if own is None else own.journal, apart)):
                    yield
            finally:
                apart.close()
        apart.remove()


@final
class SharedProducts(ProductRecorder):
    """Products recorded by rank 0, for all ranks.

    Args:
        own: Recorder of rank 0; None on other ranks.
        apart: Recorder of this rank, for sharded products.
    """

    def __init__(self, own: ProductRecorder | None, apart: ProductRecorder):
        self._own, self._apart = own, apart

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """Return A V, broadcast by rank 0 if it is recorded, else computed by all ranks."""
        if op.shards is not None:
            return self._apart.product(op, V)
        if self._own is not None:
            signaling = _SignalingOperator(op)
            found = self._own.product(signaling, V)
            return found if signaling.computed else _broadcast(found)
        if gather_objects("")[0] == COMPUTE:
            return op._matmat(V)
        return _broadcast(torch.empty(op.shape[0], V.shape[1], dtype=op.dtype, device=op.device))


COMPUTE, KNOWN = "compute", "known"


def _broadcast(product: Tensor) -> Tensor:
    """Broadcast the product of rank 0."""
    from curvescope.distributed.sums import first_of_ranks

    if rank_and_size()[0] == 0:
        gather_objects(KNOWN)
    return first_of_ranks(product)


@final
class _SignalingOperator(LinearOperator):
    """Operator whose product rank 0 has not recorded: it signals the other ranks to compute it too."""

    def __init__(self, op: LinearOperator):
        self.op, self.computed = op, False
        self.shape, self.dtype, self.device = op.shape, op.dtype, op.device
        self.symmetric, self.psd = op.symmetric, op.psd

    def _matmat(self, V: Tensor) -> Tensor:
        gather_objects(COMPUTE)
        self.computed = True
        return self.op._matmat(V)


@final
class ShardedProducts(ProductRecorder):
    """Sharded products of one piece of work; all ranks request the same products in step.

    Args:
        name: Name of the piece of work.
        own: Folder of rank 0; None on other ranks.
    """

    def __init__(self, name: str, own: Pieces | None):
        self._name, self._own = name, own
        self._journal: Journal | None = None

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """Return this rank's piece of A V: read if all ranks have recorded theirs, else computed."""
        if self._journal is None:
            self._journal = self._opened()
        return self._journal.product(op, V)

    def _opened(self) -> Journal:
        folder, (rank, ranks) = on_first_rank(self._folder), rank_and_size()
        path = folder / f"{self._name}.{rank}-of-{ranks}{PRODUCTS}"
        tell = self._own.tell if self._own is not None else lambda line: None
        agree = lambda known: all(gather_objects(known))  # noqa: E731
        return Journal(path, lambda: path, tell, agree=agree, writers=ranks, run=on_first_rank(self._run))

    def _folder(self) -> Path:
        """Folder of rank 0's run; created by this call."""
        assert self._own is not None, "rank 0 has it"
        self._own.begin()
        return self._own.folder

    def _run(self) -> str:
        """Identity of the run that the products belong to."""
        assert self._own is not None, "rank 0 has it"
        return self._own.run + self._own.contents

    def close(self) -> None:
        """Sync and close the file."""
        if self._journal is not None:
            self._journal.close()

    def remove(self) -> None:
        """Delete this rank's file, and files left by runs with another number of ranks: the piece is done."""
        if self._journal is not None:
            self._journal.remove()
        if self._own is not None:
            for path in self._own.folder.glob(f"{escape(self._name)}.*-of-*{PRODUCTS}"):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

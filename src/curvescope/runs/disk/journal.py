"""The products of an unfinished piece of work on disk: it goes on in its middle, with the same bits.

One file to which every product is added as it is taken, as a record: a header (number, digests of the run and
of the columns, shape, checksum of what follows), its own checksum, and the numbers. A record that is torn,
because the process or the machine stopped while it was written, ends what is known, and so does one of
another run; one whose checksum is wrong is computed again.

A process that is killed loses the product in hand. The file is brought to the disk at the pace of
`runs.durable`: a loss of power costs at most ten times as much work as that takes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.recording import Recorder
from curvescope.core.numbers import data_size
from curvescope.core.operator import LinearOperator
from curvescope.engines.tensor_digest import digest
from curvescope.runs.disk.durable import Pace, sync

MOST_OF_DISK = 0.25  # of what is free when it begins
MOST_OF_TIME = 0.1  # of that of the products, once writing has taken PATIENCE
PATIENCE = 1.0  # seconds
MUCH = 100 * 2**20  # bytes of which a person is told
MAGIC, HEADER = b"CSP2", struct.Struct("<4sI8s8s8sQQI")
CHECK = struct.Struct("<I")
ALIGNMENT = 64  # bytes, of the memory that torch allocates on a CPU


class Record(NamedTuple):
    """Where a product is in the file, and what it is of."""

    start: int  # of its header
    key: bytes  # digest of the columns
    dtype: str
    shape: tuple[int, int]
    checksum: int

    @property
    def body(self) -> int:
        """Where its numbers begin."""
        return self.start + HEADER.size + CHECK.size

    @property
    def size(self) -> int:
        """Bytes of its numbers."""
        return self.shape[0] * self.shape[1] * np.dtype(self.dtype).itemsize


@final
class Journal(Recorder):
    """The products of one piece, by their number, in the file `path`.

    A product is answered from the file only if the columns are the same, bit for bit, and the numbers have
    their checksum; at the first whose columns are others, what was written from there on is thrown away.
    Products are left out where writing would take more than a tenth of the time, or too much of the disk:
    they are computed again.

    Args:
        begin: makes the folder, and returns the file; called before the first product is written.
        tell: called with a line for a person where the file takes much of the disk, or the disk is full.
        agree: called with whether a product is known, at each; where it answers no, it is computed.
        writers: journals that share the disk.
        run: a digest of what the products are of, beyond their columns.

    Attributes:
        foreign: Whether the file has products of another run, which are forgotten.
    """

    def __init__(
        self,
        path: Path,
        begin: Callable[[], Path],
        tell: Callable[[str], None] = lambda line: None,
        *,
        agree: Callable[[bool], bool] = bool,
        writers: int = 1,
        run: str = "",
    ):
        self.path, self._begin, self._tell, self._agree, self._writers = path, begin, tell, agree, writers
        self._run = hashlib.blake2b(run.encode(), digest_size=8).digest()
        self._known, self._end, self.foreign = _read(path, self._run)
        self._file: IO[bytes] | None = None
        self.asked, self._told, self._pace = 0, False, Pace()
        self._writing, self._spent, self._last, self._computed, self._room = True, 0.0, 0.0, 0.0, -1.0

    @property
    def kept(self) -> int:
        """How many products there are to begin with."""
        return len(self._known)

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """A V, read where it was written down, else computed and written."""
        key, number = _key(V), self.asked
        self.asked += 1
        known = self._answer(number, key)
        if self._agree(known is not None) and known is not None:
            return known.to(device=op.device, dtype=op.dtype)
        start = time.monotonic()
        found = laid_out(op @ V)
        self._computed += time.monotonic() - start
        if known is not None:  # written already, but not by all who have to
            return found
        if self._writing and self._spent + self._last <= max(PATIENCE, MOST_OF_TIME * self._computed):
            start = time.monotonic()
            self._write(number, key, found)
            self._last = time.monotonic() - start
            self._spent += self._last
        return found

    def _answer(self, number: int, key: bytes) -> Tensor | None:
        """A product as it was written, if it is of these columns; else all from there on is forgotten."""
        if number not in self._known:
            return None
        if self._known[number].key == key:
            return self._recalled(number)
        self._forget(number)
        return None

    def close(self) -> None:
        """Bring the file to the disk, and leave it."""
        if self._file is not None:
            with suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Forget everything: the piece is done."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self.path.unlink(missing_ok=True)

    def _recalled(self, number: int) -> Tensor | None:
        """A product from the file; None, and forgotten, where its numbers are damaged."""
        record = self._known[number]
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(record.body)
            data = bytearray(file.read(record.size))
            if len(data) == record.size and zlib.crc32(data) == record.checksum:
                found = np.frombuffer(data, dtype=record.dtype) if data else np.empty(0, record.dtype)
                return laid_out(torch.from_numpy(found.reshape(record.shape)))
        del self._known[number]
        return None

    def _forget(self, first: int) -> None:
        """Throw away what was written from this product on."""
        self._end = min(record.start for number, record in self._known.items() if number >= first)
        self._known = {n: record for n, record in self._known.items() if record.start < self._end}
        os.truncate(self.path, self._end)

    def _write(self, number: int, key: bytes, product: Tensor) -> None:
        array = np.ascontiguousarray(product.detach().cpu().numpy())
        try:
            file = self._opened()
            self._room -= array.nbytes
            if self._room < 0:
                self._writing = False
                return
            checksum = zlib.crc32(array.data)
            about = self._run, key, array.dtype.name.encode()
            header = HEADER.pack(MAGIC, number, *about, *array.shape, checksum)
            _put(file, header + CHECK.pack(zlib.crc32(header)))
            _put(file, array.tobytes() if not array.size else array.data)
            record = Record(self._end, key, array.dtype.name, array.shape, checksum)
            self._known[number], self._end = record, record.body + record.size
            if self._pace.due():
                with self._pace.visit():
                    os.fsync(file.fileno())
            self._weigh()
        except OSError as error:  # a full disk: what is there stays
            self._writing = False
            self._tell(f"products are not kept any longer, {error.strerror or error}; those before are")
            with suppress(OSError):
                os.truncate(self.path, self._end)

    def _opened(self) -> IO[bytes]:
        """The file, open behind its last whole record, without a memory of its own."""
        if self._file is None:
            self.path = self._begin()
            self._room = MOST_OF_DISK / self._writers * shutil.disk_usage(self.path.parent).free
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(self._end)
            sync(self.path.parent)
        return self._file

    def _weigh(self) -> None:
        """Say once that there is much on the disk."""
        if self._end > MUCH and not self._told:
            self._told = True
            self._tell(
                f"products are kept in {self.path.parent} so that a stopped run can go on: more than "
                f"{data_size(MUCH)}, until each piece is done"
            )


def laid_out(product: Tensor) -> Tensor:
    """The same numbers, contiguous and at an address that torch would choose.

    Inner products round differently for other strides and other alignments. A product that is read and one
    that was just computed must not differ in either, so that a resumed run ends with the same bits.
    """
    if product.is_contiguous() and product.data_ptr() % ALIGNMENT == 0:
        return product
    return product.clone(memory_format=torch.contiguous_format)


def _put(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all of it: one call takes at most two gigabytes."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def _read(path: Path, run: bytes) -> tuple[dict[int, Record], int, bool]:
    """The whole records of a run by number, the last of each, where they end, and whether others follow."""
    found, end = {}, 0
    with suppress(OSError), path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        for number, of, record in _records(file):
            if of != run:
                return found, end, True
            if record.body + record.size > length:
                break
            found[number], end = record, record.body + record.size
    return found, end, False


def _records(file: IO[bytes]) -> Iterator[tuple[int, bytes, Record]]:
    """Headers one after the other, with their run, up to the first that is none."""
    start = 0
    while True:
        file.seek(start)
        header, check = file.read(HEADER.size), file.read(CHECK.size)
        if len(check) < CHECK.size or CHECK.unpack(check)[0] != zlib.crc32(header):
            return
        magic, number, run, key, dtype, rows, columns, checksum = HEADER.unpack(header)
        if magic != MAGIC:
            return
        record = Record(start, key, dtype.rstrip(b"\0").decode(), (rows, columns), checksum)
        yield number, run, record
        start = record.body + record.size


def _key(V: Tensor) -> bytes:
    """Eight bytes of the columns."""
    words = hashlib.blake2b(repr((tuple(V.shape), V.dtype)).encode(), digest_size=8)
    for part in digest([V]):
        words.update(part.cpu().numpy().tobytes())
    return words.digest()

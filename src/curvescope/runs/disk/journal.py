"""Journal of the products of an unfinished piece of work, so that it resumes with the same bits.

Every product is appended to one file as a record: a header (number, digests of the run and of the columns,
shape, checksum of the numbers), the header's own checksum, and the numbers. Reading stops at an incomplete
record, left by a process or machine that stopped while writing, and at a record of another run. A product
with a wrong checksum is computed again.

A process that is killed loses only the current product. The file is synced at the pace of
`runs.disk.atomic_files`: a loss of power costs at most ten times as much work as a sync takes.
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

from curvescope.algorithms.recorded_products import ProductRecorder
from curvescope.core.number_format import data_size
from curvescope.core.operator import LinearOperator
from curvescope.engines.tensor_digest import digest
from curvescope.runs.disk.atomic_files import SyncPace, sync

MOST_OF_DISK = 0.25  # share of the free disk space at the start
MOST_OF_TIME = 0.1  # share of the time of the products, once writing has taken PATIENCE
PATIENCE = 1.0  # seconds
LARGE_FILE = 100 * 2**20  # bytes above which the user is notified
MAGIC, HEADER = b"CSP2", struct.Struct("<4sI8s8s8sQQI")
CHECK = struct.Struct("<I")
ALIGNMENT = 64  # bytes, of the memory that torch allocates on a CPU


class Record(NamedTuple):
    """Position of a product in the file, and the key of the product."""

    start: int  # start of the header
    key: bytes  # digest of the columns
    dtype: str
    shape: tuple[int, int]
    checksum: int

    @property
    def body(self) -> int:
        """Position of the numbers."""
        return self.start + HEADER.size + CHECK.size

    @property
    def size(self) -> int:
        """Size of the numbers in bytes."""
        return self.shape[0] * self.shape[1] * np.dtype(self.dtype).itemsize


@final
class Journal(ProductRecorder):
    """Products of one piece of work, by number, in the file `path`.

    A product is read from the file only if its columns are equal bit for bit and the checksum is right. At
    the first product with other columns, the journal discards that record and all later ones. A product is
    not written if writing would take more than a tenth of the time or too much disk space; it is then
    computed again.

    Args:
        begin: Creates the folder and returns the file; called before the first product is written.
        tell: Called with a message if the file takes much disk space or the disk is full.
        agree: Called for each product with True if the file has it; if it returns False, the product is
            computed.
        writers: Number of journals that share the disk.
        run: Digest of everything but the columns that the products depend on.

    Attributes:
        foreign: True if the file has products of another run; they are discarded.
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
        self._known, self._end, self.foreign = _read_records(path, self._run)
        self._file: IO[bytes] | None = None
        self.asked, self._told, self._pace = 0, False, SyncPace()
        self._writing, self._spent, self._last, self._computed, self._room = True, 0.0, 0.0, 0.0, -1.0

    @property
    def kept(self) -> int:
        """Number of products in the file when it was opened."""
        return len(self._known)

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """Return A V: read from the file if it has the product, else computed and written."""
        key, number = _columns_digest(V), self.asked
        self.asked += 1
        known = self._answer(number, key)
        if self._agree(known is not None) and known is not None:
            return known.to(device=op.device, dtype=op.dtype)
        start = time.monotonic()
        found = with_standard_layout(op @ V)
        self._computed += time.monotonic() - start
        if known is not None:  # this rank has the product, but another rank does not
            return found
        if self._writing and self._spent + self._last <= max(PATIENCE, MOST_OF_TIME * self._computed):
            start = time.monotonic()
            self._write(number, key, found)
            self._last = time.monotonic() - start
            self._spent += self._last
        return found

    def _answer(self, number: int, key: bytes) -> Tensor | None:
        """Return a recorded product if its columns match; else discard it and all later ones."""
        if number not in self._known:
            return None
        if self._known[number].key == key:
            return self._recalled(number)
        self._forget(number)
        return None

    def close(self) -> None:
        """Sync and close the file."""
        if self._file is not None:
            with suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file: the piece is done."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self.path.unlink(missing_ok=True)

    def _recalled(self, number: int) -> Tensor | None:
        """Read a product from the file; if its numbers are damaged, discard it and return None."""
        record = self._known[number]
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(record.body)
            data = bytearray(file.read(record.size))
            if len(data) == record.size and zlib.crc32(data) == record.checksum:
                numbers = np.frombuffer(data, dtype=record.dtype) if data else np.empty(0, record.dtype)
                return with_standard_layout(torch.from_numpy(numbers.reshape(record.shape)))
        del self._known[number]
        return None

    def _forget(self, first: int) -> None:
        """Discard this product and all later ones."""
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
            _write_all(file, header + CHECK.pack(zlib.crc32(header)))
            _write_all(file, array.tobytes() if not array.size else array.data)
            record = Record(self._end, key, array.dtype.name, array.shape, checksum)
            self._known[number], self._end = record, record.body + record.size
            if self._pace.due():
                with self._pace.visit():
                    os.fsync(file.fileno())
            self._weigh()
        except OSError as error:  # If the disk is full, the products written so far stay.
            self._writing = False
            self._tell(f"products are no longer saved ({error.strerror or error}); earlier ones stay saved")
            with suppress(OSError):
                os.truncate(self.path, self._end)

    def _opened(self) -> IO[bytes]:
        """Return the file, unbuffered and positioned after its last complete record."""
        if self._file is None:
            self.path = self._begin()
            self._room = MOST_OF_DISK / self._writers * shutil.disk_usage(self.path.parent).free
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(self._end)
            sync(self.path.parent)
        return self._file

    def _weigh(self) -> None:
        """Notify the user once that the file is large."""
        if self._end > LARGE_FILE and not self._told:
            self._told = True
            self._tell(
                f"products are saved in {self.path.parent} so that a stopped run can resume: more than "
                f"{data_size(LARGE_FILE)}, until each piece is done"
            )


def with_standard_layout(product: Tensor) -> Tensor:
    """Return the same numbers, contiguous and at an address that torch would choose.

    Inner products round differently for other strides and alignments. A product read from the file and a
    computed one must agree in both, so that a resumed run ends with the same bits.
    """
    if product.is_contiguous() and product.data_ptr() % ALIGNMENT == 0:
        return product
    return product.clone(memory_format=torch.contiguous_format)


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all bytes in several calls, because one call writes at most two gigabytes."""
    remaining = memoryview(data).cast("B")
    while remaining:
        remaining = remaining[file.write(remaining) :]


def _read_records(path: Path, run: bytes) -> tuple[dict[int, Record], int, bool]:
    """Complete records of a run by number (the last of each), their end, and if another run follows."""
    records, end = {}, 0
    with suppress(OSError), path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        for number, of, record in _records(file):
            if of != run:
                return records, end, True
            if record.body + record.size > length:
                break
            records[number], end = record, record.body + record.size
    return records, end, False


def _records(file: IO[bytes]) -> Iterator[tuple[int, bytes, Record]]:
    """Yield headers in order, with their run, up to the first invalid one."""
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


def _columns_digest(V: Tensor) -> bytes:
    """Digest of the columns, eight bytes."""
    words = hashlib.blake2b(repr((tuple(V.shape), V.dtype)).encode(), digest_size=8)
    for part in digest([V]):
        words.update(part.cpu().numpy().tobytes())
    return words.digest()

"""Storage of Krylov bases that exceed device memory: vectors that do not fit are in host memory.

The first of the vectors q₀, …, q_j stay on the device, and so do the last two and the new one. The others are
read from host memory whenever a vector is orthogonalized. For a GPU they are pinned and pass through two
buffers; one is filled while the other is in use.

Long float32 vectors are stored on the host in bfloat16, with half the memory. The relative error of an entry
is then up to 2⁻⁹. As the errors of n entries are independent, that of an inner product with a unit vector is
about 2⁻⁹ / √n: 5e-7 for n = 2²⁴, while a basis has overlaps of 1e-5 anyway (`vectors.SEMI`). The components
along these vectors are small; the last two vectors, whose components are large, are in full precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from curvescope.algorithms.checks import GIB
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.tensors import free_bytes, free_host_bytes

Where = Literal["auto", "device", "host"]

MIN_ON_DEVICE = 3  # vectors on the device: the last two and the new one
MIN_BFLOAT16 = 2**24  # entries from which on bfloat16 is used
PINNED_CHUNK = 2**26  # entries of pinned memory at a time: PyTorch rounds what it pins to powers of two
MAX_BUFFER_ROW = 2**22  # entries of a buffer, of each vector, at most
BUFFER_BYTES = 2**28  # bytes of one of the two buffers, about
DEFAULT_GIB = 8.0  # default memory for the bases of several probes
FREE_MEMORY_SHARE = 0.5  # share of free GPU memory for the basis of a single probe that needs more


def host_dtype(dtype: torch.dtype, n: int) -> torch.dtype:
    """Return the dtype of vectors of n entries in host memory."""
    return torch.bfloat16 if dtype == torch.float32 and n >= MIN_BFLOAT16 else dtype


@final
class HostRows:
    """Vectors (n,) in host memory, one after the other, for work on a device."""

    def __init__(self, n: int, *, most: int, dtype: torch.dtype, device: torch.device):
        self.n, self.most, self.device = n, most, device
        self.dtype, self.stored = dtype, host_dtype(dtype, n)
        self.rows: list[list[Tensor]] = []
        self._piece = PINNED_CHUNK if device.type == "cuda" else max(n, 1)
        self._buffers: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(piece.nbytes for row in self.rows for piece in row)

    def append(self, row: Tensor) -> None:
        """Store a copy of a vector from the device."""
        pinned, pieces = self.device.type == "cuda", []
        for start in range(0, self.n, self._piece):
            part = row[start : start + self._piece].to(self.stored)
            size = self._piece if pinned else len(part)
            piece = torch.empty(size, dtype=self.stored, pin_memory=pinned)[: len(part)]
            pieces.append(piece.copy_(part, non_blocking=True))  # readers wait for the stream
        self.rows.append(pieces)

    def copy(self, number: int, p: slice, out: Tensor) -> None:
        """Copy some entries of a vector to the device."""
        position = p.start
        while position < p.stop:
            piece_number, first = divmod(position, self._piece)
            stop = min(p.stop, (piece_number + 1) * self._piece)
            piece = self.rows[number][piece_number][first : first + stop - position]
            out[position - p.start : stop - p.start].copy_(piece, non_blocking=True)
            position = stop

    def streamed(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield some entries of all vectors at a time, (m, c) on the device, while the next ones are being
        copied.
        """
        main, length = torch.cuda.current_stream(self.device), self._chunk()
        if not self._buffers:
            like = {"dtype": self.stored, "device": self.device}
            self._buffers = [torch.empty(self.most, length, **like) for _ in range(2)]
            self._side = torch.cuda.Stream(self.device)
        ready, done = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self._side.wait_stream(main)  # the main stream writes vectors and reads buffers
        for number, start in enumerate(range(0, self.n, length)):
            p, side = slice(start, min(start + length, self.n)), number % 2
            buffer = self._buffers[side][: len(self), : p.stop - start]
            with torch.cuda.stream(self._side):
                if number > 1:
                    self._side.wait_event(done[side])
                for i in range(len(self)):
                    self.copy(i, p, buffer[i])
                ready[side].record(self._side)
            main.wait_event(ready[side])
            yield p, buffer
            done[side].record(main)

    def _chunk(self) -> int:
        """Return the entries of a buffer: a power of two, so that no buffer spans two pieces."""
        return chunk(self.most, self.stored)


def chunk(rows: int, stored: torch.dtype) -> int:
    """Return how many entries of each of `rows` vectors fit into a buffer."""
    fitting = BUFFER_BYTES // (max(rows, 1) * stored.itemsize)
    return min(MAX_BUFFER_ROW, 2 ** max(fitting.bit_length() - 1, 10))


class SplitBasis(NamedTuple):
    """Basis q₀, …, q_j, partly on the device and partly in host memory. If both are in full precision, `part`
    returns the same numbers as a basis on the device.
    """

    near: Tensor  # (d + 2, n) q₀, …, q_{d−1}, q_{j−1}, q_j on the device
    far: HostRows  # q_d, …, q_{j−2}

    @property
    def num_rows(self) -> int:
        """Number of vectors, j + 1."""
        return len(self.near) + len(self.far)

    def part(self, p: slice) -> Tensor:
        """Return some entries of all vectors in order, (j + 1, c) on the device."""
        first = len(self.near) - (MIN_ON_DEVICE - 1)
        out = self.near.new_empty(self.num_rows, p.stop - p.start)
        out[:first] = self.near[:first, p]
        out[first + len(self.far) :] = self.near[first:, p]
        for i in range(len(self.far)):
            self.far.copy(i, p, out[first + i])
        return out

    def near_first(self, values: Tensor) -> Tensor:
        """Reorder numbers (j + 1,): near vectors first, then far ones."""
        first = len(self.near) - (MIN_ON_DEVICE - 1)
        stop = first + len(self.far)
        return torch.cat([values[:first], values[stop:], values[first:stop]])

    def in_order(self, values: Tensor) -> Tensor:
        """Undo `near_first`."""
        first = len(self.near) - (MIN_ON_DEVICE - 1)
        return torch.cat([values[:first], values[len(self.near) :], values[first : len(self.near)]])


class BasisPlacement(NamedTuple):
    """Placement of the basis of a probe in memory."""

    near: int | None  # vectors on the device; None if all are
    num_bytes: int  # device memory


def place_basis(
    op: LinearOperator,
    n: int,
    vectors: int,
    *,
    where: Where,
    max_gib: float | None,
    columns: int = 1,
    what: str = "one probe",
) -> BasisPlacement:
    """Choose where to store a basis of vectors of n entries; several columns are stored alike.

    Args:
        max_gib: Device memory; by default 8, or on a GPU half of the free memory if that is more.
    """
    vector_bytes, dtype = n * op.dtype.itemsize * columns, host_dtype(op.dtype, n)
    basis, budget = vector_bytes * vectors, device_room(op, max_gib, vector_bytes * vectors)
    splits = where == "host" or (where == "auto" and op.device.type == "cuda")
    if vectors <= MIN_ON_DEVICE or (where != "host" and basis <= budget) or not splits:
        if basis > budget:
            raise UsageError(
                f"the Lanczos basis of {what} takes {basis / GIB:.1f} GiB, "
                f"more than max_gib = {budget / GIB:g}",
                hint="raise max_gib, take fewer steps, or pass reorthogonalize=False",
            )
        return BasisPlacement(None, basis)
    buffers = 2 * columns * min(n, chunk(vectors, dtype)) * vectors * dtype.itemsize
    near = MIN_ON_DEVICE if where == "host" else max(0, min(int((budget - buffers) // vector_bytes), vectors))
    far, free = (vectors - near) * n * columns * dtype.itemsize, free_host_bytes()
    if near < MIN_ON_DEVICE or far > free:
        raise UsageError(
            f"the Lanczos basis of {what} takes {basis / GIB:.1f} GiB: {budget / GIB:.1f} GiB of device "
            f"memory are available, and the rest needs {far / GIB:.1f} GiB of host memory, "
            f"of which {free / GIB:.1f} are free",
            hint="raise max_gib, take fewer steps, or pass reorthogonalize=False",
        )
    return BasisPlacement(near, near * vector_bytes + buffers)


def device_room(op: LinearOperator, max_gib: float | None, needed: int) -> float:
    """Return the device memory available for a basis of `needed` bytes; the same on all ranks."""
    if max_gib is not None or op.device.type != "cuda" or needed <= DEFAULT_GIB * GIB:
        return (DEFAULT_GIB if max_gib is None else max_gib) * GIB
    free = FREE_MEMORY_SHARE * free_bytes(op.device)
    free = free if op.shards is None else op.shards[0].spread.min(free, op.device)
    return max(DEFAULT_GIB * GIB, free)

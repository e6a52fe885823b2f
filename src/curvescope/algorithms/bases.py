"""Krylov bases that a device does not hold: the vectors that do not fit lie in host memory.

Of the vectors q₀, …, q_j the first stay on the device, and the last two with the one that is being made;
those between are read from host memory whenever a vector is orthogonalized. For a card they are pinned and
come through two buffers, one being filled while the other is worked on.

Long float32 vectors lie there in bfloat16, half the memory. An entry is then wrong by up to 2⁻⁹ of itself,
and as the errors of n entries are independent, an inner product with a unit vector is wrong by about
2⁻⁹ / √n: 5e-7 for n = 2²⁴, where a basis keeps overlaps of 1e-5 anyway (`vectors.SEMI`). What is taken out
along these vectors is small; the last two, of which much is taken out, are there in full.
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

ALWAYS = 3  # vectors on the device: the last two, and the one that is being made
LONG = 2**24  # entries from which bfloat16 serves
PIECE = 2**26  # entries of pinned memory at a time: PyTorch rounds what it pins to powers of two
CHUNK = 2**22  # entries of a buffer, of each vector, at most
BUFFER = 2**28  # bytes of one of the two buffers, about
TOGETHER_GIB = 8.0  # memory for the bases of several probes, unless something else is asked for
SHARE = 0.5  # of the free memory of a card, for the basis of a single probe that takes more


def host_dtype(dtype: torch.dtype, n: int) -> torch.dtype:
    """How vectors of n entries are kept in host memory."""
    return torch.bfloat16 if dtype == torch.float32 and n >= LONG else dtype


@final
class HostRows:
    """Vectors (n,) in host memory, one after the other, for work on a device."""

    def __init__(self, n: int, *, most: int, dtype: torch.dtype, device: torch.device):
        self.n, self.most, self.device = n, most, device
        self.dtype, self.stored = dtype, host_dtype(dtype, n)
        self.rows: list[list[Tensor]] = []
        self._piece = PIECE if device.type == "cuda" else max(n, 1)
        self._buffers: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        """Host memory taken so far."""
        return sum(piece.nbytes for row in self.rows for piece in row)

    def append(self, row: Tensor) -> None:
        """Keep a copy of a vector of the device."""
        pinned, found = self.device.type == "cuda", []
        for start in range(0, self.n, self._piece):
            part = row[start : start + self._piece].to(self.stored)
            size = self._piece if pinned else len(part)
            piece = torch.empty(size, dtype=self.stored, pin_memory=pinned)[: len(part)]
            found.append(piece.copy_(part, non_blocking=True))  # readers wait for the stream
        self.rows.append(found)

    def copy(self, number: int, p: slice, out: Tensor) -> None:
        """Write some entries of a vector to the device."""
        at = p.start
        while at < p.stop:
            which, first = divmod(at, self._piece)
            stop = min(p.stop, (which + 1) * self._piece)
            piece = self.rows[number][which][first : first + stop - at]
            out[at - p.start : stop - p.start].copy_(piece, non_blocking=True)
            at = stop

    def streamed(self) -> Iterator[tuple[slice, Tensor]]:
        """Some entries of all vectors at a time, (m, c) on a card, while the next ones are on their way."""
        main, length = torch.cuda.current_stream(self.device), self._chunk()
        if not self._buffers:
            like = {"dtype": self.stored, "device": self.device}
            self._buffers = [torch.empty(self.most, length, **like) for _ in range(2)]
            self._side = torch.cuda.Stream(self.device)
        ready, done = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        self._side.wait_stream(main)  # vectors are written there, and buffers were read there
        for number, start in enumerate(range(0, self.n, length)):
            p, turn = slice(start, min(start + length, self.n)), number % 2
            buffer = self._buffers[turn][: len(self), : p.stop - start]
            with torch.cuda.stream(self._side):
                if number > 1:
                    self._side.wait_event(done[turn])
                for i in range(len(self)):
                    self.copy(i, p, buffer[i])
                ready[turn].record(self._side)
            main.wait_event(ready[turn])
            yield p, buffer
            done[turn].record(main)

    def _chunk(self) -> int:
        """Entries of a buffer: a power of two, so that none lies in two pieces."""
        return chunk(self.most, self.stored)


def chunk(rows: int, stored: torch.dtype) -> int:
    """Entries at a time of so many rows that come through a buffer."""
    fitting = BUFFER // (max(rows, 1) * stored.itemsize)
    return min(CHUNK, 2 ** max(fitting.bit_length() - 1, 10))


class Split(NamedTuple):
    """A basis q₀, …, q_j in two places; where both are in full precision, `part` is what one place gives."""

    near: Tensor  # (d + 2, n) q₀, …, q_{d−1}, q_{j−1}, q_j on the device
    far: HostRows  # q_d, …, q_{j−2}

    @property
    def num_rows(self) -> int:
        """How many vectors there are, j + 1."""
        return len(self.near) + len(self.far)

    def part(self, p: slice) -> Tensor:
        """Some entries of all vectors in their order, (j + 1, c) on the device."""
        first = len(self.near) - (ALWAYS - 1)
        out = self.near.new_empty(self.num_rows, p.stop - p.start)
        out[:first] = self.near[:first, p]
        out[first + len(self.far) :] = self.near[first:, p]
        for i in range(len(self.far)):
            self.far.copy(i, p, out[first + i])
        return out

    def near_first(self, values: Tensor) -> Tensor:
        """Numbers (j + 1,) in the order of near, then far."""
        first = len(self.near) - (ALWAYS - 1)
        stop = first + len(self.far)
        return torch.cat([values[:first], values[stop:], values[first:stop]])

    def in_order(self, values: Tensor) -> Tensor:
        """What `near_first` was made of."""
        first = len(self.near) - (ALWAYS - 1)
        return torch.cat([values[:first], values[len(self.near) :], values[first : len(self.near)]])


class Place(NamedTuple):
    """Where the basis of a probe lies."""

    near: int | None  # vectors on the device; None if all are there
    num_bytes: int  # on the device


def placed(
    op: LinearOperator,
    n: int,
    vectors: int,
    *,
    where: Where,
    max_gib: float | None,
    columns: int = 1,
    what: str = "one probe",
) -> Place:
    """Where a basis of vectors of n entries is kept, that of several columns all in the same way.

    Args:
        max_gib: room on the device; by default 8, on a card half of what is free if that is more.
    """
    each, dtype = n * op.dtype.itemsize * columns, host_dtype(op.dtype, n)
    basis, room = each * vectors, device_room(op, max_gib, each * vectors)
    splits = where == "host" or (where == "auto" and op.device.type == "cuda")
    if vectors <= ALWAYS or (where != "host" and basis <= room) or not splits:
        if basis > room:
            raise UsageError(
                f"the Lanczos basis of {what} takes {basis / GIB:.1f} GiB, "
                f"more than max_gib = {room / GIB:g}",
                hint="raise max_gib, take fewer steps, or pass reorthogonalize=False",
            )
        return Place(None, basis)
    buffers = 2 * columns * min(n, chunk(vectors, dtype)) * vectors * dtype.itemsize
    near = ALWAYS if where == "host" else max(0, min(int((room - buffers) // each), vectors))
    far, free = (vectors - near) * n * columns * dtype.itemsize, free_host_bytes()
    if near < ALWAYS or far > free:
        raise UsageError(
            f"the Lanczos basis of {what} takes {basis / GIB:.1f} GiB: it may have {room / GIB:.1f} GiB of "
            f"the device, and the rest needs {far / GIB:.1f} GiB of host memory, "
            f"of which {free / GIB:.1f} are free",
            hint="raise max_gib, take fewer steps, or pass reorthogonalize=False",
        )
    return Place(near, near * each + buffers)


def device_room(op: LinearOperator, max_gib: float | None, needed: int) -> float:
    """Bytes on the device for a basis that needs so many; the same on all ranks."""
    if max_gib is not None or op.device.type != "cuda" or needed <= TOGETHER_GIB * GIB:
        return (TOGETHER_GIB if max_gib is None else max_gib) * GIB
    free = SHARE * free_bytes(op.device)
    free = free if op.pieces is None else op.pieces[0].spread.least(free, op.device)
    return max(TOGETHER_GIB * GIB, free)

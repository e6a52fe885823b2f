"""Random numbers from a seed, never from global state."""

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

from curvescope.core.ranks.shard_layout import Pieces

Probe = Literal["rademacher", "gaussian"]
PIECE = 2**20  # entries drawn at once
LONG = 2**20  # entries of a vector from which a GPU draws its own: a CPU takes up to 50 times as long
WORD = 64  # signs in a random word: a CPU draws those of a long vector ten times as fast as one by one


def generator(seed: int, *stream: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for `seed`; integers in `stream` give independent children of it.

    CPU draws are the same on every machine, so what is drawn there does not depend on the device it is used
    on. The generator takes 32 bits of seed, so children are told apart by a hash of that length.
    """
    seed, stream = int(seed), tuple(int(i) for i in stream)  # NumPy's integers print differently
    if not stream:
        return torch.Generator(device).manual_seed(seed & 0xFFFFFFFF)
    digest = blake2b(repr((seed, *stream)).encode(), digest_size=4).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def drawn_on(n: int, device: torch.device | str) -> torch.device:
    """Return the device that draws a vector of n entries: the CPU, or a GPU if the vector is long."""
    device = torch.device(device)
    return device if device.type == "cuda" and n >= LONG else torch.device("cpu")


def probes(
    n: int,
    k: int,
    *,
    seed: int,
    first: int = 0,
    kind: Probe = "rademacher",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    out: Tensor | None = None,
    pieces: Pieces | None = None,
) -> Tensor:
    """Columns `first, …, first + k − 1` of an endless random matrix with n rows: (n, k).

    Column j depends on (seed, j) alone, and for n ≥ LONG on whether a GPU draws it: more probes extend a run
    and batching changes nothing. They are drawn into `out` if it is given, some entries at a time. For n ≥
    LONG a CPU takes −1 and 1 from the bits of whole words. With `pieces` the rows are those that are here of
    columns that are spread over ranks: each draws all entries and keeps its own.
    """
    size = n if pieces is None else pieces.size
    found = torch.empty(size, k, dtype=dtype, device=device) if out is None else out
    place = drawn_on(n, found.device)
    by_words = kind == "rademacher" and n >= LONG and place.type == "cpu"
    for j in range(k):
        source = generator(seed, first + j, device=place)
        lengths = (stop - start for start, stop in _pieces(n))
        drawn = (_signs(m, source, found.dtype) if by_words else _probe(m, source, kind) for m in lengths)
        write(drawn, found[:, j], pieces)
    return found


def write(drawn: Iterator[Tensor], out: Tensor, pieces: Pieces | None) -> None:
    """Entries that come piece by piece, written to `out`: all of them, or those that are here."""
    if pieces is not None:
        pieces.keep(drawn, out)
        return
    start = 0
    for piece in drawn:
        out[start : start + len(piece)].copy_(piece)
        start += len(piece)


def _pieces(n: int) -> Iterator[tuple[int, int]]:
    """Bounds of pieces of a column; drawn one after the other they are the draws of the whole column.

    A CPU generator makes normal numbers sixteen at a time, so the last piece has at least that many.
    """
    start = 0
    while start < n:
        stop = start + PIECE if n - start >= 2 * PIECE else n
        yield start, stop
        start = stop


def _probe(n: int, source: torch.Generator, kind: Probe) -> Tensor:
    """One piece of a column: real numbers, or −1 and 1, of a byte each on the way to a GPU."""
    if kind == "gaussian":
        return torch.randn(n, generator=source, dtype=torch.float64, device=source.device)
    bits = torch.randint(0, 2, (n,), generator=source, dtype=torch.int8, device=source.device)
    return bits.mul_(2).sub_(1)


def _signs(n: int, source: torch.Generator, dtype: torch.dtype) -> Tensor:
    """−1 and 1 by the bits of 64-bit words, the lowest first, on a CPU: entry 64 i + j is bit j of word i."""
    words = torch.empty(-(-n // WORD), dtype=torch.int64).random_(-(2**63), None, generator=source)
    return torch.index_select(_signs_of_bytes(dtype), 0, words.view(torch.uint8).int()).view(-1)[:n]


@cache
def _signs_of_bytes(dtype: torch.dtype) -> Tensor:
    """The eight signs of each byte, (256, 8)."""
    return ((torch.arange(256)[:, None] >> torch.arange(8)) % 2 * 2 - 1).to(dtype)

"""Random numbers from a seed, never from global state."""

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

from curvescope.core.ranks.shard_layout import VectorShard

Probe = Literal["rademacher", "gaussian"]
CHUNK = 2**20  # entries drawn in one call
LONG = 2**20  # entries; longer vectors are drawn on their GPU, because a CPU takes up to 50 times as long
WORD = 64  # signs per random word; for a long vector a CPU is ten times as fast with words as with bytes


def generator(seed: int, *stream: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Generator for `seed`; integers in `stream` give independent child generators.

    A CPU generator draws the same numbers on every machine, independently of the device that uses them. Its
    seed has 32 bits, so each child has a hash of this length as its seed.
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
    shard: VectorShard | None = None,
) -> Tensor:
    """Columns `first, …, first + k − 1` of an endless random matrix with n rows: (n, k).

    Column j depends only on (seed, j), and for n ≥ LONG on whether a GPU draws it. So more probes extend a
    run, and batching changes nothing. If `out` is given, the columns are written to it in chunks. For n ≥
    LONG a CPU draws signs from the bits of 64-bit words. With `shard`, columns are sharded over ranks: each
    rank draws all entries and keeps its own.
    """
    size = n if shard is None else shard.size
    columns = torch.empty(size, k, dtype=dtype, device=device) if out is None else out
    drawing_device = drawn_on(n, columns.device)
    by_words = kind == "rademacher" and n >= LONG and drawing_device.type == "cpu"
    for j in range(k):
        source = generator(seed, first + j, device=drawing_device)
        lengths = (stop - start for start, stop in _chunks(n))
        drawn = (_signs(m, source, columns.dtype) if by_words else _probe(m, source, kind) for m in lengths)
        write(drawn, columns[:, j], shard)
    return columns


def write(drawn: Iterator[Tensor], out: Tensor, shard: VectorShard | None) -> None:
    """Write entries that arrive in chunks to `out`: all of them, or those of this rank's shard."""
    if shard is not None:
        shard.write_local(drawn, out)
        return
    start = 0
    for piece in drawn:
        out[start : start + len(piece)].copy_(piece)
        start += len(piece)


def _chunks(n: int) -> Iterator[tuple[int, int]]:
    """Bounds of chunks of a column; drawing them one after the other equals drawing the column at once.

    A CPU generator makes normal numbers sixteen at a time, so the last chunk has at least that many.
    """
    start = 0
    while start < n:
        stop = start + CHUNK if n - start >= 2 * CHUNK else n
        yield start, stop
        start = stop


def _probe(n: int, source: torch.Generator, kind: Probe) -> Tensor:
    """One chunk of a column: normal numbers, or signs as bytes, which are faster to copy to a GPU."""
    if kind == "gaussian":
        return torch.randn(n, generator=source, dtype=torch.float64, device=source.device)
    bits = torch.randint(0, 2, (n,), generator=source, dtype=torch.int8, device=source.device)
    return bits.mul_(2).sub_(1)


def _signs(n: int, source: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Signs −1 and 1 from the bits of random 64-bit words on a CPU: entry 64 i + j is bit j of word i."""
    words = torch.empty(-(-n // WORD), dtype=torch.int64).random_(-(2**63), None, generator=source)
    return torch.index_select(_signs_of_bytes(dtype), 0, words.view(torch.uint8).int()).view(-1)[:n]


@cache
def _signs_of_bytes(dtype: torch.dtype) -> Tensor:
    """Eight signs of each byte, (256, 8)."""
    return ((torch.arange(256)[:, None] >> torch.arange(8)) % 2 * 2 - 1).to(dtype)

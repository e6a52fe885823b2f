"""Random numbers from a seed, never from global state."""

from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

Probe = Literal["rademacher", "gaussian"]


def generator(seed: int, *stream: int) -> torch.Generator:
    """A CPU generator for `seed`; integers in `stream` give independent children of it.

    CPU draws are the same on every machine, so a probe does not depend on the device it is used on. The
    generator takes 32 bits of seed, so children are told apart by a hash of that length.
    """
    if not stream:
        return torch.Generator().manual_seed(seed & 0xFFFFFFFF)
    digest = blake2b(repr((seed, *stream)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def probes(
    n: int,
    k: int,
    *,
    seed: int,
    first: int = 0,
    kind: Probe = "rademacher",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Columns `first, …, first + k − 1` of an endless random matrix with n rows: (n, k).

    Column j depends on (seed, j) alone, so more probes extend a run and batching changes nothing.
    """
    found = torch.empty(n, k, dtype=dtype, device=device)
    for j in range(k):
        found[:, j] = _probe(n, generator(seed, first + j), kind).to(device)
    return found if kind == "gaussian" else found.mul_(2).sub_(1)


def _probe(n: int, source: torch.Generator, kind: Probe) -> Tensor:
    """One column: real numbers, or 0 and 1."""
    if kind == "gaussian":
        return torch.randn(n, generator=source, dtype=torch.float64)
    return torch.randint(0, 2, (n,), generator=source, dtype=torch.uint8)  # a byte each on the way to a GPU

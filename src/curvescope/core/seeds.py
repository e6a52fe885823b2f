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
    columns = [_probe(n, generator(seed, first + j), kind) for j in range(k)]
    return torch.stack(columns, dim=1).to(dtype=dtype, device=device)


def _probe(n: int, source: torch.Generator, kind: Probe) -> Tensor:
    if kind == "gaussian":
        return torch.randn(n, generator=source, dtype=torch.float64)
    return torch.randint(0, 2, (n,), generator=source).double() * 2 - 1

"""Loaders of others: what is said of those that give something else at every reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from curvescope.core.errors import UsageError
from curvescope.core.trees import leaves

SHUFFLED = "the loader shuffles: its batches are read once and stay in the order of that reading"
DRAWN = (
    "the loader draws its batches anew at every reading: they are read once and stay what they were then, "
    "random augmentation included"
)


def refuse_iterator(data: Any) -> None:
    """Raise for data that can be read only once."""
    if isinstance(data, Iterator):
        raise UsageError(
            f"expected a DataLoader or a list of pairs, got a one-pass {type(data).__name__}",
            hint="pass the loader itself, or list(iterator)",
        )


def shuffle_notes(loader: Any) -> list[str]:
    """What a reader should know of a loader that has been read once."""
    if shuffles(loader):
        return [SHUFFLED]
    return [DRAWN] if isinstance(loader, DataLoader) and _redraws(loader) else []


def shuffles(loader: Any) -> bool:
    """Whether a DataLoader draws the order of its items anew at every reading."""
    kinds = RandomSampler, SubsetRandomSampler, WeightedRandomSampler
    return isinstance(getattr(loader, "sampler", None), kinds)


def _redraws(loader: DataLoader[Any]) -> bool:
    """Whether the first batch is another one when it is read twice more; torch's random numbers stay."""
    with torch.random.fork_rng(devices=[]):
        first = [_kept(x) for x in leaves(next(iter(loader), ()))]
        second = leaves(next(iter(loader), ()))
    return len(first) != len(second) or not all(map(_same, first, second))


def _kept(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _same(a: Any, b: Any) -> bool:
    """Whether two entries hold the same numbers; what is no tensor is not compared."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    return torch.equal(a, b) or (a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()))

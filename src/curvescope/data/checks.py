"""What data have to be, checked once where they enter, and what is said of loaders that draw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.tensors.trees import leaves

SHUFFLED = "the loader shuffles: its batches are read once and stay in the order of that reading"
DRAWN = (
    "the loader draws its batches anew at every reading: they are read once and stay what they were then, "
    "random augmentation included"
)


def check_arrays(items: Sequence[Any]) -> None:
    """Raise unless all are dense tensors with entries."""
    for item in items:
        if not isinstance(item, Tensor):
            raise UsageError(
                f"expected inputs, targets and weights as tensors, got a {type(item).__name__}",
                hint="torch.as_tensor(x) makes one",
            )
        if item.layout is not torch.strided or item.is_nested or item.is_quantized or item.is_meta:
            named = {"nested": item.is_nested, "meta": item.is_meta, "quantized": item.is_quantized}
            kind = next((name for name, it_is in named.items() if it_is), str(item.layout))
            raise UsageError(
                f"expected dense tensors, got a {kind.removeprefix('torch.')} one",
                hint="x.to_dense(), or padding, makes one",
            )


def check_lengths(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Raise unless all have the same number of sequences."""
    if not inputs or not targets:
        raise ShapeError(f"expected inputs and targets, got no {'targets' if inputs else 'inputs'}")
    lengths = {t.shape[0] if t.dim() else -1 for t in (*inputs, *targets)}
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(str(tuple(t.shape)) for t in (*inputs, *targets))
        raise ShapeError(
            f"expected inputs and targets with the same number of sequences, got shapes {shapes}",
            hint="a batch has sequences on axis 0 of all its tensors; loss_fn takes batches of any kind",
        )


def check_weights(weights: Tensor, num_sequences: int) -> None:
    """Raise unless the weights are finite, not negative, and at least one per sequence."""
    if weights.shape[:1] != (num_sequences,):
        raise ShapeError(
            f"expected one weight per term, got shape {tuple(weights.shape)} for {num_sequences} sequences"
        )
    if weights.is_complex() or not bool(((weights >= 0) & torch.isfinite(weights)).all()):
        raise UsageError("expected weights that are real, finite and not negative")


def usable(tensor: Tensor) -> Tensor:
    """The tensor, or its copy outside inference mode, which a graph can keep."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


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

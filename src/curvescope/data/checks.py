"""What the tensors of a batch have to be, checked once where data enters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError


def check_arrays(items: Sequence[Any]) -> None:
    """Raise unless all are dense tensors with entries."""
    for item in items:
        if not isinstance(item, Tensor):
            raise UsageError(
                f"expected inputs, targets and weights as tensors, got a {type(item).__name__}",
                hint="torch.as_tensor(x) makes one",
            )
        if item.layout is not torch.strided or item.is_nested or item.is_quantized or item.is_meta:
            named = {"nested": item.is_nested, "meta": item.is_meta, "quantised": item.is_quantized}
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
            f"expected inputs and targets with the same number of sequences, got shapes {shapes}"
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

"""Real sequences with real targets."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
from curvescope.data.tasks.checks import check_choice, check_counts, check_not_negative

Teacher = Literal["linear", "noise"]
Dtype = Literal["float32", "float64"]


def gaussian_regression(
    *,
    num_sequences: int = 16,
    length: int = 8,
    width: int = 4,
    out_width: int | None = None,
    sigma: float = 1.0,
    teacher: Teacher = "linear",
    noise: float = 0.0,
    seed: int = 0,
    batch_size: int | None = None,
    dtype: Dtype = "float64",
) -> Batches:
    """Sequences X (n, L, d) with independent N(0, σ²) entries, and targets Y (n, L, d_out).

    "linear": Y = X W + noise · Z with one teacher W (d, d_out) of N(0, 1/d) entries; "noise": Y = Z, whatever
    X is. Z has independent N(0, 1) entries. `out_width=None` means d_out = d. Construction: X / σ, W and Z
    are drawn in float64 from the streams 0, 1 and 2 of `seed`, so that σ scales X and redraws nothing.
    """
    out_width = width if out_width is None else out_width
    check_counts(num_sequences=num_sequences, length=length, width=width, out_width=out_width)
    check_not_negative(sigma=sigma, noise=noise)
    check_choice("teacher", teacher, get_args(Teacher))
    check_choice("dtype", dtype, get_args(Dtype))
    X = sigma * _normal(seed, 0, num_sequences, length, width)
    Z = _normal(seed, 2, num_sequences, length, out_width)
    if teacher == "linear":
        Y = X @ _normal(seed, 1, width, out_width) / width**0.5 + noise * Z
    else:
        Y = Z
    kind = getattr(torch, dtype)
    return Batches.from_tensors(X.to(kind), Y.to(kind), batch_size=batch_size, name="gaussian_regression")


def _normal(seed: int, stream: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed, stream), dtype=torch.float64)

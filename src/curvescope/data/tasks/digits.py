"""Images of handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
from curvescope.data.tasks.checks import check_choice, check_counts

Dtype = Literal["float32", "float64"]


def digits(
    *,
    num_sequences: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    dtype: Dtype = "float64",
) -> Batches:
    """Images (n, 1, 8, 8) with gray values k/16 in [0, 1], and classes (n,) from 0 to 9.

    Construction: a randperm with `seed` of scikit-learn's 1797 images (`load_digits`); the first
    `num_sequences` of it (None: all), so that more images extend a smaller choice.
    """
    from sklearn.datasets import load_digits

    check_choice("dtype", dtype, get_args(Dtype))
    images, classes = load_digits(return_X_y=True)
    num_sequences = len(images) if num_sequences is None else num_sequences
    check_counts(num_sequences=num_sequences)
    if num_sequences > len(images):
        raise UsageError(f"expected num_sequences of at most {len(images)}, got {num_sequences}")
    chosen = torch.randperm(len(images), generator=generator(seed))[:num_sequences]
    X = torch.as_tensor(images, dtype=getattr(torch, dtype)).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(classes, dtype=torch.int64)
    return Batches.from_tensors(X[chosen], y[chosen], batch_size=batch_size, name="digits")

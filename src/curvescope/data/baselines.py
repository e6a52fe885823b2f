"""Baseline losses: equal probabilities, and token frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np

from curvescope.core.errors import UsageError


def uniform_loss(vocab_size: int) -> float:
    """log V in nats: the mean loss of equal probabilities."""
    if vocab_size < 1:
        raise UsageError(f"expected a vocab_size of at least 1, got {vocab_size}")
    return log(vocab_size)


def unigram_loss(ids_train: Sequence[int], ids_eval: Sequence[int], vocab_size: int) -> float:
    """Mean loss, in nats, on `ids_eval` of token frequencies counted in `ids_train` with one added to each.

    −1/M Σ_m log (c(e_m) + 1)/(N + V), where c counts among the N training ids and V is `vocab_size`.
    """
    train, held_out = _ids("ids_train", ids_train, vocab_size), _ids("ids_eval", ids_eval, vocab_size)
    if not held_out.size:
        raise UsageError("expected at least one id in ids_eval, got none")
    counts = np.bincount(train, minlength=vocab_size) + 1
    return float(-np.log(counts[held_out] / counts.sum()).mean())


def _ids(name: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(ids).reshape(-1)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise UsageError(f"expected {name} to be integers, got {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) >= vocab_size:
        raise UsageError(
            f"expected {name} from 0 to {vocab_size - 1}, got from {int(array.min())} to {int(array.max())}"
        )
    return array

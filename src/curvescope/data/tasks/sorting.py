"""Sorting of letters."""

from __future__ import annotations

import torch

from curvescope.core.seeds import generator
from curvescope.data.batches import IGNORED, Batches
from curvescope.data.tasks.checks import check_counts


def sorting(
    *,
    num_sequences: int = 64,
    length: int = 6,
    vocab: int = 3,
    seed: int = 0,
    batch_size: int | None = None,
) -> Batches:
    """m = `length` letters of {0, …, vocab − 1}, then the same letters in ascending order.

    Construction: letters are uniform, one randint with `seed`. Of the 2m tokens the input is all but the
    last, (n, 2m − 1), and position m − 1 + i predicts the i-th sorted letter (i from 0): the last unsorted
    letter and what follows it count. The defaults have the layout of minGPT's sorting demonstration, which
    draws words with few different letters more often.
    """
    check_counts(num_sequences=num_sequences, length=length, vocab=vocab)
    letters = torch.randint(0, vocab, (num_sequences, length), generator=generator(seed))
    tokens = torch.cat([letters, letters.sort(dim=1).values], dim=1)
    targets = tokens[:, 1:].clone()
    targets[:, : length - 1] = IGNORED
    return Batches.from_tensors(tokens[:, :-1], targets, batch_size=batch_size, name="sorting")

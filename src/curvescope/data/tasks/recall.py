"""Recall of what stood earlier in the sequence: copying a word, and induction."""

from __future__ import annotations

import torch

from curvescope.core.seeds import generator
from curvescope.data.batches import IGNORED, Batches
from curvescope.data.tasks.checks import check_counts


def copy(
    *,
    num_sequences: int = 64,
    length: int = 8,
    vocab: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
) -> Batches:
    """A word w₁ … w_m of m = `length` random letters, a separator, and the word again.

    Ids: the letters 0 … vocab − 1, the separator is `vocab`. Construction: letters are uniform, one randint
    with `seed`. Of the 2m + 1 tokens the input is all but the last, (n, 2m), and position m + i predicts
    w_{i+1}: the separator and what follows it count, the first copy does not.
    """
    check_counts(num_sequences=num_sequences, length=length, vocab=vocab)
    word = torch.randint(0, vocab, (num_sequences, length), generator=generator(seed))
    tokens = torch.cat([word, torch.full_like(word[:, :1], vocab), word], dim=1)
    targets = tokens[:, 1:].clone()
    targets[:, :length] = IGNORED
    return Batches.from_tensors(tokens[:, :-1], targets, batch_size=batch_size, name="copy")


def induction(
    *,
    num_sequences: int = 64,
    length: int = 16,
    vocab: int = 8,
    seed: int = 0,
    batch_size: int | None = None,
) -> Batches:
    """Random letters … A B … A, and the question what follows the second A: the answer is B.

    Ids: the letters 0 … vocab − 1. Construction, from a generator with `seed`: A is uniform; the place of the
    first A is uniform among 0 … length − 3; all letters are uniform among those other than A, except that one
    and the last, which are A. So A stands exactly twice, B ≠ A is the letter after the first, and only the
    last position counts. Inputs and targets are (n, length).
    """
    check_counts(num_sequences=num_sequences)
    check_counts(3, length=length)
    check_counts(2, vocab=vocab)
    source = generator(seed)
    A = torch.randint(0, vocab, (num_sequences, 1), generator=source)
    place = torch.randint(0, length - 2, (num_sequences, 1), generator=source)
    others = torch.randint(0, vocab - 1, (num_sequences, length), generator=source)
    inputs = others + (others >= A)  # the letters other than A, in order
    inputs = inputs.scatter(1, place, A)
    inputs[:, -1:] = A
    targets = torch.full_like(inputs, IGNORED)
    targets[:, -1:] = inputs.gather(1, place + 1)
    return Batches.from_tensors(inputs, targets, batch_size=batch_size, name="induction")

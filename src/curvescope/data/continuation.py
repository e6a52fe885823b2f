"""Texts for an encoder with a decoder: it reads the first half of a window and predicts the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from curvescope.core.errors import UsageError
from curvescope.core.tensors.targets import IGNORED
from curvescope.data.batches import Batches
from curvescope.data.corpora import MAX_BYTES, read_source
from curvescope.data.masking import tokenizer_of
from curvescope.data.text import windows


def continuation(
    source: str | Path,
    model: Any,
    *,
    tokens: int = 4096,
    seq_len: int = 64,
    batch_size: int = 8,
    seed: int = 0,
    max_bytes: int | None = MAX_BYTES,
) -> Batches:
    """A sample of a text in windows of L = `seq_len` tokens: inputs are the first ⌊L/2⌋, labels the others.

    Windows are chosen as `windows` says. `tokens` labels count, and those beyond are −100.
    """
    half = seq_len // 2
    if half < 1 or tokens < 1:
        raise UsageError(f"expected seq_len ≥ 2 and tokens ≥ 1, got {seq_len} and {tokens}")
    count = -(-tokens // (seq_len - half))
    content = read_source(source, max_bytes=max_bytes)
    ids = torch.tensor(tokenizer_of(model).encode(content), dtype=torch.int64)
    if len(ids) <= count * seq_len:
        raise UsageError(
            f"expected a text of at least {count * seq_len + 1} tokens for {tokens} labels, got {len(ids)}",
            hint="half of a text is read, half of it predicted",
        )
    rows, _ = windows(ids, tokens=count * seq_len, seq_len=seq_len, seed=seed)
    labels = rows[:, half:].clone()
    labels.flatten()[tokens:] = IGNORED
    return Batches.from_tensors(
        {"input_ids": rows[:, :half].clone()}, labels, batch_size=batch_size, name=f"text:{source}"
    )

"""Next-token pairs from text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.batches import IGNORED, Batches
from curvescope.data.corpora import MAX_BYTES, read_source
from curvescope.tokenizers import Tokenizer, as_tokenizer


def text_data(
    source: str | Path,
    model: Any,
    *,
    tokens: int = 4096,
    seq_len: int = 64,
    batch_size: int = 8,
    seed: int = 0,
    unit: int = 1,
    max_bytes: int | None = MAX_BYTES,
) -> Batches:
    """Return a sample of `tokens` next-token pairs of a text: a corpus, a file, a folder, or "hf:NAME".

    `model` is a tokenizer, or has one as `.tokenizer`; if it has an `.n_ctx`, `seq_len` must fit. `windows`
    describes the sample of the text's ids; at most `max_bytes` bytes of the source are read.
    """
    for name, count in {"tokens": tokens, "seq_len": seq_len, "batch_size": batch_size, "unit": unit}.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"expected {name} to be an integer of at least 1, got {count!r}")
    tokenizer = _tokenizer_of(model)
    n_ctx = getattr(model, "n_ctx", None)
    if n_ctx is not None and seq_len > n_ctx:
        raise UsageError(
            f"expected seq_len of at most {n_ctx}, the model's context, got {seq_len}",
            hint=f"seq_len={n_ctx}",
        )
    content = read_source(source, max_bytes=max_bytes)
    ids = torch.tensor(tokenizer.encode(content), dtype=torch.int64)
    if len(ids) <= tokens and max_bytes is not None and len(content.encode()) > max_bytes - 4:
        raise UsageError(
            f"expected a text of at least {tokens + 1} tokens, got {len(ids)} in its first {max_bytes} bytes",
            hint="max_bytes=None reads all of it",
        )
    inputs, targets = windows(ids, tokens=tokens, seq_len=seq_len, seed=seed, unit=unit)
    return Batches.from_tensors(inputs, targets, batch_size=batch_size, name=f"text:{source}")


def windows(ids: Tensor, *, tokens: int, seq_len: int, seed: int = 0, unit: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets (⌈tokens / L⌉, L), L = `seq_len`, of the N ids of a text; exactly `tokens` count.

    Window w pairs the inputs ids[wL], …, ids[wL + L − 1] with the targets one further, so windows do not
    share a target. A randperm with `seed` selects ⌈tokens / L⌉ of the ⌊(N − 1) / L⌋ full windows, so that
    more tokens extend a smaller sample. If these are too few, the rest of the text comes last, padded with
    the input 0 and the target −100. If `tokens` is not a multiple of L, the surplus targets of the last
    window are −100. With `unit` = U the randperm is one of runs of U consecutive windows, so that sequences
    iU, …, iU + U − 1 of the sample follow each other in the text.
    """
    num_pairs = max(len(ids) - 1, 0)
    if tokens > num_pairs:
        raise UsageError(
            f"expected a text of at least {tokens + 1} tokens, got {len(ids)}",
            hint=f"give a longer text{f', or tokens={num_pairs} for all of it' if num_pairs else ''}",
        )
    num_whole, rest = divmod(num_pairs, seq_len)
    size = (num_whole + (rest > 0)) * seq_len
    padding = (0, size - num_pairs)
    inputs = torch.nn.functional.pad(ids[:-1], padding, value=0).reshape(-1, seq_len)
    targets = torch.nn.functional.pad(ids[1:], padding, value=IGNORED).reshape(-1, seq_len)
    runs = torch.randperm(num_whole // unit, generator=generator(seed))
    drawn = (runs[:, None] * unit + torch.arange(unit)).reshape(-1)
    order = torch.cat([drawn, torch.arange(len(drawn), len(inputs))])
    chosen = order[: -(-tokens // seq_len)]
    inputs, targets = inputs[chosen], targets[chosen]
    targets[-1, tokens - (len(chosen) - 1) * seq_len :] = IGNORED
    return inputs, targets


def _tokenizer_of(model: Any) -> Tokenizer:
    if isinstance(model, Tokenizer):
        return model
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        return as_tokenizer(tokenizer)
    if hasattr(model, "encode") and hasattr(model, "decode"):
        return as_tokenizer(model)
    raise UsageError(
        f"expected a tokenizer, or a model that has one, but the {type(model).__name__} has none",
        hint="ByteTokenizer() takes any text",
    )

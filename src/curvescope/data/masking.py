"""Masked-language-model batches for encoders: some tokens of a text are hidden, and they are the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.core.tensors import IGNORED
from curvescope.data.batches import Batches
from curvescope.data.corpora import MAX_BYTES, read_source
from curvescope.data.text import windows
from curvescope.tokenizers import Tokenizer, as_tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of a tokenizer's special tokens; None if it has none."""

    mask: int | None
    first: int | None  # [CLS], <s>
    last: int | None  # [SEP], </s>
    padding: int

    @property
    def num_frame(self) -> int:
        """Number of positions for `first` and `last` in a sequence."""
        return (self.first is not None) + (self.last is not None)


def masked_lm_data(
    source: str | Path,
    model: Any,
    *,
    tokens: int = 4096,
    seq_len: int = 64,
    batch_size: int = 8,
    seed: int = 0,
    mask_rate: float = 0.15,
    max_bytes: int | None = MAX_BYTES,
) -> Batches:
    """Make batches of `tokens` tokens of a text, of which a share `mask_rate` is hidden and predicted.

    Inputs are {"input_ids", "attention_mask"} (B, seq_len), targets (B, seq_len) the hidden ids, −100
    elsewhere. The text's N ids are cut into windows of L ids, where L is `seq_len` minus the tokenizer's
    first and last token, which are added to each window. A randperm with `seed` selects ⌈tokens / L⌉ full
    windows, and the rest of the text comes last, so that more tokens extend a smaller sample. A shorter
    window (at the end of the text, or to reach the number of tokens) is padded, with attention mask 0. In a
    window w with m tokens, max(1, round(mask_rate · m)) tokens are hidden: the first entries of a randperm
    with (`seed`, w). A hidden token is always replaced by the mask token.

    Example:
        >>> model = cs.load("bert-base-uncased")
        >>> problem = cs.Problem(model, cs.masked_lm_data("notes.txt", model, tokens=2048, seq_len=128))

    Args:
        source: A corpus, a file, a folder, or "hf:NAME".
        model: A tokenizer with a mask token, or a model with one as `.tokenizer`. If it has an `.n_ctx`,
            `seq_len` must not exceed it.
        max_bytes: Number of bytes to read from the source.
    """
    for name, count in {"tokens": tokens, "seq_len": seq_len, "batch_size": batch_size}.items():
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"expected {name} to be an integer of at least 1, got {count!r}")
    if not 0 < mask_rate <= 1:
        raise UsageError(f"expected a mask_rate above 0 and up to 1, got {mask_rate!r}")
    special = special_tokens(model)
    if special.mask is None:
        raise UsageError(
            "masked-LM batches need a tokenizer with a mask token, but this one has none",
            hint="use cs.text_data for a causal model",
        )
    length = body_length(model, seq_len, special)
    ids = torch.tensor(
        tokenizer_of(model).encode(read_source(source, max_bytes=max_bytes)), dtype=torch.int64
    )
    if len(ids) < tokens:
        raise UsageError(
            f"expected a text of at least {tokens} tokens, got {len(ids)}",
            hint=f"give a longer text{f', or tokens={len(ids)} for all of it' if len(ids) else ''}",
        )
    bodies, hidden = [], []
    for number, body in _windows(ids, length, tokens, seed):
        count = max(1, round(mask_rate * len(body)))
        hidden.append(torch.randperm(len(body), generator=generator(seed, number))[:count])
        bodies.append(body)
    inputs, targets = _masked(bodies, hidden, special, seq_len)
    return Batches.from_tensors(inputs, targets, batch_size=batch_size, name=f"masked text:{source}")


def _windows(ids: Tensor, length: int, tokens: int, seed: int) -> list[tuple[int, Tensor]]:
    """Windows of `tokens` ids in all, with their numbers in the text; full ones first, in random order."""
    num_whole = len(ids) // length
    order = [*torch.randperm(num_whole, generator=generator(seed)).tolist(), num_whole]
    windows, tokens_left = [], tokens
    for number in order[: -(-tokens // length)]:
        body = ids[number * length : (number + 1) * length][:tokens_left]
        windows.append((number, body))
        tokens_left -= len(body)
    return windows


def _masked(
    bodies: Sequence[Tensor], hidden: Sequence[Tensor], special: SpecialTokens, seq_len: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return framed and padded inputs with mask tokens at the hidden positions, and the targets."""
    shift = 0 if special.first is None else 1
    inputs = padded([body.tolist() for body in bodies], special, seq_len)
    targets = torch.full_like(inputs["input_ids"], IGNORED)
    assert special.mask is not None
    for row, (body, positions) in enumerate(zip(bodies, hidden, strict=True)):
        targets[row, positions + shift] = body[positions]
        inputs["input_ids"][row, positions + shift] = special.mask
    return inputs, targets


def padded(bodies: Sequence[Sequence[int]], special: SpecialTokens, length: int) -> dict[str, Tensor]:
    """Return ids and attention mask of sequences with first and last token, padded to `length`."""
    before = [] if special.first is None else [special.first]
    after = [] if special.last is None else [special.last]
    ids = torch.full((len(bodies), length), special.padding)
    mask = torch.zeros(len(bodies), length, dtype=torch.int64)
    for row, body in enumerate(bodies):
        framed = torch.tensor([*before, *body, *after])
        ids[row, : len(framed)] = framed
        mask[row, : len(framed)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def tokenizer_of(model: Any) -> Tokenizer:
    """Return a tokenizer, or the tokenizer of a model."""
    tokenizer = getattr(model, "tokenizer", None)
    return as_tokenizer(model if tokenizer is None or isinstance(model, Tokenizer) else tokenizer)


def special_tokens(model: Any) -> SpecialTokens:
    """Return the tokenizer's special tokens: `mask_id` and so on, or `mask_token_id` as in transformers."""
    objects = [getattr(model, "tokenizer", None), model]
    objects += [getattr(candidate, "tokenizer", None) for candidate in objects if candidate is not None]

    def find(*names: str) -> int | None:
        for candidate in objects:
            for name in names:
                value = getattr(candidate, name, None)
                if isinstance(value, int) and value >= 0:
                    return value
        return None

    return SpecialTokens(
        mask=find("mask_id", "mask_token_id"),
        first=find("cls_id", "cls_token_id"),
        last=find("sep_id", "sep_token_id"),
        padding=find("pad_id", "pad_token_id") or 0,
    )


def body_length(model: Any, seq_len: int, special: SpecialTokens) -> int:
    """Return the number of tokens of text in `seq_len`; raise if it is zero, or above the model's context."""
    n_ctx = getattr(model, "n_ctx", None)
    if n_ctx is not None and seq_len > n_ctx:
        raise UsageError(
            f"expected seq_len of at most {n_ctx}, the model's context, got {seq_len}",
            hint=f"seq_len={n_ctx}",
        )
    if seq_len <= special.num_frame:
        raise UsageError(
            f"expected seq_len of at least {special.num_frame + 1}: {special.num_frame} positions hold the "
            f"first and last token, got {seq_len}"
        )
    return seq_len - special.num_frame


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
    """Sample a text in windows of L = `seq_len` tokens: inputs are the first ⌊L/2⌋, labels the others.

    `windows` chooses the windows. `tokens` labels count, further ones are −100.
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
            hint="half of each window is read, the other half predicted",
        )
    rows, _ = windows(ids, tokens=count * seq_len, seq_len=seq_len, seed=seed)
    labels = rows[:, half:].clone()
    labels.flatten()[tokens:] = IGNORED
    return Batches.from_tensors(
        {"input_ids": rows[:, :half].clone()}, labels, batch_size=batch_size, name=f"text:{source}"
    )

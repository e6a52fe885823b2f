"""Loss for models without a head: the change of their hidden states if a part of the input is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.batches import IGNORED, Batch, Batches, Inputs
from curvescope.data.corpora import MAX_BYTES
from curvescope.data.image_folders import PREFIX
from curvescope.data.labels import DIGITS, fact, image_data, num_sequences
from curvescope.data.masking import masked_lm_data, tokenizer_of
from curvescope.data.text import text_data

RATE = 0.15


@dataclass(frozen=True)
class Corrupted:
    """The same sequences, original and corrupted; targets of the reader, −100 at padding or missing
    tokens.
    """

    whole: Batches
    hidden: Batches
    counted: tuple[Tensor | None, ...]  # for each batch, (B, T) that is true at tokens; None where all are


def masked_text(source: str | Path, model: Any, *, rate: float = RATE, **options: Any) -> Corrupted:
    """Return text with mask tokens as in `masked_lm_data`, and the original text; padding does not count."""
    hidden = masked_lm_data(source, model, mask_rate=rate, **options)
    shown, counted = [], []
    for batch in hidden:
        assert isinstance(batch.inputs, Mapping)
        ids = torch.where(batch.targets == IGNORED, batch.inputs["input_ids"], batch.targets)
        shown.append(Batch({**batch.inputs, "input_ids": ids}, batch.targets))
        counted.append(batch.inputs["attention_mask"] == 1)
    return _named(shown, list(hidden), counted, f"masked text:{source}")


def replaced_text(
    source: str | Path,
    model: Any,
    *,
    rate: float = RATE,
    seed: int = 0,
    max_bytes: int | None = MAX_BYTES,
    **options: Any,
) -> Corrupted:
    """Return text as in `text_data`, and with some tokens replaced, for models without a mask token.

    In a window w of m tokens, in the order of the batches, max(1, round(rate · m)) tokens are replaced: the
    first of a randperm with (`seed`, w), each by another token of the vocabulary, all equally likely. The
    last window is padded on the right; padding does not count, so it does not change a causal model.
    """
    check_rate(rate)
    original = text_data(source, model, seed=seed, max_bytes=max_bytes, **options)
    size = tokenizer_of(model).vocab_size
    size = min(size, getattr(model, "facts", {}).get("vocab_size") or size)

    def replace(row: Tensor, places: Tensor, rng: torch.Generator) -> None:
        row[places] = (row[places] + torch.randint(1, size, places.shape, generator=rng)) % size

    counted = [batch.targets != IGNORED for batch in original]
    lengths = [int(row.sum()) for batch in counted for row in batch]
    hidden = _changed(original, lengths, replace, rate=rate, seed=seed)
    return _named(list(original), hidden, counted, f"replaced text:{source}")


def hidden_patches(
    model: Any,
    num: int,
    *,
    rate: float = RATE,
    seed: int = 0,
    batch_size: int = 8,
    source: str | Path = DIGITS,
) -> Corrupted:
    """Return images as in `image_data`, and with max(1, round(rate · patches)) of their patches gray (0).

    Args:
        model: A model with image_size and patch_size in `.facts`.
        source: "digits" or a folder, as in `image_data`.
    """
    check_rate(rate)
    original = image_data(model, num, seed, batch_size=batch_size, source=source)
    size, patch = fact(model.facts, "image_size"), fact(model.facts, "patch_size")
    if size is None or patch is None:
        raise UsageError(
            "hiding patches needs a model with patch_size among its facts, but this model has none"
        )
    side = size // patch

    def paint(image: Tensor, places: Tensor, rng: torch.Generator) -> None:
        for place in places.tolist():
            row, column = divmod(place, side)
            image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch] = 0

    hidden = _changed(original, [side * side] * num, paint, rate=rate, seed=seed)
    return _named(list(original), hidden, None, f"{original.name} with hidden patches")


def check_rate(rate: float) -> None:
    """Raise unless the rate is above 0 and at most 1."""
    if not 0 < rate <= 1:
        raise UsageError(f"expected a rate above 0 and up to 1, got {rate!r}")


def _changed(
    original: Batches,
    lengths: list[int],
    change: Callable[[Tensor, Tensor, torch.Generator], None],
    *,
    rate: float,
    seed: int,
) -> list[Batch]:
    """Copy the batches and apply `change` at some of the positions 0, …, length − 1 of each sequence."""
    changed, number = [], 0
    for batch in original:
        assert isinstance(batch.inputs, Tensor)
        inputs = batch.inputs.clone()
        for sequence in inputs:
            rng = generator(seed, number)
            count = max(1, round(rate * lengths[number]))
            change(sequence, torch.randperm(lengths[number], generator=rng)[:count], rng)
            number += 1
        changed.append(Batch(inputs, batch.targets))
    return changed


def _named(original: list[Batch], hidden: list[Batch], counted: list[Tensor] | None, name: str) -> Corrupted:
    """Combine original and corrupted batches and the mask of counted positions."""
    masks = [None] * len(original) if counted is None else [None if bool(m.all()) else m for m in counted]
    return Corrupted(Batches(original, name=name), Batches(hidden, name=name), tuple(masks))


FEATURES = "features"
"""The task of a model whose outputs are its last hidden states."""
NOTE = (
    f"the model has no head, so the loss is a denoising loss: {RATE:.0%} of the input are hidden, and the "
    "last hidden states are compared with those of the complete input, which are held fixed, by their mean "
    "squared error. The model was not trained with this loss. The GGN is 2/N Jᵀ J, the geometry of its "
    "features; parameters after the last hidden states (a pooler) have no curvature"
)


class Reader(Protocol):
    """Interface of a model that reads tokens; `cs.Model` has it."""

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def evaluate(self, inputs: Inputs) -> Tensor:
        """Return the outputs, in eval mode and without derivatives."""
        ...


def denoising_data(
    source: str | Path,
    model: Reader,
    *,
    tokens: int = 4096,
    seq_len: int = 64,
    batch_size: int = 8,
    seed: int = 0,
    rate: float = RATE,
    max_bytes: int | None = MAX_BYTES,
) -> Batches:
    """Make corrupted inputs x̃ with the targets f(x; θ₀), the model's outputs on the complete inputs x.

    With the squared error this is L(θ) = 1/N Σ ‖f(x̃; θ) − f(x; θ₀)‖², with N entries of the hidden states,
    at θ = θ₀. Targets are numbers and do not change with θ. An encoder's tokens are replaced by the mask
    token, as in `cs.masked_lm_data`; a causal model's by other tokens of the vocabulary; a vision model's
    patches become gray. All tokens except padding count.

    Example:
        >>> model = cs.load("all-MiniLM-L6-v2")
        >>> problem = cs.Problem(model, cs.denoising_data("sample", model, tokens=512), loss="mse_mean")

    Args:
        source: A corpus, a file, a folder, or "hf:NAME"; a vision model uses
            the images of `images:FOLDER`, and digits for every other source.
        model: A `cs.Model` with a tokenizer, or a vision model.
        tokens: Number of tokens, as in `cs.text_data` and `cs.masked_lm_data`; for images ⌈tokens / seq_len⌉.
        rate: Share of hidden tokens or patches, at least one in every sequence.
    """
    if not callable(getattr(model, "evaluate", None)):
        raise UsageError(f"expected a cs.Model, got {type(model).__name__}", hint="cs.load(model) makes one")
    cut: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "rate": rate}
    if sees(model):
        images = source if str(source).startswith(PREFIX) else DIGITS
        num = num_sequences(tokens, seq_len)
        return _with_targets(model, hidden_patches(model, num, source=images, **cut))
    cut |= {"tokens": tokens, "seq_len": seq_len, "max_bytes": max_bytes}
    corrupt = replaced_text if model.facts.get("causal", True) else masked_text
    return _with_targets(model, corrupt(source, model, **cut))


def sees(model: Reader) -> bool:
    """Return True if a model reads images; a zoo model has the fact image_size even if it reads tokens."""
    return "image_size" in model.facts and model.facts.get("inputs", "patches") == "patches"


def _with_targets(model: Reader, pair: Corrupted) -> Batches:
    """Pair the corrupted inputs with the outputs on the original ones; padding gets weight zero."""
    batches = []
    for hidden, whole, counted in zip(pair.hidden, pair.whole, pair.counted, strict=True):
        targets = model.evaluate(whole.inputs).cpu()  # batches are stored on the CPU
        batches.append(Batch(hidden.inputs, targets, None if counted is None else counted.to(targets.dtype)))
    return Batches(batches, name=pair.hidden.name)

"""A loss for models without a head: how far their hidden states move when a part of the input is hidden."""

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
    """Text as `masked_lm_data` hides it, with the mask token, and as it was; padding does not count."""
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
    """Text as `text_data` cuts it, and with tokens replaced, for models without a mask token.

    In a window w of m tokens, in the order of the batches, max(1, round(rate · m)) tokens are replaced: the
    first of a randperm with (`seed`, w), each by another token of the vocabulary, all equally likely. The
    last window is padded on the right; padding does not count, so it does not change a causal model.
    """
    check_rate(rate)
    whole = text_data(source, model, seed=seed, max_bytes=max_bytes, **options)
    size = tokenizer_of(model).vocab_size
    size = min(size, getattr(model, "facts", {}).get("vocab_size") or size)

    def replace(row: Tensor, places: Tensor, rng: torch.Generator) -> None:
        row[places] = (row[places] + torch.randint(1, size, places.shape, generator=rng)) % size

    counted = [batch.targets != IGNORED for batch in whole]
    lengths = [int(row.sum()) for batch in counted for row in batch]
    hidden = _changed(whole, lengths, replace, rate=rate, seed=seed)
    return _named(list(whole), hidden, counted, f"replaced text:{source}")


def hidden_patches(
    model: Any,
    num: int,
    *,
    rate: float = RATE,
    seed: int = 0,
    batch_size: int = 8,
    source: str | Path = DIGITS,
) -> Corrupted:
    """Images as `image_data` makes them, and with max(1, round(rate · patches)) of their patches gray (0).

    Args:
        model: Has `.facts` with image_size and patch_size.
        source: "digits" or a folder, as in `image_data`.
    """
    check_rate(rate)
    whole = image_data(model, num, seed, batch_size=batch_size, source=source)
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

    hidden = _changed(whole, [side * side] * num, paint, rate=rate, seed=seed)
    return _named(list(whole), hidden, None, f"{whole.name} with hidden patches")


def check_rate(rate: float) -> None:
    """Raise unless a share can be hidden."""
    if not 0 < rate <= 1:
        raise UsageError(f"expected a rate above 0 and up to 1, got {rate!r}")


def _changed(
    whole: Batches,
    lengths: list[int],
    change: Callable[[Tensor, Tensor, torch.Generator], None],
    *,
    rate: float,
    seed: int,
) -> list[Batch]:
    """Copies of the batches with `change` made at some of the places 0, …, length − 1 of each sequence."""
    found, number = [], 0
    for batch in whole:
        assert isinstance(batch.inputs, Tensor)
        inputs = batch.inputs.clone()
        for sequence in inputs:
            rng = generator(seed, number)
            count = max(1, round(rate * lengths[number]))
            change(sequence, torch.randperm(lengths[number], generator=rng)[:count], rng)
            number += 1
        found.append(Batch(inputs, batch.targets))
    return found


def _named(whole: list[Batch], hidden: list[Batch], counted: list[Tensor] | None, name: str) -> Corrupted:
    """Both as Batches, and which positions count."""
    masks = [None] * len(whole) if counted is None else [None if bool(m.all()) else m for m in counted]
    return Corrupted(Batches(whole, name=name), Batches(hidden, name=name), tuple(masks))


FEATURES = "features"
"""The task of a model whose outputs are its last hidden states."""
NOTE = (
    "the model has no head, so the loss is that of denoising: the mean squared error of its last hidden "
    f"states on inputs with {RATE:.0%} hidden, against its own on the whole inputs, which are held fixed. It "
    "is not the loss that the model was trained with; the GGN is 2/N Jᵀ J, the geometry of its features, "
    "and parameters behind the last hidden states (a pooler) have no curvature"
)


class Reader(Protocol):
    """Interface of a model that reads tokens; `cs.Model` has it."""

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def evaluate(self, inputs: Inputs) -> Tensor:
        """The outputs, in eval mode and without derivatives."""
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
    """Corrupted inputs x̃ with the targets f(x; θ₀), the model's outputs on the whole inputs x.

    With the squared error this is L(θ) = 1/N Σ ‖f(x̃; θ) − f(x; θ₀)‖², N the number of entries of the hidden
    states, at θ = θ₀: targets are numbers and do not move with θ. An encoder's tokens are hidden by the mask
    token, as in `cs.masked_lm_data`; a causal model's are replaced by others, drawn from the vocabulary; a
    vision model's patches become gray. Every token counts, those at padding do not.

    Example:
        >>> model = cs.load("all-MiniLM-L6-v2")
        >>> problem = cs.Problem(model, cs.denoising_data("sample", model, tokens=512), loss="mse_mean")

    Args:
        source: A corpus, a file, a folder, or "hf:NAME"; a vision model sees
            the images of `images:FOLDER`, and digits for every other source.
        model: A `cs.Model` with a tokenizer, or one of images.
        tokens: Of the text, as in `cs.text_data` and `cs.masked_lm_data`; of images ⌈tokens / seq_len⌉.
        rate: The share that is hidden, at least one token or patch of every sequence.
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
    """Return True if a model takes images; a zoo model has the fact image_size also where it reads tokens."""
    return "image_size" in model.facts and model.facts.get("inputs", "patches") == "patches"


def _with_targets(model: Reader, pair: Corrupted) -> Batches:
    """The corrupted inputs with the outputs on the whole ones, and no weight at padding."""
    found = []
    for hidden, whole, counted in zip(pair.hidden, pair.whole, pair.counted, strict=True):
        targets = model.evaluate(whole.inputs).cpu()  # where batches are kept
        found.append(Batch(hidden.inputs, targets, None if counted is None else counted.to(targets.dtype)))
    return Batches(found, name=pair.hidden.name)

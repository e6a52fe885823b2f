"""A loss for models without a head: how far their hidden states move when a part of the input is hidden."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.data.batches import Batch, Batches, Inputs
from curvescope.data.corpora import MAX_BYTES
from curvescope.data.corrupted.corruption import RATE, Corrupted, hidden_patches, masked_text, replaced_text
from curvescope.data.labels import num_sequences

FEATURES = "features"
"""The task of a model whose outputs are its last hidden states."""
NOTE = (
    "the model has no head, so the loss is that of denoising: the mean squared error of its last hidden "
    f"states on inputs with {RATE:.0%} hidden, against its own on the whole inputs, which are held fixed. It "
    "is not the loss that the model was trained with; the GGN is 2/N Jᵀ J, the geometry of its features, "
    "and parameters behind the last hidden states (a pooler) have no curvature"
)


class Reader(Protocol):
    """What is asked of a model: `cs.Model` is one."""

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
        source: A corpus, a file, a folder, or "hf:NAME"; not used by a vision model, which sees digits.
        model: A `cs.Model` with a tokenizer, or one of images.
        tokens: Of the text, as in `cs.text_data` and `cs.masked_lm_data`; of images ⌈tokens / seq_len⌉.
        rate: The share that is hidden, at least one token or patch of every sequence.
    """
    if not callable(getattr(model, "evaluate", None)):
        raise UsageError(f"expected a cs.Model, got {type(model).__name__}", hint="cs.load(model) makes one")
    cut: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "rate": rate}
    if sees(model):
        return _with_targets(model, hidden_patches(model, num_sequences(tokens, seq_len), **cut))
    cut |= {"tokens": tokens, "seq_len": seq_len, "max_bytes": max_bytes}
    corrupt = replaced_text if model.facts.get("causal", True) else masked_text
    return _with_targets(model, corrupt(source, model, **cut))


def sees(model: Reader) -> bool:
    """Whether a model takes images; a zoo model has the fact image_size also where it reads tokens."""
    return "image_size" in model.facts and model.facts.get("inputs", "patches") == "patches"


def _with_targets(model: Reader, pair: Corrupted) -> Batches:
    """The corrupted inputs with the outputs on the whole ones, and no weight at padding."""
    found = []
    for hidden, whole, counted in zip(pair.hidden, pair.whole, pair.counted, strict=True):
        targets = model.evaluate(whole.inputs).cpu()  # where batches are kept
        found.append(Batch(hidden.inputs, targets, None if counted is None else counted.to(targets.dtype)))
    return Batches(found, name=pair.hidden.name)

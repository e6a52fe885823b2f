"""Classification batches: texts with labels, and labeled images at a model's size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
from curvescope.data.corpora import MAX_BYTES, read_source
from curvescope.data.image_folders import read_image_folder
from curvescope.data.masking import body_length, padded, special_tokens, tokenizer_of

DIGITS = "digits"


def classification_data(
    texts: Sequence[str], labels: Sequence[int], model: Any, *, seq_len: int = 64, batch_size: int = 8
) -> Batches:
    """One class per text: inputs {"input_ids", "attention_mask"} (B, T), targets (B,).

    A text is cut to `seq_len` tokens, the tokenizer's first and last one included, and T is the length of the
    longest; shorter ones are padded, with an attention mask of 0 there.

    Example:
        >>> model = cs.load("distilbert-base-uncased-finetuned-sst-2-english")
        >>> batches = cs.classification_data(["a fine film", "a waste of time"], [1, 0], model)
        >>> cs.Hessian(cs.Problem(model, batches)).block("W_class")

    Args:
        model: A tokenizer, or a model with one as `.tokenizer`.
    """
    if len(texts) != len(labels) or not texts:
        raise UsageError(f"expected as many labels as texts, got {len(texts)} texts and {len(labels)} labels")
    special, tokenizer = special_tokens(model), tokenizer_of(model)
    length = body_length(model, seq_len, special)
    bodies = [tokenizer.encode(text)[:length] for text in texts]
    longest = max(len(body) for body in bodies) + special.num_frame
    if longest == 0:
        raise UsageError("expected texts that have tokens, got only empty ones")
    inputs = padded(bodies, special, longest)
    return Batches.from_tensors(
        inputs, torch.tensor(labels, dtype=torch.int64), batch_size=batch_size, name="labeled texts"
    )


def read_labeled(source: str | Path, *, max_bytes: int | None = MAX_BYTES) -> tuple[list[str], list[int]]:
    """Read texts and labels from lines `LABEL<tab>TEXT`, LABEL a whole number; empty lines are skipped."""
    texts, labels = [], []
    for number, line in enumerate(read_source(source, max_bytes=max_bytes).splitlines(), start=1):
        if not line.strip():
            continue
        label, tab, content = line.partition("\t")
        if not tab or not label.strip().isdecimal():
            raise UsageError(
                f"expected lines of a label, a tab and a text in {str(source)!r}, but line {number} is not "
                f"one",
                hint="such as 1<tab>a fine film",
            )
        texts.append(content)
        labels.append(int(label))
    if not texts:
        raise UsageError(f"expected lines of a label, a tab and a text in {str(source)!r}, found none")
    return texts, labels


def sample(num_items: int, count: int, *, seed: int) -> list[int]:
    """Return the first `count` entries of a randperm with `seed`, so that more extend a smaller sample."""
    return torch.randperm(num_items, generator=generator(seed))[:count].tolist()


def image_data(
    model: Any, num: int, seed: int = 0, *, batch_size: int = 8, source: str | Path = DIGITS
) -> Batches:
    """Labeled images for a vision model: images (B, C, S, S) with C and S the model's, classes (B,).

    Values lie in [−1, 1], and images are resized by linear interpolation. A randperm with `seed` selects
    `num` images. If the model has fewer classes than the images, only images of its classes are used.

    Example:
        >>> model = cs.load("google/vit-base-patch16-224")
        >>> problem = cs.Problem(model, cs.image_data(model, 32, batch_size=4))
        >>> own = cs.image_data(model, 32, source="images:photos")  # photos/cat/1.png, photos/dog/2.png, …

    Args:
        model: A model with `.facts`: image_size, and if known channels (else 1) and n_classes (else 10).
        source: "digits", scikit-learn's 8 × 8 gray images, the same in every channel; or a folder of images,
            also as `images:FOLDER`: idx files, a folder per class, CIFAR's .bin files or a saved dataset.
    """
    facts: Mapping[str, Any] = getattr(model, "facts", {})
    size = fact(facts, "image_size")
    if size is None:
        raise UsageError(
            "images need a model with image_size among its facts, but this model has none",
            hint="cs.task_data('digits') has 8 × 8 images for any model",
        )
    channels = fact(facts, "channels", "num_channels") or 1
    num_classes = fact(facts, "n_classes", "num_labels", "n_out") or 10
    folder = None if source == DIGITS else read_image_folder(source)
    pixels, classes = _digits() if folder is None else (None, folder.labels)
    usable = np.flatnonzero(classes < num_classes)
    if not isinstance(num, int) or not 1 <= num <= len(usable):
        raise UsageError(f"expected a number of images from 1 to {len(usable)}, got {num!r}")
    chosen = usable[sample(len(usable), num, seed=seed)]
    if folder is not None:
        X = folder.tensor(chosen.tolist(), size=size, channels=channels) * 2 - 1
        name = folder.path.name
    else:
        assert pixels is not None
        X, name = torch.as_tensor(pixels[chosen], dtype=torch.float64).reshape(-1, 1, 8, 8) / 8 - 1, DIGITS
        if size != 8:
            X = torch.nn.functional.interpolate(X, size=(size, size), mode="bilinear", align_corners=False)
        X = X.repeat(1, channels, 1, 1)
    return Batches.from_tensors(X, torch.as_tensor(classes[chosen]), batch_size=batch_size, name=name)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return np.asarray(pixels), np.asarray(classes, dtype=np.int64)


def fact(facts: Mapping[str, Any], *names: str) -> int | None:
    """Return the first known fact; a square size may be given as a pair."""
    for name in names:
        value = facts.get(name)
        if isinstance(value, list | tuple) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
    return None


def num_sequences(tokens: int, seq_len: int) -> int:
    """Number of sequences for `tokens` tokens: ⌈tokens / seq_len⌉."""
    if tokens < 1 or seq_len < 1:
        raise UsageError(f"expected tokens and seq_len of at least 1, got {tokens} and {seq_len}")
    return math.ceil(tokens / seq_len)

"""Labeled pictures for training: scikit-learn's digits, local folders, and datasets of the Hugging Face hub.

Datasets of the hub have names (MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100) and are read through `datasets`, or
from its cache without a network. `curvescope.data.image_folders` lists the layouts of local folders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError, near_misses
from curvescope.core.requirements import how_to_install
from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
from curvescope.data.image_folders import PREFIX, read_image_folder
from curvescope.data.tasks.checks import check_choice, check_counts

Dtype = Literal["float32", "float64"]


def digits(
    *,
    num_sequences: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    dtype: Dtype = "float64",
) -> Batches:
    """Images (n, 1, 8, 8) with gray values k/16 in [0, 1], and classes (n,) from 0 to 9.

    Construction: a randperm with `seed` of scikit-learn's 1797 images (`load_digits`); the first
    `num_sequences` of it (None: all), so that more images extend a smaller choice.
    """
    from sklearn.datasets import load_digits

    check_choice("dtype", dtype, get_args(Dtype))
    images, classes = load_digits(return_X_y=True)
    num_sequences = len(images) if num_sequences is None else num_sequences
    check_counts(num_sequences=num_sequences)
    if num_sequences > len(images):
        raise UsageError(f"expected num_sequences of at most {len(images)}, got {num_sequences}")
    chosen = torch.randperm(len(images), generator=generator(seed))[:num_sequences]
    X = torch.as_tensor(images, dtype=getattr(torch, dtype)).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(classes, dtype=torch.int64)
    return Batches.from_tensors(X[chosen], y[chosen], batch_size=batch_size, name="digits")


class Source(NamedTuple):
    """A dataset of the Hugging Face hub: its name, its columns, and its number of classes."""

    hub: str
    image: str
    label: str
    num_classes: int


HUB = {
    "mnist": Source("ylecun/mnist", "image", "label", 10),
    "fashion-mnist": Source("zalando-datasets/fashion_mnist", "image", "label", 10),
    "cifar10": Source("uoft-cs/cifar10", "img", "label", 10),
    "cifar100": Source("uoft-cs/cifar100", "img", "fine_label", 100),
}
PICTURES = ("digits", *HUB)
"""Names of all pictures."""


class Pictures(NamedTuple):
    """Images (n, channels, size, size) in [0, 1] and classes (n,), for training and validation."""

    images: Tensor
    classes: Tensor
    validation_images: Tensor
    validation_classes: Tensor
    num_classes: int


def check_pictures(name: str) -> None:
    """Raise unless there are pictures with this name; reading them may still fail."""
    if name not in PICTURES and not _folder(name).is_dir():
        raise UsageError(
            f"expected the name of pictures, or a folder of images, got {name!r}",
            hint=near_misses(name, [*PICTURES]),
        )


def _folder(name: str) -> Path:
    return Path(name.removeprefix(PREFIX)).expanduser()


def pictures(name: str, *, num: int | None = None, validation: float = 0.2, seed: int = 0) -> Pictures:
    """Read pictures in float64, and split a randperm with `seed` of them in two.

    Args:
        name: One of PICTURES, a folder, or `images:FOLDER`.
        num: Number of pictures; None: all. They are training images: from the hub the first `num`, from a
            folder a random choice.
        validation: Share of the pictures for validation, the last ones of the permutation.
    """
    check_pictures(name)
    stored = _digits() if name == "digits" else _from_hub(name, num) if name in HUB else _from_folder(name)
    total = len(stored.classes) if num is None else num
    num_validation = round(validation * total)
    if not 2 <= total <= len(stored.classes) or not 1 <= num_validation < total:
        raise UsageError(
            f"expected from 2 to {len(stored.classes)} pictures, some of them to validate, "
            f"got {total} and {num_validation} of them"
        )
    chosen = torch.randperm(len(stored.classes), generator=generator(seed))[:total]
    X, y = stored.images(chosen), stored.classes[chosen]
    if X.shape[2] != X.shape[3]:
        raise UsageError(f"expected square pictures in {name!r}, got {X.shape[2]} × {X.shape[3]}")
    num_training = total - num_validation
    return Pictures(
        X[:num_training], y[:num_training], X[num_training:], y[num_training:], stored.num_classes
    )


class _Stored(NamedTuple):
    """All pictures of a source: classes (n,), and a function that reads images by number."""

    images: Callable[[Tensor], Tensor]
    classes: Tensor
    num_classes: int


def _digits() -> _Stored:
    batch = digits()[0]
    assert isinstance(batch.inputs, Tensor)
    assert isinstance(batch.targets, Tensor)
    return _Stored(batch.inputs.__getitem__, batch.targets, 10)


def _from_folder(name: str) -> _Stored:
    folder = read_image_folder(name)

    def images(places: Tensor) -> Tensor:
        return folder.tensor(places.tolist())

    return _Stored(images, torch.as_tensor(folder.labels), folder.num_classes)


def _from_hub(name: str, num: int | None) -> _Stored:
    """Read all images of the split `train`, or the first `num`."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra(
            f"the pictures {name!r} need the package datasets", hint=how_to_install("datasets")
        ) from None
    source = HUB[name]
    try:
        rows = datasets.load_dataset(source.hub, split="train" if num is None else f"train[:{num}]")
        X = np.stack([np.asarray(image, dtype=np.float64) for image in rows[source.image]]) / 255
        y = np.asarray(rows[source.label], dtype=np.int64)
    except Exception as problem:  # raised by the network, the hub or the dataset's own reader
        reason = str(problem).split("\n", 1)[0][:200] or type(problem).__name__
        raise CurvescopeError(
            f"could not read the pictures {name!r}: {reason}",
            hint="check the network, give a folder as images:FOLDER, or take digits, which need neither",
        ) from problem
    X = torch.as_tensor(np.ascontiguousarray(X[:, None] if X.ndim == 3 else X.transpose(0, 3, 1, 2)))
    return _Stored(X.__getitem__, torch.as_tensor(y), source.num_classes)

"""Labeled pictures to train on: scikit-learn's digits, and others through the package `datasets`.

Those are known by name (MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100: read from the hub, or from its cache where
there is no network), or lie in a folder that `Dataset.save_to_disk` wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError, near_misses
from curvescope.core.requirements import how_to_install
from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
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
    """A dataset of the Hugging Face hub: its name, its columns, and how many classes it has."""

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
"""Names of all of them."""
IMAGES, LABELS = ("image", "img"), ("label", "fine_label")  # columns of a folder, the first that is there


class Pictures(NamedTuple):
    """Images (n, channels, size, size) with values in [0, 1], classes (n,); to train on and to validate."""

    images: Tensor
    classes: Tensor
    validation_images: Tensor
    validation_classes: Tensor
    num_classes: int


def check_pictures(name: str) -> None:
    """Raise unless there are pictures of that name; whether they can be read is seen when they are."""
    if name not in PICTURES and not Path(name).is_dir():
        raise UsageError(
            f"expected the name of pictures, or a folder that the package datasets saved, got {name!r}",
            hint=near_misses(name, [*PICTURES]),
        )


def pictures(name: str, *, num: int | None = None, validation: float = 0.2, seed: int = 0) -> Pictures:
    """The pictures of that name in float64, a randperm with `seed` of them cut in two.

    Args:
        name: one of PICTURES, or a folder that `datasets` saved.
        num: how many in all; None: all that there are. The split `train` of a dataset is read.
        validation: the share of them that is held out, the last ones of the permutation.
    """
    check_pictures(name)
    X, y, num_classes = _digits() if name == "digits" else _read(name, num)
    total = len(y) if num is None else num
    held = round(validation * total)
    if not 2 <= total <= len(y) or not 1 <= held < total:
        raise UsageError(
            f"expected from 2 to {len(y)} pictures, some of them to validate, got {total} and {held} of them"
        )
    chosen = torch.randperm(len(y), generator=generator(seed))[:total]
    own, other = chosen[: total - held], chosen[total - held :]
    return Pictures(X[own], y[own], X[other], y[other], num_classes)


def _digits() -> tuple[Tensor, Tensor, int]:
    everything = digits()[0]
    assert isinstance(everything.inputs, Tensor)
    assert isinstance(everything.targets, Tensor)
    return everything.inputs, everything.targets, 10


def _read(name: str, num: int | None) -> tuple[Tensor, Tensor, int]:
    """All images of the split `train`, or the first ones where only `num` are wanted."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra(
            f"the pictures {name!r} need the package datasets", hint=how_to_install("datasets")
        ) from None
    read: Callable[[Any, str, int | None], _Rows] = _from_hub if name in HUB else _from_folder
    try:
        found = read(datasets, name, num)
        X = np.stack([np.asarray(image, dtype=np.float64) for image in found.images]) / 255
        y = np.asarray(found.labels, dtype=np.int64)
    except Exception as problem:  # whatever the network, the hub or the dataset's own reader raise
        reason = str(problem).split("\n", 1)[0][:200] or type(problem).__name__
        raise CurvescopeError(
            f"could not read the pictures {name!r}: {reason}",
            hint="check the network, or take digits, which need none",
        ) from problem
    X = X[:, None] if X.ndim == 3 else X.transpose(0, 3, 1, 2)
    return torch.as_tensor(np.ascontiguousarray(X)), torch.as_tensor(y), found.num_classes


class _Rows(NamedTuple):
    """Columns of a dataset as it gives them."""

    images: Any
    labels: Any
    num_classes: int


def _from_hub(datasets: Any, name: str, num: int | None) -> _Rows:
    source = HUB[name]
    rows = datasets.load_dataset(source.hub, split="train" if num is None else f"train[:{num}]")
    return _Rows(rows[source.image], rows[source.label], source.num_classes)


def _from_folder(datasets: Any, name: str, num: int | None) -> _Rows:
    """Its split `train` where it has splits; columns by their usual names."""
    rows = datasets.load_from_disk(name)
    rows = rows["train"] if isinstance(rows, dict) else rows
    image, label = (next(c for c in names if c in rows.column_names) for names in (IMAGES, LABELS))
    classes = getattr(rows.features[label], "num_classes", None) or max(rows[label]) + 1
    rows = rows if num is None else rows.select(range(min(num, len(rows))))
    return _Rows(rows[image], rows[label], classes)

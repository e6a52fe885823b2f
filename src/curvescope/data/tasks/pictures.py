"""Labelled pictures to train on: scikit-learn's digits, and MNIST and CIFAR-100 through `datasets`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError, near_misses
from curvescope.core.seeds import generator
from curvescope.data.tasks.digits import digits


class Source(NamedTuple):
    """A dataset of the Hugging Face hub: its name, its columns, and how many classes it has."""

    hub: str
    image: str
    label: str
    num_classes: int


HUB = {
    "mnist": Source("ylecun/mnist", "image", "label", 10),
    "cifar100": Source("uoft-cs/cifar100", "img", "fine_label", 100),
}
PICTURES = ("digits", *HUB)
"""Names of all of them."""


class Pictures(NamedTuple):
    """Images (n, channels, size, size) with values in [0, 1], classes (n,); to train on and to validate."""

    images: Tensor
    classes: Tensor
    validation_images: Tensor
    validation_classes: Tensor
    num_classes: int


def pictures(name: str, *, num: int | None = None, validation: float = 0.2, seed: int = 0) -> Pictures:
    """The pictures of that name in float64, a randperm with `seed` of them cut in two.

    Args:
        num: how many in all; None: all that there are. The split `train` of a hub dataset is read.
        validation: the share of them that is held out, the last ones of the permutation.
    """
    if name not in PICTURES:
        raise UsageError(f"expected the name of pictures, got {name!r}", hint=near_misses(name, [*PICTURES]))
    X, y, num_classes = _digits() if name == "digits" else _from_hub(name, HUB[name], num)
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


def _from_hub(name: str, source: Source, num: int | None) -> tuple[Tensor, Tensor, int]:
    """All images of the split `train`, or the first ones where only `num` are wanted."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra(
            f"the pictures {name!r} need the package datasets", hint="pip install 'curvescope[hf]'"
        ) from None
    try:
        rows: Any = datasets.load_dataset(source.hub, split="train" if num is None else f"train[:{num}]")
        X = np.stack([np.asarray(image, dtype=np.float64) for image in rows[source.image]]) / 255
        y = np.asarray(rows[source.label], dtype=np.int64)
    except Exception as problem:  # whatever the network, the hub or the dataset's own reader raise
        reason = str(problem).split("\n", 1)[0][:200] or type(problem).__name__
        raise CurvescopeError(
            f"could not read the pictures {name!r} ({source.hub}): {reason}",
            hint="check the network, or take data=digits, which needs none",
        ) from problem
    X = X[:, None] if X.ndim == 3 else X.transpose(0, 3, 1, 2)
    return torch.as_tensor(np.ascontiguousarray(X)), torch.as_tensor(y), source.num_classes

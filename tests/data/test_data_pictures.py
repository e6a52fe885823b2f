"""Pictures from a folder that the package `datasets` saved: values, classes, splits, what cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.data.tasks.pictures import pictures

COUNT, CLASSES = 10, 3


def saved(place: Path, *, split: bool) -> str:
    """Images of 6 × 6 × 3 whose gray value is 25 times their number, as PNG files inside."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"img": datasets.Image(), "fine_label": datasets.ClassLabel(num_classes=CLASSES)}
    )
    rows = {
        "img": [np.full((6, 6, 3), 25 * i, np.uint8) for i in range(COUNT)],
        "fine_label": [i % CLASSES for i in range(COUNT)],
    }
    found = datasets.Dataset.from_dict(rows, features=features)
    (datasets.DatasetDict({"train": found}) if split else found).save_to_disk(str(place))
    return str(place)


@pytest.mark.parametrize("split", [False, True])
def test_a_folder_that_datasets_saved(tmp_path: Path, split: bool):
    name = saved(tmp_path / "own", split=split)
    found = pictures(name, validation=0.2)
    assert found.images.shape == (8, 3, 6, 6)
    assert found.validation_images.shape == (2, 3, 6, 6)
    assert found.num_classes == CLASSES
    X, y = (torch.cat(pair) for pair in zip(found[:2], found[2:4], strict=True))
    number = (X[:, 0, 0, 0] * 255 / 25).round().long()
    assert sorted(number.tolist()) == list(range(COUNT))
    torch.testing.assert_close(y, number % CLASSES)
    assert len(pictures(name, num=5).classes) == 4


def test_a_folder_that_is_none(tmp_path: Path):
    pytest.importorskip("datasets")
    with pytest.raises(CurvescopeError, match="could not read the pictures"):
        pictures(str(tmp_path))
    with pytest.raises(UsageError, match="got 'mnits'"):
        pictures("mnits")

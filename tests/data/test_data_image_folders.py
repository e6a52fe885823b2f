"""Local folders of images: every layout gives the same images and labels, and damaged files are named."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import curvescope as cs
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.data.image_folders import read_image_folder
from curvescope.data.labels import image_data
from curvescope.data.tasks.pictures import pictures
from curvescope.studies.problem_config import ModelOnData, make_problem

COUNT, CLASSES = 12, 3
rng = np.random.default_rng(0)
COLORED = rng.integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)
GRAY = COLORED[..., :1]
LABELS = np.arange(COUNT) % CLASSES


def idx(values: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
        + values.astype(np.uint8).tobytes()
    )


def write_idx(folder: Path) -> np.ndarray:
    for part, count in (("train", COUNT), ("t10k", 2)):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(GRAY[:count, ..., 0]))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(LABELS[:count]))
    return GRAY


def write_zipped_idx(folder: Path) -> np.ndarray:
    inner = folder / "MNIST" / "raw"
    inner.mkdir(parents=True)
    (inner / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(GRAY[..., 0])))
    (inner / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS)))
    return GRAY


def write_classes(folder: Path, images: np.ndarray = COLORED) -> np.ndarray:
    for i, (image, label) in enumerate(zip(images, LABELS, strict=True)):
        place = folder / f"class{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze()).save(place / f"{i:02}.png")
    return images


def write_split_classes(folder: Path) -> np.ndarray:
    write_classes(folder / "test", 255 - GRAY)
    return write_classes(folder / "train", GRAY)


def write_cifar10(folder: Path) -> np.ndarray:
    rows = [
        np.concatenate([[label], image.transpose(2, 0, 1).ravel()])
        for image, label in zip(COLORED, LABELS, strict=True)
    ]
    rows = np.stack(rows).astype(np.uint8)
    for number, part in enumerate(np.split(rows, 2), start=1):
        part.tofile(folder / f"data_batch_{number}.bin")
    rows[::-1].tofile(folder / "test_batch.bin")
    return COLORED


def write_cifar100(folder: Path) -> np.ndarray:
    rows = [
        np.concatenate([[0, label], image.transpose(2, 0, 1).ravel()])
        for image, label in zip(COLORED, LABELS, strict=True)
    ]
    np.stack(rows).astype(np.uint8).tofile(folder / "train.bin")
    return COLORED


def write_strips(folder: Path) -> np.ndarray:
    for number, part in enumerate(np.split(COLORED, 2), start=1):
        Image.fromarray(part.reshape(len(part), -1, 3)).save(folder / f"data_batch_{number}.png")
    Image.fromarray(COLORED[:2].reshape(2, -1, 3)).save(folder / "test_batch.png")
    (folder / "train_labels.json").write_text(json.dumps(LABELS.tolist()))
    (folder / "test_labels.json").write_text("[0, 1]")
    (folder / "package.json").write_text("{}")
    return COLORED


def write_saved_dataset(folder: Path) -> np.ndarray:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=CLASSES)}
    )
    rows = {"image": list(COLORED), "label": LABELS.tolist()}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder))
    return COLORED


WRITERS: list[Callable[[Path], np.ndarray]] = [
    write_idx,
    write_zipped_idx,
    write_classes,
    write_split_classes,
    write_cifar10,
    write_cifar100,
    write_strips,
    write_saved_dataset,
]


@pytest.fixture(params=WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, np.ndarray]:
    return tmp_path, request.param(tmp_path)


def test_every_layout_gives_the_training_images_with_their_labels(layout):
    folder, images = layout
    found = read_image_folder(f"images:{folder}")
    assert len(found) == COUNT
    values = found.tensor(range(COUNT))
    matched = [
        int(np.flatnonzero([np.array_equal(v.movedim(0, -1), image / 255) for image in images])[0])
        for v in values
    ]
    assert sorted(matched) == list(range(COUNT))
    np.testing.assert_array_equal(found.labels, LABELS[matched])


def test_pictures_and_image_data_read_every_layout(layout):
    folder, images = layout
    found = pictures(f"images:{folder}", num=10, validation=0.3)
    assert found.images.shape == (7, images.shape[-1], 32, 32)
    assert found.validation_images.shape == (3, images.shape[-1], 32, 32)
    model = SimpleNamespace(facts={"image_size": 16, "channels": 3, "n_classes": 2})
    data = image_data(model, 5, source=f"images:{folder}", batch_size=5)
    assert data[0].inputs.shape == (5, 3, 16, 16)  # pyright: ignore[reportAttributeAccessIssue]
    assert data[0].inputs.abs().max() <= 1  # pyright: ignore[reportAttributeAccessIssue]
    assert set(data[0].targets.tolist()) <= {0, 1}
    with pytest.raises(UsageError, match="got 9"):
        image_data(model, 9, source=str(folder))


def test_colors_become_gray_by_their_mean_and_gray_images_repeat(tmp_path: Path):
    write_classes(tmp_path / "colored")
    write_classes(tmp_path / "gray", GRAY)
    colored, gray = (read_image_folder(tmp_path / name) for name in ("colored", "gray"))
    torch.testing.assert_close(colored.tensor([3], channels=1), colored.tensor([3]).mean(1, keepdim=True))
    torch.testing.assert_close(gray.tensor([3], channels=3), gray.tensor([3]).expand(-1, 3, -1, -1))


def test_folders_named_by_numbers_are_classes_in_numerical_order(tmp_path: Path):
    for label in (10, 9, 2):
        (tmp_path / str(label)).mkdir()
        Image.fromarray(np.full((4, 4), label, np.uint8)).save(tmp_path / str(label) / "a.png")
    found = read_image_folder(tmp_path)
    assert found.labels.tolist() == [0, 1, 2]
    assert (found.tensor(range(3))[:, 0, 0, 0] * 255).round().tolist() == [2, 9, 10]


def test_images_of_several_sizes_need_a_model_that_has_one(tmp_path: Path):
    for label, size in enumerate((4, 6)):
        (tmp_path / str(label)).mkdir()
        Image.fromarray(np.full((size, size), 255, np.uint8)).save(tmp_path / str(label) / "a.png")
    with pytest.raises(ShapeError, match="got 4 × 4 and 6 × 6"):
        pictures(str(tmp_path), validation=0.5)
    data = image_data(SimpleNamespace(facts={"image_size": 8}), 2, source=tmp_path)
    torch.testing.assert_close(data[0].inputs, torch.ones(2, 1, 8, 8, dtype=torch.float64))


def test_a_damaged_or_empty_folder_is_refused_by_what_is_wrong(tmp_path: Path):
    with pytest.raises(CurvescopeError, match="found none"):
        read_image_folder(tmp_path)
    with pytest.raises(UsageError, match="folder of images"):
        read_image_folder(tmp_path / "missing")
    write_idx(tmp_path)
    images = tmp_path / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-7])
    with pytest.raises(CurvescopeError, match=f"got {COUNT * 1024 - 7}"):
        read_image_folder(tmp_path)
    images.write_bytes(b"\x1f" + whole[1:])
    with pytest.raises(CurvescopeError, match="begins 1f000803"):
        read_image_folder(tmp_path)
    images.write_bytes(idx(GRAY[:5, ..., 0]))
    with pytest.raises(CurvescopeError, match="5 images and 12 labels"):
        read_image_folder(tmp_path)


def test_a_text_in_place_of_an_image_is_refused(tmp_path: Path):
    write_classes(tmp_path)
    (tmp_path / "class0" / "00.png").write_text("no image")
    with pytest.raises(CurvescopeError, match=r"00\.png"):
        read_image_folder(tmp_path).tensor(range(COUNT))


def zoo_vit() -> cs.Model:
    config = cs.TransformerConfig(
        n_layers=1, d_model=8, n_heads=2, d_ff=8, n_ctx=16, inputs="patches", outputs="class", n_out=CLASSES,
        image_size=16, patch_size=4, channels=1, causal=False,
    )  # fmt: skip
    return cs.load(cs.Transformer(config))


def test_a_study_takes_a_folder_as_its_data(tmp_path: Path):
    write_idx(tmp_path)
    settings = ModelOnData(data=f"images:{tmp_path}", tokens=4, seq_len=1, batch_size=2)
    problem = make_problem(settings, zoo_vit())
    assert [batch.inputs.shape for batch in problem.batches] == [(2, 1, 16, 16)] * 2  # pyright: ignore[reportAttributeAccessIssue]
    expected = image_data(zoo_vit(), 4, source=tmp_path)
    whole = torch.cat([batch.inputs for batch in problem.batches])  # pyright: ignore[reportArgumentType, reportCallIssue]
    torch.testing.assert_close(whole, expected[0].inputs)


def test_a_model_of_text_refuses_a_folder_of_images(tmp_path: Path):
    write_idx(tmp_path)
    with pytest.raises(UsageError, match="images:"):
        make_problem(ModelOnData(data=f"images:{tmp_path}"))

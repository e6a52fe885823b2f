"""Labeled images from a local folder, in several common layouts.

- idx files, as MNIST is published: `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, plain or `.gz`.
- One folder per class: `cat/1.png`, `dog/2.png`, or the same below `train/`.
- The binary version of CIFAR-10 (`data_batch_1.bin`, …) and CIFAR-100 (`train.bin`).
- Strips: `data_batch_1.png`, … with one square image per row, and one JSON list of labels.
- A dataset written by `datasets.Dataset.save_to_disk`; this layout needs the package datasets.

Only training images are read, no test set. No file is unpickled.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, MissingExtra, ShapeError, UsageError
from curvescope.core.requirements import how_to_install

PREFIX = "images:"
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
TRAIN, TEST = ("train", "training"), ("test", "t10k", "val", "valid", "validation")
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "fine_label")
MAX_DEPTH = 3  # levels of subfolders to search, for example MNIST/raw/… of torchvision
LAYOUTS = (
    "idx files (train-images-idx3-ubyte), one folder of images per class, CIFAR's .bin files, strips of "
    "images with a JSON list of labels, or what datasets' save_to_disk wrote"
)


@dataclass(frozen=True)
class ImageFolder:
    """Labels of all images of a folder, and a function that reads images by number.

    `read` returns one uint8 array per image, shape (height, width, channels) with one or three channels.
    """

    path: Path
    labels: np.ndarray  # (n,) whole numbers from 0
    num_classes: int
    read: Callable[[Sequence[int]], list[np.ndarray]]

    def __len__(self) -> int:
        return len(self.labels)

    def tensor(
        self, places: Sequence[int], *, size: int | None = None, channels: int | None = None
    ) -> Tensor:
        """Images in float64 with values in [0, 1], shape (n, channels, height, width).

        Args:
            places: Numbers of the images.
            size: Resize to size × size by linear interpolation, with smoothing if images shrink.
            channels: 1 takes the mean over colors, another number repeats gray images. None keeps the
                channels of the images, and repeats gray images if there are also colored ones.
        """
        images = [torch.tensor(np.ascontiguousarray(image)) for image in self.read(places)]
        num_channels = channels or max(image.shape[-1] for image in images)
        scaled = [_with_channels(image.movedim(-1, 0).double() / 255, num_channels) for image in images]
        if size is not None:
            scaled = [_resized(image, size) for image in scaled]
        shapes = {tuple(image.shape[1:]) for image in scaled}
        if len(shapes) > 1:
            (h1, w1), (h2, w2), *_ = sorted(shapes)
            raise ShapeError(
                f"expected images of one size in {str(self.path)!r}, got {h1} × {w1} and {h2} × {w2}",
                hint="resize them, or use a model that knows its image_size",
            )
        return torch.stack(scaled)


def read_image_folder(source: str | Path) -> ImageFolder:
    """Find the labeled training images of a folder, without reading the images.

    Args:
        source: A folder, or `images:FOLDER`.
    """
    path = Path(str(source).removeprefix(PREFIX)).expanduser()
    if not path.is_dir():
        raise UsageError(f"expected a folder of images, got {str(path)!r}", hint="images:FOLDER names one")
    for find in (_saved_dataset, _idx, _cifar, _strips, _class_folders):
        try:
            found = find(path)
        except CurvescopeError:
            raise
        except Exception as problem:  # readers raise different errors for a damaged file
            raise CurvescopeError(
                f"could not read the pictures in {str(path)!r}: {_first_line(problem)}",
                hint=f"expected {LAYOUTS}",
            ) from problem
        if found is not None:
            return _checked(found)
    raise CurvescopeError(
        f"could not read the pictures in {str(path)!r}: found none", hint=f"expected {LAYOUTS}"
    )


def _checked(folder: ImageFolder) -> ImageFolder:
    labels = folder.labels
    if not len(labels):
        raise CurvescopeError(f"could not read the pictures in {str(folder.path)!r}: there are none")
    if labels.min() < 0 or labels.max() >= folder.num_classes:
        raise CurvescopeError(
            f"expected labels from 0 to {folder.num_classes - 1} in {str(folder.path)!r}, "
            f"got {labels.min()} to {labels.max()}"
        )
    return folder


def _from_array(
    path: Path, images: np.ndarray, labels: np.ndarray, num_classes: int | None = None
) -> ImageFolder:
    """Make a folder of images in memory, or mapped from a file: (n, height, width, channels)."""
    if len(images) != len(labels):
        raise CurvescopeError(
            f"expected as many labels as images in {str(path)!r}, "
            f"got {len(images)} images and {len(labels)} labels"
        )
    labels = labels.astype(np.int64)
    classes = num_classes if num_classes is not None else int(labels.max(initial=-1)) + 1
    return ImageFolder(path, labels, classes, lambda places: [images[i] for i in places])


# ---------------------------------------------------------------------------------------------- idx


def _idx(path: Path) -> ImageFolder | None:
    """Images and labels of idx files, preferably of the training set."""
    images = _training(_files(path, "*images*idx3-ubyte*"))
    labels = _training(_files(path, "*labels*idx1-ubyte*"))
    if not images or not labels:
        return None
    return _from_array(path, _read_idx(images[0], 3)[..., None], _read_idx(labels[0], 1))


def _read_idx(file: Path, num_axes: int) -> np.ndarray:
    """Read an idx file: two zeros, the type 8 for bytes, the number of axes, sizes, entries."""
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    if content[:4] != bytes([0, 0, 8, num_axes]):
        raise CurvescopeError(
            f"expected an idx file of bytes with {num_axes} axes, "
            f"got {file.name} that begins {content[:4].hex()}"
        )
    start = 4 + 4 * num_axes
    shape = [int(size) for size in np.frombuffer(content[4:start], dtype=">i4")]
    if len(content) - start != math.prod(shape):
        raise CurvescopeError(
            f"expected {math.prod(shape)} bytes after the sizes in {file.name}, got {len(content) - start}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


# ---------------------------------------------------------------------------------------------- CIFAR

CIFAR_PIXELS = 3 * 32 * 32


def _cifar(path: Path) -> ImageFolder | None:
    """CIFAR's records: one label byte (CIFAR-100: coarse, then fine), then 32 × 32 red, green, blue."""
    files, num_labels, classes = _training(_files(path, "data_batch_*.bin")), 1, 10
    if not files:
        files, num_labels, classes = _files(path, "train.bin"), 2, 100
    if not files:
        return None
    length = num_labels + CIFAR_PIXELS
    records = []
    for file in files:
        content = np.fromfile(file, dtype=np.uint8)
        if not len(content) or len(content) % length:
            raise CurvescopeError(
                f"expected records of {length} bytes in {file.name}, got {len(content)} bytes in all"
            )
        records.append(content.reshape(-1, length))
    rows = np.concatenate(records)
    images = rows[:, num_labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return _from_array(path, images, rows[:, num_labels - 1], classes)


# ---------------------------------------------------------------------------------------------- strips


def _strips(path: Path) -> ImageFolder | None:
    """Read images whose rows of pixels are square images, and a JSON list of labels."""
    lists = [file for file in _training(_files(path, "*.json")) if _is_label_list(file)]
    strips = _training([file for file in _files(path, "*") if file.suffix.lower() in SUFFIXES])
    if not lists or not strips:
        return None
    labels = np.asarray(json.loads(lists[0].read_text(encoding="utf-8")))
    rows = [_open(file)[0] for file in strips]
    images = np.concatenate(rows)
    size = math.isqrt(images.shape[1])
    if size * size != images.shape[1]:
        raise CurvescopeError(
            f"expected one square image per row of {strips[0].name}, got rows of {images.shape[1]} pixels"
        )
    return _from_array(path, images.reshape(len(images), size, size, -1), labels)


def _is_label_list(file: Path) -> bool:
    """Return True if the file name contains "labels" and the content is a list."""
    if not any(word in file.stem.lower() for word in ("lab", "class", "target")):
        return False
    return file.read_bytes()[:64].lstrip()[:1] == b"["


def _open(*files: Path) -> list[np.ndarray]:
    """Read each file as (height, width, 1 or 3) bytes: gray images stay gray, others become RGB."""
    from PIL import Image

    images = []
    for file in files:
        try:
            with Image.open(file) as image:
                gray = image.mode in ("1", "L", "LA")
                pixels = np.asarray(image.convert("L" if gray else "RGB"))
        except OSError as problem:
            raise CurvescopeError(
                f"could not read the picture {str(file)!r}: {_first_line(problem)}"
            ) from problem
        images.append(pixels.reshape(*pixels.shape[:2], -1))
    return images


# ---------------------------------------------------------------------------------------------- classes


def _class_folders(path: Path) -> ImageFolder | None:
    """Read one folder of images per class, in the order of their names; below train/ if it exists."""
    inner = {folder.name.lower(): folder for folder in _folders(path)}
    root = next((inner[name] for name in TRAIN if name in inner), path)
    own = [folder for folder in _folders(root) if root != path or _is_class(folder)]
    classes = [(folder, files) for folder in own if (files := _images_below(folder))]
    if not classes:
        return None
    files = [file for _, own in classes for file in own]
    labels = np.repeat(np.arange(len(classes)), [len(own) for _, own in classes])
    return ImageFolder(path, labels, len(classes), lambda places: _open(*(files[i] for i in places)))


def _is_class(folder: Path) -> bool:
    return folder.name.lower() not in TEST


def _folders(path: Path) -> list[Path]:
    """Subfolders in order: by number if all names are numbers, else by name."""
    folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if all(folder.name.isdecimal() for folder in folders):
        return sorted(folders, key=lambda folder: int(folder.name))
    return sorted(folders)


def _images_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())


# ---------------------------------------------------------------------------------------------- datasets


def _saved_dataset(path: Path) -> ImageFolder | None:
    """Read a dataset on disk: its split `train` if it has splits, and columns with common names."""
    if not any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
        return None
    try:
        import datasets
    except ImportError:
        raise MissingExtra(
            f"the images in {str(path)!r} need the package datasets", hint=how_to_install("datasets")
        ) from None
    rows: Any = datasets.load_from_disk(str(path))
    rows = rows["train"] if isinstance(rows, dict) else rows
    names = rows.column_names
    image, label = (next((c for c in usual if c in names), None) for usual in (IMAGE_COLUMNS, LABEL_COLUMNS))
    if image is None or label is None:
        raise CurvescopeError(
            f"expected columns {' or '.join(IMAGE_COLUMNS)} and {' or '.join(LABEL_COLUMNS)} in "
            f"{str(path)!r}, got {', '.join(names)}"
        )
    labels = np.asarray(rows[label], dtype=np.int64)
    classes = getattr(rows.features[label], "num_classes", None) or int(labels.max()) + 1

    def read(places: Sequence[int]) -> list[np.ndarray]:
        images = [np.asarray(entry) for entry in rows.select(list(places))[image]]
        return [entry[..., None] if entry.ndim == 2 else entry[..., :3] for entry in images]

    return ImageFolder(path, labels, classes, read)


# ---------------------------------------------------------------------------------------------- helpers


def _files(path: Path, pattern: str) -> list[Path]:
    """Files of a folder and a few levels below it, sorted by level and name."""
    for depth in range(MAX_DEPTH):
        found = [f for f in path.glob("*/" * depth + pattern) if f.is_file() and not f.name.startswith(".")]
        if found:
            return sorted(found)
    return []


def _training(files: list[Path]) -> list[Path]:
    """Files whose names begin with "train", or else those that are not named after a test."""
    training = [file for file in files if file.name.lower().startswith(TRAIN)]
    return training or [file for file in files if not file.name.lower().startswith(TEST)]


def _with_channels(image: Tensor, channels: int) -> Tensor:
    if len(image) == channels:
        return image
    return image.mean(0, keepdim=True).expand(channels, -1, -1)


def _resized(image: Tensor, size: int) -> Tensor:
    if image.shape[1:] == (size, size):
        return image
    return torch.nn.functional.interpolate(
        image[None], size=(size, size), mode="bilinear", align_corners=False, antialias=True
    )[0].clamp(0, 1)


def _first_line(problem: Exception) -> str:
    return str(problem).split("\n", 1)[0][:200] or type(problem).__name__

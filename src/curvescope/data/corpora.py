"""Sources of text: named corpora, files, folders and Hugging Face datasets."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError, near_misses
from curvescope.core.requirements import how_to_install

CORPORA: dict[str, str] = {
    "sample": "a short fixed text that comes with curvescope",
    "python-stdlib": "the source of the running Python's standard library, in a fixed order of files",
}
"""Named corpora with one-line descriptions."""

MAX_BYTES = 2_000_000
"""Default limit of bytes read from a source."""

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "__pycache__",
}


def corpus_text(name: str, *, max_bytes: int | None = None) -> str:
    """Return the text of a named corpus, cut to `max_bytes` bytes of UTF-8."""
    _check_corpus(name)
    _check_max_bytes(max_bytes)
    if name == "sample":
        return _joined([_asset_text("sample.txt")], max_bytes)
    return _joined(_texts(_stdlib_candidates(), max_bytes), max_bytes)


def describe_corpus(name: str) -> str:
    """Describe a corpus in one line: what its text depends on, and its size."""
    _check_corpus(name)
    if name == "sample":
        return f"sample: {len(_asset_text('sample.txt').encode())} bytes"
    files = stdlib_files()
    version = ".".join(str(number) for number in sys.version_info[:3])
    return f"python-stdlib: the standard library of Python {version}, {len(files)} files"


def stdlib_files() -> list[Path]:
    """Return the .py files of the running Python's standard library, sorted by their relative path.

    Excluded are tests, installed packages, idlelib, lib2to3, files written by the build of this Python
    (config-*, _sysconfigdata*), and files that are not UTF-8.
    """
    return [file for file in _stdlib_candidates() if _read_text(file) is not None]


def read_source(source: str | Path, *, max_bytes: int | None = MAX_BYTES) -> str:
    """Read text from a named corpus, a file, a folder of text files, or "hf:NAME[:CONFIG[:SPLIT]]".

    For a folder, these are its UTF-8 files at any depth, in sorted order and without hidden ones. For a
    dataset, it is the column "text", or else the first column of strings, of the split "train" by default.
    Texts are joined by newlines, and reading stops after `max_bytes` bytes (None: no limit).
    """
    _check_max_bytes(max_bytes)
    if isinstance(source, str) and source.startswith("hf:"):
        return _joined(_dataset_texts(source.removeprefix("hf:")), max_bytes)
    if isinstance(source, str) and source in CORPORA:
        return corpus_text(source, max_bytes=max_bytes)
    path = Path(source)
    if path.is_dir():
        text = _joined(_texts(_walk(path), max_bytes), max_bytes)
        if not text:
            raise UsageError(f"expected files of UTF-8 text in the folder {str(source)!r}, found none")
        return text
    if path.is_file():
        content = _read_text(path, max_bytes)
        if content is None:
            raise UsageError(f"expected a file of UTF-8 text, but {str(source)!r} is not one")
        return _joined([content], max_bytes)
    raise UsageError(
        f"expected a corpus, a file, a folder or hf:NAME, but {str(source)!r} is none of them",
        hint=near_misses(str(source), list(CORPORA)),
    )


def _stdlib_candidates() -> list[Path]:
    """Return the candidates of `stdlib_files` without reading them."""
    files = _walk(Path(sysconfig.get_path("stdlib")), skip=_is_skipped)
    sources = [f for f in files if f.suffix == ".py" and not f.name.startswith("_sysconfigdata")]
    if not sources:
        raise CurvescopeError(
            "this Python comes without the source of its standard library",
            hint="choose another corpus, or a folder of text files",
        )
    return sources


def _is_skipped(folder: str) -> bool:
    return folder in SKIPPED_FOLDERS or folder.startswith("config-")


def _walk(folder: Path, skip: Callable[[str], bool] = lambda name: False) -> list[Path]:
    """Files below `folder` in the order of their relative paths, without hidden ones and skipped folders."""
    files_found = []
    for folder_path, subfolders, files in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and not skip(name)]
        files_found += [Path(folder_path, name) for name in files if not name.startswith(".")]
    return sorted(files_found, key=lambda file: file.relative_to(folder).parts)


def _texts(files: Iterable[Path], max_bytes: int | None) -> Iterator[str]:
    """Yield the texts of all text files, read one at a time."""
    for file in files:
        content = _read_text(file, max_bytes)
        if content is not None:
            yield content


def _read_text(file: Path, max_bytes: int | None = None) -> str | None:
    """Read at least `max_bytes` bytes of a text; None if it is not UTF-8 or contains a zero byte."""
    try:
        with file.open(encoding="utf-8") as handle:
            content = handle.read(
                -1 if max_bytes is None else max_bytes
            )  # max_bytes characters have at least max_bytes bytes
    except UnicodeDecodeError:
        return None
    return None if "\0" in content else content


def _asset_text(name: str) -> str:
    file = resources.files("curvescope") / "assets" / name
    if not file.is_file():
        raise CurvescopeError(
            f"this installation lacks the file assets/{name}", hint="install curvescope again"
        )
    return file.read_text(encoding="utf-8")


def _dataset_texts(name: str) -> Iterator[str]:
    """Stream the texts of a Hugging Face dataset."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra(
            f"reading the dataset {name!r} needs the package datasets", hint=how_to_install("datasets")
        ) from None
    path, config, split, *unused = [*name.split(":"), "", ""]
    if not path or any(unused):
        raise UsageError(f"expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, got {'hf:' + name!r}")
    try:
        for row in datasets.load_dataset(path, config or None, split=split or "train", streaming=True):
            yield _text_of(dict(row), name)
    except CurvescopeError:
        raise
    except Exception as problem:  # the network, the hub or the dataset's reader may raise anything
        reason = str(problem).split("\n", 1)[0][:200] or type(problem).__name__
        raise CurvescopeError(
            f"could not read the Hugging Face dataset {name!r}: {reason}",
            hint="check its name and the network, or give a file",
        ) from problem


def _text_of(row: dict[str, Any], name: str) -> str:
    columns = [key for key, entry in row.items() if isinstance(entry, str)]
    if not columns:
        raise UsageError(f"expected a column of text in the dataset {name!r}, got {', '.join(row)}")
    return row["text" if "text" in columns else columns[0]]


def _joined(texts: Iterable[str], max_bytes: int | None) -> str:
    """Join texts by newlines, and cut after the last complete character within `max_bytes`."""
    parts: list[str] = []
    size = 0
    for text in texts:
        parts.append(text)
        size += len(text.encode()) + 1
        if max_bytes is not None and size > max_bytes:
            break
    joined = "\n".join(parts)
    return joined if max_bytes is None else joined.encode()[:max_bytes].decode("utf-8", errors="ignore")


def _check_corpus(name: str) -> None:
    if name not in CORPORA:
        raise UsageError(
            f"expected the name of a corpus, got {name!r}", hint=near_misses(str(name), list(CORPORA))
        )


def _check_max_bytes(max_bytes: int | None) -> None:
    if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 1):
        raise UsageError(f"expected max_bytes to be an integer of at least 1, got {max_bytes!r}")

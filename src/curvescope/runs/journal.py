"""The products of an unfinished piece of work on disk: it goes on in its middle, with the same bits."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.recording import Recorder
from curvescope.core.numbers import data_size
from curvescope.core.operator import LinearOperator
from curvescope.engines.digest import digest

MOST_OF_DISK = 0.25  # of what is free when it begins
MOST_OF_TIME = 0.25  # of that of the products, once writing has taken PATIENCE
PATIENCE = 1.0  # seconds
MUCH = 100 * 2**20  # bytes of which a person is told


@final
class Journal(Recorder):
    """One file for every product: its number, the digest of its columns, and the product itself.

    A product is answered from its file only if the columns are the same, bit for bit; at the first that are
    not, what was written from there on is thrown away. Nothing more is written where it would take too much
    time or too much of the disk: what is there stays good as a beginning.

    Args:
        begin: makes the folder; called before the first file is written.
        tell: called with a line for a person where the files take much of the disk.
    """

    def __init__(
        self, folder: Path, begin: Callable[[], Path], tell: Callable[[str], None] = lambda line: None
    ):
        self.folder, self._begin, self._tell = folder, begin, tell
        self.asked, self._known, self._told = 0, _numbered(folder), False
        self._bytes = sum(path.stat().st_size for path in self._known)
        self._writing, self._spent, self._computed, self._room = True, 0.0, 0.0, -1.0

    @property
    def kept(self) -> int:
        """How many products there are to begin with."""
        return len(self._known)

    def product(self, op: LinearOperator, V: Tensor) -> Tensor:
        """A V, read where it was written down, else computed and written."""
        key, number = _key(V), self.asked
        self.asked += 1
        if number < self.kept:
            found = self._recalled(number, key)
            if found is not None:
                return found.to(device=op.device, dtype=op.dtype)
            self._forget(number)
        start = time.monotonic()
        found = op @ V
        self._computed += time.monotonic() - start
        if self._writing and number == self.kept:
            self._write(number, key, found)
        return found

    def _recalled(self, number: int, key: str) -> Tensor | None:
        path = self._known[number]
        if path.stem.partition("-")[2] != key:
            return None
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError, EOFError):  # damaged
            return None

    def _forget(self, first: int) -> None:
        for path in self._known[first:]:
            path.unlink(missing_ok=True)
        del self._known[first:]

    def _write(self, number: int, key: str, product: Tensor) -> None:
        start, array = time.monotonic(), product.detach().cpu().numpy()
        try:
            if not self._known:
                self.folder = self._begin()
                self.folder.mkdir(parents=True, exist_ok=True)
            if self._room < 0:
                self._room = MOST_OF_DISK * shutil.disk_usage(self.folder).free
            self._room -= array.nbytes
            if self._room < 0:
                self._writing = False
                return
            path = self.folder / f"{number:06d}-{key}.npy"
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                np.save(file, array, allow_pickle=False)
            partial.replace(path)
            self._known.append(path)
            self._weigh(array.nbytes)
        except OSError:  # a full disk: what is there stays
            self._writing = False
        self._spent += time.monotonic() - start
        self._writing &= self._spent < max(PATIENCE, MOST_OF_TIME * self._computed)

    def _weigh(self, more: int) -> None:
        """Say once that there is much on the disk."""
        self._bytes += more
        if self._bytes > MUCH and not self._told:
            self._told = True
            self._tell(
                f"products are kept in {self.folder.parent} so that a stopped run can go on: more than "
                f"{data_size(MUCH)}, until each piece is done"
            )

    def remove(self) -> None:
        """Forget everything: the piece is done."""
        with suppress(OSError):
            shutil.rmtree(self.folder)


def _numbered(folder: Path) -> list[Path]:
    """The files 0, 1, 2, … without a gap."""
    found = {int(path.stem.partition("-")[0]): path for path in folder.glob("[0-9]*-*.npy")}
    return [found[i] for i in range(len(found)) if set(range(i + 1)) <= found.keys()]


def _key(V: Tensor) -> str:
    """Sixteen hexadecimal digits of the columns."""
    words = hashlib.blake2b(repr((tuple(V.shape), V.dtype)).encode(), digest_size=8)
    for part in digest([V]):
        words.update(part.cpu().numpy().tobytes())
    return words.hexdigest()

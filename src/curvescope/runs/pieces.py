"""Finished pieces of a computation on disk, by name: what lets a run that was killed go on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import final

from curvescope.core.result import Result

RESULT, OWNER = "result.json", "pid"


@final
class Pieces(MutableMapping[str, Result]):
    """A folder with one saved result per piece; a piece is there when it is complete.

    Args:
        begin: called before anything is written: a folder is made when the first piece is done.
        done: called with the name of a piece that was written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        begin: Callable[[], None] = lambda: None,
        done: Callable[[str], None] = lambda name: None,
    ):
        self.folder, self._begin, self._done = folder, begin, done

    def __setitem__(self, name: str, piece: Result) -> None:
        self._begin()
        piece.save(self.folder / name)
        self._done(name)

    def __getitem__(self, name: str) -> Result:
        if name not in self:
            raise KeyError(name)
        return Result.load(self.folder / name)

    def __delitem__(self, name: str) -> None:
        shutil.rmtree(self.folder / name)

    def __contains__(self, name: object) -> bool:
        return (self.folder / str(name) / RESULT).exists()

    def __iter__(self) -> Iterator[str]:
        found = self.folder.iterdir() if self.folder.exists() else ()
        return iter(sorted(path.name for path in found if path.name in self))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def own(self) -> None:
        """Note that this process works on the pieces."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / OWNER).write_text(str(os.getpid()), encoding="utf-8")

    @property
    def owned(self) -> bool:
        """Whether another process that is still alive works on them."""
        try:
            owner = int((self.folder / OWNER).read_text(encoding="utf-8"))
            os.kill(owner, 0)
        except (OSError, ValueError):
            return False
        return owner != os.getpid()

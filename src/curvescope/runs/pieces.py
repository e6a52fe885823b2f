"""Finished pieces of a computation on disk, by name: what lets a run that was killed go on.

A piece is a folder with a result and the digests of its files (`sums.json`). It is written beside its place
and moved there when it is whole; one whose files are not those of the digests is done again. With the digests
goes what the run is of: a piece of another model, other data or other settings is not taken for one of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from curvescope.core.errors import CurvescopeError
from curvescope.core.result import Result
from curvescope.runs.disk.durable import Pace, sync_tree

if TYPE_CHECKING:
    from curvescope.runs.disk.journal import Journal

STATE = "state"  # folder of a run that is not finished
RESULT, OWNER, PRODUCTS, SUMS, PARTIAL = "result.json", "pid", ".products", "sums.json", ".partial"
RUN = ".run"  # beside the digests: what the piece is of
Standing = Literal["whole", "damaged", "foreign"]


@final
class Pieces(MutableMapping[str, Result]):
    """A folder with one saved result per piece; a piece is there when it is complete.

    Args:
        begin: called once, with the folder, before anything is written there; it returns the folder to use.
            So a folder is made when the first piece is done.
        done: called with the name of a piece that was written.
        tell: called with lines for a person.
        run: a digest of what the pieces are of; those of another are not there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        begin: Callable[[Path], Path] | None = None,
        done: Callable[[str], None] = lambda name: None,
        tell: Callable[[str], None] = lambda line: None,
        run: str = "",
    ):
        self.folder, self.done, self.tell, self._begin, self._begun = folder, done, tell, begin, False
        self._told, self._pace, self._waiting = set[str](), Pace(), list[Path]()
        self.run, self.contents = run, ""  # contents of a run that keeps them as a piece of its own
        self._whole: dict[str, bool] = {}  # of pieces that were there: whether their files are as written
        self.journal: Journal | None = None  # of the piece that is worked on

    def begin(self) -> None:
        """Make the folder, and note that this process works on it."""
        if self._begun:
            return
        if self._begin is not None:
            self.folder = self._begin(self.folder)
        if not self.own():
            raise CurvescopeError(f"another process works on {self.folder}", hint="wait for it")
        self._begun = True

    def __setitem__(self, name: str, piece: Result) -> None:
        self.begin()
        place, partial = self.folder / name, self.folder / f"{name}{PARTIAL}"
        try:
            piece.save(partial)
            (partial / SUMS).write_text(json.dumps({**_sums(partial), RUN: self.run}), encoding="utf-8")
            shutil.rmtree(place, ignore_errors=True)
            partial.replace(place)
        except OSError:  # a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._whole[name] = True
        self._waiting.append(place)
        self._sync()
        self.done(name)

    def _sync(self) -> None:
        """Bring what waits to the disk, where it is time."""
        if self._pace.due():
            with self._pace.visit():
                for place in self._waiting:
                    sync_tree(place)
            self._waiting.clear()

    def __getitem__(self, name: str) -> Result:
        if name not in self:
            raise KeyError(name)
        return Result.load(self.folder / name)

    def _tell_once(self, line: str) -> None:
        """That products take room on the disk, or are of another run, of the first piece alone."""
        if line not in self._told:
            self._told.add(line)
            self.tell(line)

    def _tell_foreign(self) -> None:
        place = f"{self.folder.parent.name}/{self.folder.name}"
        self._tell_once(f"{place} has work of another model, other data or settings: it is not used")

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Keep the products of the piece that is worked on inside, until it is there itself."""
        from curvescope.algorithms.recording import recording
        from curvescope.runs.disk.journal import Journal

        path = self.folder / f"{name}{PRODUCTS}"
        self.journal = Journal(
            path, lambda: self._products(name), self._tell_once, run=self.run + self.contents
        )
        if self.journal.foreign:
            self._tell_foreign()
        try:
            with recording(self.journal):
                yield
        finally:
            self.journal.close()
        self.journal.remove()
        self.journal = None

    def _products(self, name: str) -> Path:
        self.begin()
        return self.folder / f"{name}{PRODUCTS}"

    def __delitem__(self, name: str) -> None:
        self._whole.pop(name, None)
        shutil.rmtree(self.folder / name)

    def __contains__(self, name: object) -> bool:
        name = str(name)
        if not (self.folder / name / RESULT).exists():
            return False
        if name not in self._whole:
            found = _standing(self.folder / name, self.run)
            self._whole[name] = found == "whole"
            if found == "foreign":
                self._tell_foreign()
            elif found == "damaged":
                self.tell(f"the piece {name} is damaged on the disk: it is done again")
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        found = self.folder.iterdir() if self.folder.exists() else ()
        names = (path.name for path in found if path.suffix not in (PARTIAL, PRODUCTS))
        return iter(sorted(name for name in names if name in self))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def own(self) -> bool:
        """Note that this process works on the pieces; False, and nothing done, where another one does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder):
            if self.owned:
                return False
            (self.folder / OWNER).write_text(str(os.getpid()), encoding="utf-8")
            return True

    @property
    def owned(self) -> bool:
        """Whether another process that is still alive works on them."""
        try:
            owner = int((self.folder / OWNER).read_text(encoding="utf-8"))
            os.kill(owner, 0)
        except (OSError, ValueError):
            return False
        return owner != os.getpid()


def _sums(folder: Path) -> dict[str, str]:
    """The digest of every file of a piece."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    return {path.name: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in files}


def _standing(folder: Path, run: str) -> Standing:
    """Whether the files of a piece are those that were written, by this run; without digests, by anybody."""
    try:
        known = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        of = known.pop(RUN, "")
        return "damaged" if known != _sums(folder) else "whole" if of == run else "foreign"
    except FileNotFoundError:
        return "foreign" if run else "whole"
    except (OSError, ValueError, AttributeError):
        return "damaged"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time inside, where the system has such locks; they end with the process."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

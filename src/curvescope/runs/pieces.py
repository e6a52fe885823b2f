"""Finished pieces of a computation on disk, by name, so that a killed run can resume.

A piece is a folder with a result and the digests of its files (`sums.json`). It is written under a temporary
name and renamed when it is complete. A piece whose files do not match their digests is computed again. The
digest of the run is stored too, so that pieces of another model, other data or other settings are ignored.
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
from curvescope.runs.disk.atomic_files import SyncPace, sync_tree

if TYPE_CHECKING:
    from curvescope.runs.disk.journal import Journal

STATE = "state"  # folder of an unfinished run
RESULT, OWNER, PRODUCTS, SUMS, PARTIAL = "result.json", "pid", ".products", "sums.json", ".partial"
RUN = ".run"  # digest of the run, stored beside the digests of the files
PieceStatus = Literal["whole", "damaged", "foreign"]


@final
class Pieces(MutableMapping[str, Result]):
    """Folder with one saved result per piece; it contains a piece once the piece is complete.

    Args:
        begin: Called once with the folder, before the first write; returns the folder to use. So the folder
            is created when the first piece is done.
        done: Called with the name of each piece that was written.
        tell: Called with messages for the user.
        run: Digest of the run; pieces of another run are ignored.
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
        self._told, self._pace, self._waiting = set[str](), SyncPace(), list[Path]()
        self.run, self.contents = run, ""  # set if the run stores its contents as a piece
        self._whole: dict[str, bool] = {}  # for each existing piece: True if its files are intact
        self.journal: Journal | None = None  # journal of the current piece

    def begin(self) -> None:
        """Create the folder and mark it as in use by this process."""
        if self._begun:
            return
        if self._begin is not None:
            self.folder = self._begin(self.folder)
        if not self.own():
            raise CurvescopeError(f"another process works on {self.folder}", hint="wait until it is done")
        self._begun = True

    def __setitem__(self, name: str, piece: Result) -> None:
        self.begin()
        place, partial = self.folder / name, self.folder / f"{name}{PARTIAL}"
        try:
            piece.save(partial)
            (partial / SUMS).write_text(
                json.dumps({**_file_digests(partial), RUN: self.run}), encoding="utf-8"
            )
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
        """Sync pending files to the disk if a sync is due."""
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
        """Log once that products take space on the disk, or belong to another run."""
        if line not in self._told:
            self._told.add(line)
            self.tell(line)

    def _tell_foreign(self) -> None:
        place = f"{self.folder.parent.name}/{self.folder.name}"
        self._tell_once(f"{place} has results of another model, data or settings: they are not used")

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Save the products of the current piece until the piece is complete."""
        from curvescope.algorithms.recorded_products import recording
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
            status = _piece_status(self.folder / name, self.run)
            self._whole[name] = status == "whole"
            if status == "foreign":
                self._tell_foreign()
            elif status == "damaged":
                self.tell(f"the piece {name} is damaged on the disk: it is computed again")
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        folders = self.folder.iterdir() if self.folder.exists() else ()
        names = (path.name for path in folders if path.suffix not in (PARTIAL, PRODUCTS))
        return iter(sorted(name for name in names if name in self))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def own(self) -> bool:
        """Mark the pieces as in use by this process; return False if another process uses them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _file_lock(self.folder):
            if self.owned:
                return False
            (self.folder / OWNER).write_text(str(os.getpid()), encoding="utf-8")
            return True

    @property
    def owned(self) -> bool:
        """Return True if another live process uses the pieces."""
        try:
            owner = int((self.folder / OWNER).read_text(encoding="utf-8"))
            os.kill(owner, 0)
        except (OSError, ValueError):
            return False
        return owner != os.getpid()


def _file_digests(folder: Path) -> dict[str, str]:
    """Return the digest of every file of a piece."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    return {path.name: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() for path in files}


def _piece_status(folder: Path, run: str) -> PieceStatus:
    """Check that the files of a piece are those that this run wrote; without digests, any run."""
    try:
        known = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        of = known.pop(RUN, "")
        return "damaged" if known != _file_digests(folder) else "whole" if of == run else "foreign"
    except FileNotFoundError:
        return "foreign" if run else "whole"
    except (OSError, ValueError, AttributeError):
        return "damaged"


@contextmanager
def _file_lock(folder: Path) -> Iterator[None]:
    """Hold a file lock, if the system has them; the lock ends with the process."""
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

"""Run folders: `runs/<study>/<stamp>-<hash>/` with everything that a run was and gave.

`config.toml`, `env.json`, `log.txt` and `state/` are there while it runs; `result.json`, `arrays.npz`,
`figures/` and `tables/` when it is done, and `state/` is gone. `result.json` comes last: a folder that has
one is finished. The hash is that of version, settings, and contents of model and data: a run goes on only
with what it was begun with. A folder is made when the first piece of work is done, so a call with a mistake
in it leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from curvescope import __version__
from curvescope.core.config import Config
from curvescope.runs.pieces import RESULT, Pieces
from curvescope.runs.shown import Shown
from curvescope.runs.work import Place
from curvescope.runs.writing import write_figures, write_tables

STATE, CONFIG = "state", "config.toml"
Say = Callable[[str], None]
"""Called with lines for a person."""


class RunFolder(Place):
    """One run on disk, in the folder `path` once it is begun."""

    def __init__(self, root: Path, study: str, cfg: Config, *, say: Say = lambda line: None):
        self._root, self._say = root / study, say
        self._config = tomli_w.dumps({"study": study, "version": __version__, **cfg.to_dict()})
        self._contents = ""
        self._pieces: Pieces | None = None

    @property
    def path(self) -> Path:
        """The folder; it is there when the first piece is done."""
        assert self._pieces is not None
        return self._pieces.folder.parent

    def at(self, contents: str) -> Pieces:
        """The pieces of an unfinished run with these settings and contents, or of one to begin."""
        self._contents = contents
        digest = digest_of(self._config, contents)
        begun = self._unfinished(digest)
        fresh = self._root / f"{time.strftime('%Y%m%d-%H%M%S')}-{digest}" / STATE
        self._pieces = Pieces(fresh, begin=self._begin) if begun is None else begun  # which may have no piece
        self._pieces.done = lambda name: self.log(f"done: {name}")
        if begun is not None:
            self._say(f"resuming {self.path} with {len(begun)} pieces done")
            self.log("resumed")
        return self._pieces

    def log(self, line: str) -> None:
        """Add a line with the time to log.txt."""
        with (self.path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def finish(self, result: Shown) -> None:
        """Write figures and tables, then the result, then forget the state."""
        pieces = self.at("") if self._pieces is None else self._pieces
        pieces.begin()
        write_figures(result, self.path / "figures")
        write_tables(result, self.path / "tables")
        result.save(self.path)
        shutil.rmtree(pieces.folder, ignore_errors=True)
        self.log("finished")

    def _begin(self, wanted: Path) -> Path:
        """Make the folder, with a number behind its name where another process was first."""
        number, place = 1, wanted.parent
        while not made(place):
            number += 1
            place = wanted.parent.with_name(f"{wanted.parent.name}-{number}")
        (place / CONFIG).write_text(self._config, encoding="utf-8")
        words = {**environment(), "contents": self._contents}
        (place / "env.json").write_text(json.dumps(words, indent=1), encoding="utf-8")
        return place / STATE

    def _unfinished(self, digest: str) -> Pieces | None:
        """Pieces of the latest folder that was begun with the same, not finished, and is nobody's: now ours.

        Says so where a run of these settings was begun with another model or other data.
        """
        for path in sorted(self._root.glob("*-*"), reverse=True):
            if not (path / STATE).is_dir() or (path / RESULT).exists():
                continue
            pieces = Pieces(path / STATE)
            if f"-{digest}" in path.name:
                if pieces.own():
                    return pieces
            elif _text(path / CONFIG) == self._config and not pieces.owned:
                self._say(f"beginning anew: {path} was begun with another model or other data")
        return None


def digest_of(settings: str, contents: str) -> str:
    """Eight hexadecimal digits of settings and contents."""
    return hashlib.sha256((settings + contents).encode()).hexdigest()[:8]


def made(folder: Path) -> bool:
    """Make a folder, its parents too; False where it is there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def environment() -> dict[str, str]:
    """Versions that a number may depend on."""
    import numpy
    import torch

    return {
        "curvescope": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }

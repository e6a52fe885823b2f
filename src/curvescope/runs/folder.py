"""Run folders: `runs/<study>/<stamp>-<hash>/` with everything that a run was and gave.

`config.toml`, `env.json`, `model.json`, `log.txt` and `state/` are there while it runs; `result.json`,
`arrays.npz`, `figures/` and `tables/` when it is done, and `state/` is gone. `result.json` comes last: a
folder that has one is finished. The hash is that of version, settings, and contents of model and data: a
run goes on only with what it was begun with, and the same command behind a finished run finds it. A folder
is made when the first product or piece is written, so a call with a mistake in it leaves nothing behind.
`asked.toml` is there where settings were chosen to fit the machine: what was asked for, so that the same
call goes on with them. `model.json` says what the models are made of (`models/description.py`), of a run
that has any, and `verification.json` how far off its operators were when they were checked.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import tomli_w

from curvescope import __version__
from curvescope.core.config import Config, Plain
from curvescope.core.result import UnreadableResult
from curvescope.models.description import Description
from curvescope.runs.contents import Fingerprint
from curvescope.runs.disk.durable import sync, sync_tree, write_figures, write_tables
from curvescope.runs.pieces import RESULT, STATE, Pieces
from curvescope.runs.shown import Shown
from curvescope.runs.verified import checks
from curvescope.runs.work import Place

CONFIG, ASKED = "config.toml", "asked.toml"
DAMAGED = ".damaged"  # behind the name of a result that cannot be read, and of its folder
SAVED = "result.partial"  # where a result is written before it counts
ENVIRONMENT, MODELS, LOG = "env.json", "model.json", "log.txt"
STAMP = "%Y%m%d-%H%M%S"  # in the name of a folder: when it was begun, by the clock on the wall
Say = Callable[[str], None]
"""Called with lines for a person."""


class AlreadyFinished(Exception):
    """A run of the same settings, model and data is finished, in the folder `path`."""

    def __init__(self, path: Path):
        super().__init__(f"already finished: {path}")
        self.path = path


class Standing(NamedTuple):
    """How much of a run is kept: finished pieces, of how many, and products of the one in hand."""

    pieces: int
    total: int
    steps: int


class Stopped(KeyboardInterrupt):
    """Ctrl-C, and what is kept."""

    def __init__(self, standing: Standing):
        super().__init__()
        self.standing = standing


class RunFolder(Place):
    """One run on disk, in the folder `path` once it is begun.

    Args:
        force: begin anew where a run of the same is finished.
        asked: what a person asked for where the settings were chosen to fit; kept beside them.
        chosen: words on how they were chosen, for log.txt.
        tell: called with what came out of pieces; by default `say`.
    """

    def __init__(
        self,
        root: Path,
        study: str,
        cfg: Config,
        *,
        say: Say = lambda line: None,
        force: bool = False,
        asked: str = "",
        chosen: str = "",
        tell: Say | None = None,
    ):
        self._root, self._say, self._force = root / study, say, force
        self._tell = say if tell is None else tell
        self._asked, self._chosen = asked, chosen
        self._config = tomli_w.dumps({"study": study, "version": __version__, **cfg.to_dict()})
        self._contents = ""
        self._pieces: Pieces | None = None
        self._names: Sequence[str] = ()

    @property
    def path(self) -> Path:
        """The folder; it is there when the first piece is done."""
        assert self._pieces is not None
        return self._pieces.folder.parent

    def at(self, contents: str, names: Sequence[str] = ()) -> Pieces:
        """The pieces of an unfinished run with these settings and contents, or of one to begin.

        Raises:
            AlreadyFinished: where a run of them is finished, unless forced.
        """
        self._contents, self._names = contents, names
        digest = digest_of(self._config, contents)
        finished = None if self._force else self._finished(digest)
        if finished is not None:
            raise AlreadyFinished(finished)
        begun = self._unfinished(digest)
        self._pieces = self._new(digest) if begun is None else begun
        self._pieces.done = lambda name: self.log(f"done: {name}")
        self._pieces.tell, self._pieces.run = self.warn, digest_of(self._config, contents, digits=32)
        if begun is not None:
            there = f"{len(begun)} of {len(names)} pieces were there"
            self._say(f"resuming {self.path}: {there}")
            self.log(f"resumed: {there}")
        return self._pieces

    def _new(self, digest: str) -> Pieces:
        name = f"{time.strftime(STAMP)}-{digest}"
        return Pieces(self._root / name / STATE, begin=self._begin)

    def standing(self) -> Standing:
        """How far it is, as far as it is kept."""
        if self._pieces is None:
            return Standing(0, len(self._names), 0)
        steps = 0 if self._pieces.journal is None else self._pieces.journal.kept
        return Standing(len(self._pieces), len(self._names), steps)

    def tell(self, line: str) -> None:
        """Say what came out of a piece."""
        self._tell(line)

    def verified(self, found: checks.Verification) -> None:
        """Write it to `verification.json`."""
        assert self._pieces is not None
        self._pieces.begin()
        checks.keep(self.path, found)
        self.log(("checked: " if found.passed else "failed its check: ") + checks.words([found.plain()]))

    def log(self, line: str) -> None:
        """Add a line with the time to log.txt."""
        _log(self.path, line)

    def warn(self, line: str) -> None:
        """Say a line, and keep it where a full disk lets us."""
        assert self._pieces is not None
        self._say(line)
        with suppress(OSError):
            self._pieces.begin()
            self.log(line)

    def finish(self, result: Shown) -> None:
        """Write figures and tables, then the result, then forget the state."""
        if self._pieces is None:
            self._pieces = self._new(digest_of(self._config, ""))
        pieces = self._pieces
        pieces.begin()
        write_figures(result, self.path / "figures")
        write_tables(result, self.path / "tables")
        saved = result.save(self.path / SAVED)
        for part in (saved, self.path / "figures", self.path / "tables"):
            sync_tree(part)
        for name in ("arrays.npz", RESULT):  # a folder with a result is finished: that comes last
            (saved / name).replace(self.path / name)
            sync(self.path)
        saved.rmdir()
        shutil.rmtree(pieces.folder, ignore_errors=True)
        self.log("finished")

    def _begin(self, wanted: Path) -> Path:
        """Make the folder, with a number behind its name where another process was first."""
        number, place = 1, wanted.parent
        while not made(place):
            number += 1
            place = wanted.parent.with_name(f"{wanted.parent.name}-{number}")
        (place / CONFIG).write_text(self._config, encoding="utf-8")
        if self._asked:
            (place / ASKED).write_text(self._asked, encoding="utf-8")
        if self._chosen:
            _log(place, self._chosen)
        words = {**environment(), "contents": self._contents}
        (place / ENVIRONMENT).write_text(json.dumps(words, indent=1), encoding="utf-8")
        if isinstance(self._contents, Fingerprint):
            write_models(place, self._contents.models)
        sync_tree(place)
        sync(self._root.parent)
        return place / STATE

    def _finished(self, digest: str) -> Path | None:
        """Return the latest folder with a readable result of the same; set aside those that are damaged."""
        for path in sorted(self._root.glob(f"*-{digest}*"), reverse=True):
            if (path / RESULT).exists() and _text(path / CONFIG) == self._config:
                try:
                    Shown.load(path)
                    return path
                except UnreadableResult:
                    self._say(f"{path} is damaged: it is now {set_aside(path).name}, and computed again")
        return None

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


def set_aside(path: Path) -> Path:
    """Rename a run folder with a damaged result, so that it does not count as a run; return its new path."""
    (path / RESULT).rename(path / f"{RESULT}{DAMAGED}")
    number, place = 1, path.with_name(f"{path.name}{DAMAGED}")
    while place.exists():
        number += 1
        place = path.with_name(f"{path.name}{DAMAGED}-{number}")
    return path.rename(place)


def chosen_before(root: Path, study: str, asked: str) -> dict[str, Plain | list[Plain]] | None:
    """The settings that were chosen when the same was asked for, in the latest readable folder."""
    for path in sorted((root / study).glob("*-*"), reverse=True):
        text = _text(path / CONFIG)
        if _text(path / ASKED) == asked and text is not None:
            with suppress(tomllib.TOMLDecodeError):
                return {k: v for k, v in tomllib.loads(text).items() if k not in ("study", "version")}
    return None


def _log(folder: Path, line: str) -> None:
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def digest_of(settings: str, contents: str, *, digits: int = 8) -> str:
    """Hexadecimal digits of settings and contents."""
    return hashlib.sha256((settings + contents).encode()).hexdigest()[:digits]


def made(folder: Path) -> bool:
    """Make a folder, its parents too; False where it is there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def write_models(folder: Path, models: Sequence[Description]) -> None:
    """Say in `model.json` what the models of a run are made of; nothing where it has none."""
    if models:
        text = json.dumps(models, indent=1, ensure_ascii=False, default=str)
        (folder / MODELS).write_text(text, encoding="utf-8")


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

"""Run folders: `runs/<study>/<stamp>-<hash>/` with the inputs and results of a run.

`config.toml`, `env.json`, `model.json`, `log.txt` and `state/` exist during the run. When it finishes,
it writes `result.json`, `arrays.npz`, `figures/` and `tables/`, and removes `state/`. `result.json` is
written last, so a folder that has one is finished. The hash covers the version, the settings, and the
contents of model and data. A run therefore resumes only with equal inputs, and the same command finds a
finished run. The folder is created when the first product or piece is written, so a call that fails early
leaves nothing behind. If settings were chosen to fit the machine, `asked.toml` has the requested ones, so
that the same call resumes with the chosen ones. If settings were lowered during the run to finish in time,
`lowered.toml` has them. `model.json` describes the models (`models/description.py`), if there are any.
`verification.json` has the errors that the checks of the operators measured.
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
from curvescope.core.config import Config, Plain, Settings
from curvescope.core.result import UnreadableResult
from curvescope.models.description import Description
from curvescope.runs.disk.atomic_files import sync, sync_tree, write_figures, write_tables
from curvescope.runs.fingerprints import Fingerprint
from curvescope.runs.pieces import RESULT, STATE, Pieces
from curvescope.runs.resumable_loop import PieceStore
from curvescope.runs.study_result import Shown
from curvescope.runs.verification import checks

CONFIG, ASKED = "config.toml", "asked.toml"
LOWERED = "lowered.toml"  # settings that a run with a budget lowered to finish in time
DAMAGED = ".damaged"  # suffix for an unreadable result and its folder
SAVED = "result.partial"  # name under which a result is written before it is complete
ENVIRONMENT, MODELS, LOG = "env.json", "model.json", "log.txt"
STAMP = "%Y%m%d-%H%M%S"  # start of the run in local time, part of the folder's name
Say = Callable[[str], None]
"""Function called with messages for the user."""


class AlreadyFinished(Exception):
    """Signal that the folder `path` has a finished run with the same settings, model and data."""

    def __init__(self, path: Path):
        super().__init__(f"already finished: {path}")
        self.path = path


class SavedProgress(NamedTuple):
    """Saved progress: finished pieces, number of pieces, and products of the current piece."""

    pieces: int
    total: int
    steps: int


class RunStopped(KeyboardInterrupt):
    """Signal an interruption by Ctrl-C, with the saved progress."""

    def __init__(self, standing: SavedProgress):
        super().__init__()
        self.standing = standing


class RunFolder(PieceStore):
    """One run on disk, in the folder `path` once it has begun.

    Args:
        force: Start again even if a finished run with the same inputs exists.
        asked: The requested settings if others were chosen to fit the machine; saved beside them.
        chosen: Text for log.txt on how the settings were chosen.
        tell: Called with the results of pieces; by default `say`.
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
        """Folder of the run; it exists once the first piece is done."""
        assert self._pieces is not None
        return self._pieces.folder.parent

    def at(self, contents: str, names: Sequence[str] = ()) -> Pieces:
        """Return the pieces of an unfinished run with these settings and contents, or of a new run.

        Raises:
            AlreadyFinished: If a finished run with these inputs exists and `force` is False.
        """
        self._contents, self._names = contents, names
        digest = run_digest(self._config, contents)
        finished = None if self._force else self._finished(digest)
        if finished is not None:
            raise AlreadyFinished(finished)
        begun = self._unfinished(digest)
        self._pieces = self._new(digest) if begun is None else begun
        self._pieces.done = lambda name: self.log(f"done: {name}")
        self._pieces.tell, self._pieces.run = self.warn, run_digest(self._config, contents, digits=32)
        if begun is not None:
            progress = f"{len(begun)} of {len(names)} pieces are already done"
            self._say(f"resuming {self.path}: {progress}")
            self.log(f"resumed: {progress}")
        return self._pieces

    def _new(self, digest: str) -> Pieces:
        name = f"{time.strftime(STAMP)}-{digest}"
        return Pieces(self._root / name / STATE, begin=self._begin)

    def standing(self) -> SavedProgress:
        """Return the saved progress."""
        if self._pieces is None:
            return SavedProgress(0, len(self._names), 0)
        steps = 0 if self._pieces.journal is None else self._pieces.journal.kept
        return SavedProgress(len(self._pieces), len(self._names), steps)

    def tell(self, line: str) -> None:
        """Show the result of a piece to the user."""
        self._tell(line)

    def lowered(self, settings: Settings) -> None:
        """Write lowered settings to `lowered.toml`, since the run no longer follows `config.toml` alone."""
        assert self._pieces is not None
        self._pieces.begin()
        all_lowered = {**read_lowered(self.path), **settings}
        (self.path / LOWERED).write_text(tomli_w.dumps(all_lowered), encoding="utf-8")
        self.log(f"lowered: {settings}")

    def verified(self, found: checks.Verification) -> None:
        """Write the results of a check to `verification.json`."""
        assert self._pieces is not None
        self._pieces.begin()
        checks.save_verification(self.path, found)
        self.log(
            ("checked: " if found.passed else "failed its check: ") + checks.describe_errors([found.plain()])
        )

    def log(self, line: str) -> None:
        """Append a line with the time to log.txt."""
        _log(self.path, line)

    def warn(self, line: str) -> None:
        """Show a line to the user and log it, unless the disk is full."""
        assert self._pieces is not None
        self._say(line)
        with suppress(OSError):
            self._pieces.begin()
            self.log(line)

    def finish(self, result: Shown) -> None:
        """Write figures and tables, then the result, then remove the state."""
        if self._pieces is None:
            self._pieces = self._new(run_digest(self._config, ""))
        pieces = self._pieces
        pieces.begin()
        write_figures(result, self.path / "figures")
        write_tables(result, self.path / "tables")
        saved = result.save(self.path / SAVED)
        for part in (saved, self.path / "figures", self.path / "tables"):
            sync_tree(part)
        for name in ("arrays.npz", RESULT):  # The result comes last, since it marks the folder as finished.
            (saved / name).replace(self.path / name)
            sync(self.path)
        saved.rmdir()
        shutil.rmtree(pieces.folder, ignore_errors=True)
        self.log("finished")

    def _begin(self, preferred: Path) -> Path:
        """Create the folder; append a number to its name if another process created it first."""
        number, place = 1, preferred.parent
        while not make_folder(place):
            number += 1
            place = preferred.parent.with_name(f"{preferred.parent.name}-{number}")
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
        """Return the latest folder with a readable result of the same inputs; set damaged ones aside."""
        for path in sorted(self._root.glob(f"*-{digest}*"), reverse=True):
            if (path / RESULT).exists() and _read_text(path / CONFIG) == self._config and self._is_same(path):
                try:
                    Shown.load(path)
                    return path
                except UnreadableResult:
                    self._say(
                        f"{path} is damaged: it was renamed to {set_aside(path).name}, and is computed again"
                    )
        return None

    def _is_same(self, path: Path) -> bool:
        """Return True unless settings of that run were lowered for a budget that differs from this one."""
        return not (path / LOWERED).exists() or (
            self._asked != "" and _read_text(path / ASKED) == self._asked
        )

    def _unfinished(self, digest: str) -> Pieces | None:
        """Pieces of the latest folder that was begun with the same, not finished, and is nobody's: now ours.

        Says so where a run of these settings was begun with another model or other data.
        """
        for path in sorted(self._root.glob("*-*"), reverse=True):
            if not (path / STATE).is_dir() or (path / RESULT).exists() or not self._is_same(path):
                continue
            pieces = Pieces(path / STATE)
            if f"-{digest}" in path.name:
                if pieces.own():
                    return pieces
            elif _read_text(path / CONFIG) == self._config and not pieces.owned:
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


def previously_chosen(root: Path, study: str, asked: str) -> dict[str, Plain | list[Plain]] | None:
    """Return the settings chosen for the same request in the latest readable folder."""
    for path in sorted((root / study).glob("*-*"), reverse=True):
        text = _read_text(path / CONFIG)
        if _read_text(path / ASKED) == asked and text is not None:
            with suppress(tomllib.TOMLDecodeError):
                return {k: v for k, v in tomllib.loads(text).items() if k not in ("study", "version")}
    return None


def read_lowered(path: Path) -> dict[str, Plain | list[Plain]]:
    """Return the settings that a run lowered, with their lowest values; empty if the file is damaged."""
    try:
        return tomllib.loads(_read_text(path / LOWERED) or "")
    except tomllib.TOMLDecodeError:
        return {}


def _log(folder: Path, line: str) -> None:
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def run_digest(settings: str, contents: str, *, digits: int = 8) -> str:
    """Hexadecimal digest of settings and contents."""
    return hashlib.sha256((settings + contents).encode()).hexdigest()[:digits]


def make_folder(folder: Path) -> bool:
    """Create a folder and its parents; return False if it exists already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def write_models(folder: Path, models: Sequence[Description]) -> None:
    """Write the descriptions of a run's models to `model.json`; write nothing if it has none."""
    if models:
        text = json.dumps(models, indent=1, ensure_ascii=False, default=str)
        (folder / MODELS).write_text(text, encoding="utf-8")


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def environment() -> dict[str, str]:
    """Return the versions of software that results may depend on."""
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

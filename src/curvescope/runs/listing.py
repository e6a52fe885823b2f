"""The run folders that are there: what each is, and removing them."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from curvescope.core.config import Plain
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.runs.folder import CONFIG, STAMP, STATE
from curvescope.runs.pieces import RESULT, Pieces

OWN = ("study", "version", "model", "data")  # of config.toml, not among the settings in short


@dataclass(frozen=True)
class RunInfo:
    """One run folder."""

    path: Path
    study: str
    model: str | None
    data: str | None
    settings: Mapping[str, Plain | list[Plain]]  # all others
    begun: datetime
    size: int  # bytes
    finished: bool


def read_run(path: Path) -> RunInfo:
    """What a run folder says of itself."""
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        config = {}
    there = (path / RESULT).exists() or (path / STATE).is_dir()
    if path.is_symlink() or not there or not {"study", "version"} <= config.keys():
        raise UsageError(f"expected a run folder, got {path}", hint="curvescope runs lists them")
    return RunInfo(
        path=path,
        study=str(config["study"]),
        model=config.get("model"),
        data=config.get("data"),
        settings={key: value for key, value in config.items() if key not in OWN},
        begun=begun(path),
        size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        finished=(path / RESULT).exists(),
    )


def begun(path: Path) -> datetime:
    """What the folder's name says; of a folder that was renamed, when its settings were written."""
    try:
        return datetime.strptime("-".join(path.name.split("-")[:2]), STAMP)
    except ValueError:
        return datetime.fromtimestamp((path / CONFIG).stat().st_mtime)


def list_runs(root: Path, *, depth: int = 2) -> list[RunInfo]:
    """Every run folder `depth` levels under `root`, <study>/<run> by default, the oldest first."""
    found = []
    for path in root.glob(f"{'*/' * depth}{CONFIG}"):
        try:
            found.append(read_run(path.parent))
        except UsageError:
            continue
    return sorted(found, key=lambda run: (run.begun, run.path))


def remove_runs(paths: Sequence[Path]) -> None:
    """Remove run folders, and the folder of a study that has no other.

    Nothing is removed where one of them is no run folder, or is worked on.
    """
    studies = {path: read_run(path).study for path in paths}
    for path in studies:
        if Pieces(path / STATE).owned:
            raise CurvescopeError(f"another process works on {path}", hint="wait for it")
    for path, study in studies.items():
        shutil.rmtree(path)
        if path.resolve().parent.name == study:
            with suppress(OSError):  # there are others
                path.resolve().parent.rmdir()

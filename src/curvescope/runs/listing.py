"""List and remove run folders."""

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

OWN = ("study", "version", "model", "data")  # entries of config.toml that are not shown among the settings


@dataclass(frozen=True)
class RunInfo:
    """One run folder."""

    path: Path
    study: str
    model: str | None
    data: str | None
    settings: Mapping[str, Plain | list[Plain]]  # all other entries
    start_time: datetime
    size: int  # bytes
    finished: bool


def read_run(path: Path) -> RunInfo:
    """Read the description of a run from its folder."""
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        config = {}
    is_run = (path / RESULT).exists() or (path / STATE).is_dir()
    if path.is_symlink() or not is_run or not {"study", "version"} <= config.keys():
        raise UsageError(f"expected a run folder, got {path}", hint="curvescope runs lists them")
    return RunInfo(
        path=path,
        study=str(config["study"]),
        model=config.get("model"),
        data=config.get("data"),
        settings={key: value for key, value in config.items() if key not in OWN},
        start_time=start_time(path),
        size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        finished=(path / RESULT).exists(),
    )


def start_time(path: Path) -> datetime:
    """Time in the folder's name; for a renamed folder, the time when its settings were written."""
    try:
        return datetime.strptime("-".join(path.name.split("-")[:2]), STAMP)
    except ValueError:
        return datetime.fromtimestamp((path / CONFIG).stat().st_mtime)


def list_runs(root: Path, *, depth: int = 2) -> list[RunInfo]:
    """List the run folders `depth` levels below `root` (by default <study>/<run>), oldest first."""
    runs = []
    for path in root.glob(f"{'*/' * depth}{CONFIG}"):
        try:
            runs.append(read_run(path.parent))
        except UsageError:
            continue
    return sorted(runs, key=lambda run: (run.start_time, run.path))


def remove_runs(paths: Sequence[Path]) -> None:
    """Remove run folders, and the folder of a study that has no other.

    Nothing is removed if one of them is not a run folder or another process works on it.
    """
    studies = {path: read_run(path).study for path in paths}
    for path in studies:
        if Pieces(path / STATE).owned:
            raise CurvescopeError(f"another process works on {path}", hint="wait until it is done")
    for path, study in studies.items():
        shutil.rmtree(path)
        if path.resolve().parent.name == study:
            with suppress(OSError):  # the study has other runs
                path.resolve().parent.rmdir()

"""Run a study into a folder, or read one that is finished."""

from __future__ import annotations

from pathlib import Path

from curvescope.core.config import Plain, Settings
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import Progress
from curvescope.runs.folder import CONFIG, STATE, AlreadyFinished, RunFolder, Say, Stopped
from curvescope.runs.pieces import RESULT
from curvescope.runs.place import FULL, check_writable
from curvescope.runs.shown import Shown
from curvescope.studies import find


def run(
    study: str,
    settings: Settings,
    *,
    out: str | Path = "runs",
    progress: Progress | None = None,
    say: Say = lambda line: None,
    force: bool = False,
) -> tuple[Path, Shown]:
    """Run a study with these settings, in a folder under `out`.

    An unfinished run with the same settings, on the same contents of model and data, is resumed; of a
    finished one the result is read.

    Args:
        say: called with lines for a person, such as that a run is resumed.
        force: compute anew what is finished.

    Returns:
        The folder and the result.
    """
    found = find(study)
    cfg = found.Config.from_dict(settings)
    check_writable(Path(out))
    folder = RunFolder(Path(out), study, cfg, say=say, force=force)
    try:
        result = found.run(cfg, progress=progress, state=folder)
        folder.finish(result)
    except AlreadyFinished as there:
        say(str(there))
        return there.path, load(there.path)[1]
    except KeyboardInterrupt:
        raise Stopped(folder.standing()) from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        kept = folder.standing()
        raise CurvescopeError(
            f"the disk is full: {kept.pieces} of {kept.total} pieces are kept under {out}",
            hint="make room, and the same command goes on from there",
        ) from error
    return folder.path, result


def load(path: str | Path) -> tuple[dict[str, Plain | list[Plain]], Shown]:
    """Configuration (with `study` and `version`) and result of a finished run."""
    import tomllib

    path = Path(path)
    if not (path / RESULT).exists() or not (path / CONFIG).exists():
        unfinished = (
            " (it is not finished: run the same study again to resume)" if (path / STATE).exists() else ""
        )
        raise CurvescopeError(f"expected a run folder with {CONFIG} and {RESULT}, got {path}{unfinished}")
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CurvescopeError(f"could not read {path / CONFIG}: {error}") from error
    find(str(config.get("study")))
    return config, Shown.load(path)

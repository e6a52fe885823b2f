"""Run a study into a folder, or read one that is finished."""

from __future__ import annotations

from pathlib import Path

from curvescope.core.config import Plain, Settings
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import Progress
from curvescope.runs.folder import CONFIG, STATE, RunFolder, Say
from curvescope.runs.pieces import RESULT
from curvescope.runs.shown import Shown
from curvescope.studies import find


def run(
    study: str,
    settings: Settings,
    *,
    out: str | Path = "runs",
    progress: Progress | None = None,
    say: Say = lambda line: None,
) -> tuple[Path, Shown]:
    """Run a study with these settings, in a folder under `out`.

    An unfinished run with the same settings, on the same contents of model and data, is resumed.

    Args:
        say: called with lines for a person, such as that a run is resumed.

    Returns:
        The folder and the result.
    """
    found = find(study)
    cfg = found.Config.from_dict(settings)
    folder = RunFolder(Path(out), study, cfg, say=say)
    result = found.run(cfg, progress=progress, state=folder)
    folder.finish(result)
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

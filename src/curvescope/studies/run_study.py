"""Run a study in a run folder, or load a finished run."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w

from curvescope import __version__
from curvescope.core.config import Config, Plain, Settings
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import Progress
from curvescope.core.ranks import (
    gather_objects,
    is_single_process,
    loads_sharded,
    on_first_rank,
    shared_errors,
)
from curvescope.runs.disk.atomic_files import check_writable, explain_full_disk
from curvescope.runs.folder import (
    ASKED,
    CONFIG,
    STATE,
    AlreadyFinished,
    RunFolder,
    RunStopped,
    Say,
    previously_chosen,
    read_lowered,
)
from curvescope.runs.pieces import RESULT
from curvescope.runs.resumable_loop import PieceStore, use_pace
from curvescope.runs.study import Study
from curvescope.runs.study_result import Shown
from curvescope.studies import RUNS, STUDIES, find

if TYPE_CHECKING:
    from curvescope.studies.time_budget import Budget, Fitted

LONG = 120.0  # seconds; longer runs print a forecast before they begin


class Limit(NamedTuple):
    """Time limit of a run as given by the user; a few minutes by default."""

    profile: str | None = None  # quick or full
    budget: str | None = None  # 90s, 3min, …
    start: Settings | None = None  # start from these settings instead of the defaults
    # Time.monotonic() at which a budget began; by default when the study starts.
    begun: float | None = None


def run(
    study: str,
    settings: Settings,
    *,
    out: str | Path = "runs",
    progress: Progress | None = None,
    say: Say = lambda line: None,
    tell: Say | None = None,
    force: bool = False,
    limit: Limit | None = None,
) -> tuple[Path, Shown]:
    """Run a study with these settings, in a folder under `out`.

    An unfinished run with the same settings, model and data is resumed. If the run is finished, its result
    is loaded.

    Args:
        say: called with messages for the user, for example that a run is resumed.
        tell: called with the results of pieces when they are done; by default `say`.
        force: recompute a finished run.
        limit: choose the settings that the user did not give, so the run fits into the time; by default
            they are the study's defaults. The same request chooses the same settings again.

    On several ranks, only rank 0 reads, writes and chooses. If the model is sharded, studies that need more
    than products, losses and gradients raise an error, and all ranks time products together.

    Returns:
        The folder and the result.
    """
    found = find(study)
    with shared_errors():
        if loads_sharded() and not found.on_pieces:
            raise _not_on_pieces(study)
    cfg = found.Config.from_dict(settings)
    on_first_rank(lambda: check_writable(Path(out)))
    asked, words, pace = "", "", None
    if limit is not None:
        limit = limit._replace(begun=time.monotonic() if limit.begun is None else limit.begun)
        asked = _asked(settings, limit)
        before = on_first_rank(lambda: None if force else previously_chosen(Path(out), study, asked))
        known = None
        with suppress(UsageError):  # a damaged file may contain unknown settings
            known = found.Config.from_dict(before) if before else None
        if known is not None:
            cfg, pace = known, _pace_of(found, known, settings, limit)
        else:
            choose = partial(_chosen, study, settings, limit)
            cfg, words, pace = choose() if is_single_process() else (*_on_all(choose), None)
            if words:
                say(words)
    folder = RunFolder(Path(out), study, cfg, say=say, force=force, asked=asked, chosen=words, tell=tell)
    try:
        with explain_full_disk(lambda: _kept(folder, out)):
            with use_pace(pace):
                result = found.run(
                    cfg, progress=progress, state=folder if is_single_process() else _on_ranks(folder)
                )
            on_first_rank(lambda: folder.finish(result))
    except AlreadyFinished as there:
        finished = there.path
        say(str(there))
        return finished, on_first_rank(lambda: load(finished)[1])
    except KeyboardInterrupt:
        raise RunStopped(folder.standing()) from None
    return on_first_rank(lambda: folder.path), result


def _chosen(name: str, settings: Settings, limit: Limit) -> tuple[Config, str, Budget | None]:
    """Return the configuration that fits the time limit, a forecast for long runs, and the budget."""
    study = find(name)
    chosen = fitted(study, settings, limit)
    foretold = not loads_sharded() and chosen.budget is None
    return chosen.cfg, _foretold(name, study, chosen) if foretold else chosen.words, chosen.budget


def _on_all(choose: Callable[[], tuple[Config, str, Budget | None]]) -> tuple[Config, str]:
    """Share the choice of rank 0 with all ranks, which do not plan again."""
    return gather_objects(choose()[:2])[0] if loads_sharded() else on_first_rank(lambda: choose()[:2])


def _pace_of(study: Study[Config], cfg: Config, settings: Settings, limit: Limit) -> Budget | None:
    """Return the budget for a resumed run with settings that were chosen before, or None."""
    from curvescope.studies.problem_config import ModelOnData
    from curvescope.studies.time_budget import Budget, limit_of

    seconds = limit_of(cfg, limit.profile, limit.budget)
    plan = study.plan
    if seconds is None or plan is None or limit.budget is None or not isinstance(cfg, ModelOnData):
        return None
    begun = time.monotonic() if limit.begun is None else limit.begun
    return Budget(plan, cfg, settings, seconds, begun=begun)


def _not_on_pieces(study: str) -> UsageError:
    """Error for a study that does not support sharded models."""
    known = [name for name in STUDIES if find(name).on_pieces]
    return UsageError(
        f"expected a study that supports sharded models ({', '.join(known)}) with --parallel shards, got "
        f"{study}: it needs more than products, losses and gradients",
        hint="use --parallel data, probes or pieces, with the whole model on every rank",
    )


def _on_ranks(folder: RunFolder) -> PieceStore:
    """Share the folder of rank 0 with all ranks."""
    from curvescope.runs.ranks.shared_folder import SharedPieceStore

    return SharedPieceStore(folder)


def _kept(folder: RunFolder, out: str | Path) -> str:
    kept = folder.standing()
    return f"{kept.pieces} of {kept.total} pieces are stored under {out}"


def _asked(settings: Settings, limit: Limit) -> str:
    words = {name: word for name, word in limit._asdict().items() if word and name not in ("start", "begun")}
    start = {"start": _plain(limit.start)} if limit.start else {}
    return tomli_w.dumps({"version": __version__, "settings": _plain(settings), "limit": words, **start})


def _plain(settings: Settings) -> dict[str, object]:
    """Convert settings to TOML types."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items() if v is not None}


def fitted(study: Study[Config], settings: Settings, limit: Limit, *, timed: bool = True) -> Fitted:
    """Return the configuration that fits the time limit, and a message about it.

    Args:
        timed: also estimate the time if there is nothing to choose.
    """
    from curvescope.studies.time_budget import Fitted, fit, limit_of

    if limit.profile == "full" and limit.budget is None and study.full is not None:
        given = {name: value for name, value in settings.items() if value is not None}
        return Fitted(study.Config.from_dict({**study.full, **given}), "")
    if study.plan is None and (limit.profile, limit.budget, limit.start) != (None, None, None):
        raise UsageError("this study has no --profile or --budget: it has no settings to choose")
    cfg = study.Config.from_dict({**(limit.start or {}), **settings})
    seconds = limit_of(cfg, limit.profile, limit.budget)
    if not timed and not seconds:
        return Fitted(cfg, "")
    kept = limit.budget is not None
    return fit(study, settings, seconds, start=limit.start, kept=kept, begun=limit.begun)


def _foretold(name: str, study: Study[Config], fitted: Fitted) -> str:
    """Return the message about a configuration, with a forecast if the run may take longer than LONG."""
    if fitted.seconds <= LONG:
        return fitted.words
    from curvescope.studies.preflight import forecast, view

    try:
        found = forecast(name, study, fitted.cfg, model=fitted.model)
    except CurvescopeError as error:  # the run itself reports the error if it persists
        return f"{fitted.words}\nno forecast: {error.message}"
    if found is None or found.prediction.seconds <= LONG:
        return fitted.words
    return "\n".join(filter(None, [fitted.choice, *view.lines(found)]))


def load(path: str | Path) -> tuple[dict[str, Plain | list[Plain]], Shown]:
    """Load the configuration (with `study` and `version`) and the result of a finished run."""
    path = Path(path)
    if not (path / RESULT).exists() or not (path / CONFIG).exists():
        unfinished = (
            " (the run is not finished: run the same study again to resume)"
            if (path / STATE).exists()
            else ""
        )
        raise CurvescopeError(f"expected a run folder with {CONFIG} and {RESULT}, got {path}{unfinished}")
    config = read_config(path)
    if (study := str(config.get("study"))) not in RUNS:
        find(study)  # raises if the study is unknown
    return config, Shown.load(path)


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings of a run, with `study` and `version`."""
    try:
        return tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CurvescopeError(f"could not read {path / CONFIG}: {error}") from error


def chosen(path: Path) -> dict[str, Plain | list[Plain]]:
    """Return the settings that the time limit chose: neither given by the user nor defaults.

    If the run lowered a setting on the way, its lowest value is returned.
    """
    if not (path / ASKED).exists():
        return {}
    config = read_config(path)
    try:
        asked = tomllib.loads((path / ASKED).read_text(encoding="utf-8"))["settings"]
        own = find(config["study"]).Config.from_dict(asked).to_dict()
    except (OSError, ValueError, KeyError, UsageError):  # damaged
        return {}
    config |= read_lowered(path)
    return {name: config[name] for name in own if name in config and config[name] != own[name]}

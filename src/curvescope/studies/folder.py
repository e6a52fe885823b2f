"""Run a study into a folder, or read one that is finished."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w

from curvescope import __version__
from curvescope.core.config import Config, Plain, Settings
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import Progress
from curvescope.core.ranks import alone, everyone, from_first, spreading, together
from curvescope.runs.disk.durable import check_writable, full_disk_said
from curvescope.runs.folder import (
    ASKED,
    CONFIG,
    STATE,
    AlreadyFinished,
    RunFolder,
    Say,
    Stopped,
    chosen_before,
)
from curvescope.runs.pieces import RESULT
from curvescope.runs.shown import Shown
from curvescope.runs.study import Study
from curvescope.runs.work import Place
from curvescope.studies import RUNS, STUDIES, find

if TYPE_CHECKING:
    from curvescope.studies.fitting import Fitted

LONG = 120.0  # seconds of a run whose forecast is told before it begins


class Limit(NamedTuple):
    """How long a run may take, in a person's words; neither: a few minutes."""

    profile: str | None = None  # quick or full
    budget: str | None = None  # 90s, 3min, …
    start: Settings | None = None  # in the place of the study's own, or less of them


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

    An unfinished run with the same settings, on the same contents of model and data, is resumed; of a
    finished one the result is read.

    Args:
        say: called with lines for a person, such as that a run is resumed.
        tell: called with what came out of pieces, as they are done; by default `say`.
        force: compute anew what is finished.
        limit: choose settings that nobody gave to be in time; by default they are the study's own. What was
            chosen when the same was asked for before is taken again.

    On several ranks in step rank 0 alone reads, writes and chooses. Where these spread models over them, a
    study that asks more of a model is refused, and products are timed by all ranks together.

    Returns:
        The folder and the result.
    """
    found = find(study)
    with together():
        if spreading() and not found.on_pieces:
            raise _not_on_pieces(study)
    cfg = found.Config.from_dict(settings)
    from_first(lambda: check_writable(Path(out)))
    asked, words = "", ""
    if limit is not None:
        asked = _asked(settings, limit)
        before = from_first(lambda: None if force else chosen_before(Path(out), study, asked))
        known = None
        with suppress(UsageError):  # a damaged file may name a setting that there is not
            known = found.Config.from_dict(before) if before else None
        if known is not None:
            cfg = known
        else:
            choose = partial(_chosen, study, settings, limit)
            cfg, words = everyone(choose())[0] if spreading() else from_first(choose)
            if words:
                say(words)
    folder = RunFolder(Path(out), study, cfg, say=say, force=force, asked=asked, chosen=words, tell=tell)
    try:
        with full_disk_said(lambda: _kept(folder, out)):
            result = found.run(cfg, progress=progress, state=folder if alone() else _on_ranks(folder))
            from_first(lambda: folder.finish(result))
    except AlreadyFinished as there:
        finished = there.path
        say(str(there))
        return finished, from_first(lambda: load(finished)[1])
    except KeyboardInterrupt:
        raise Stopped(folder.standing()) from None
    return from_first(lambda: folder.path), result


def _chosen(name: str, settings: Settings, limit: Limit) -> tuple[Config, str]:
    """The configuration that is in time, and words on it, with the forecast of a long run."""
    study = find(name)
    chosen = fitted(study, settings, limit)
    return chosen.cfg, chosen.words if spreading() else _foretold(name, study, chosen)


def _not_on_pieces(study: str) -> UsageError:
    """The sentence of a study that asks more of a model than its pieces have."""
    known = [name for name in STUDIES if find(name).on_pieces]
    return UsageError(
        f"expected a study that takes a model in pieces ({', '.join(known)}) with --parallel shards, got "
        f"{study}: it needs more of a model than products, losses and gradients",
        hint="--parallel data, probes or pieces, where every rank holds the whole model",
    )


def _on_ranks(folder: RunFolder) -> Place:
    """The folder of rank 0, for all of them."""
    from curvescope.runs.ranks.shared import OnRanks

    return OnRanks(folder)


def _kept(folder: RunFolder, out: str | Path) -> str:
    kept = folder.standing()
    return f"{kept.pieces} of {kept.total} pieces are kept under {out}"


def _asked(settings: Settings, limit: Limit) -> str:
    words = {name: word for name, word in limit._asdict().items() if word and name != "start"}
    start = {"start": _plain(limit.start)} if limit.start else {}
    return tomli_w.dumps({"version": __version__, "settings": _plain(settings), "limit": words, **start})


def _plain(settings: Settings) -> dict[str, object]:
    """As TOML has them."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items() if v is not None}


def fitted(study: Study[Config], settings: Settings, limit: Limit, *, timed: bool = True) -> Fitted:
    """The configuration that is in time, and words on it.

    Args:
        timed: whether how long it takes is wanted where nothing has to be chosen.
    """
    from curvescope.studies.fitting import Fitted, fit, limit_of

    if limit.profile == "full" and limit.budget is None and study.full is not None:
        given = {name: value for name, value in settings.items() if value is not None}
        return Fitted(study.Config.from_dict({**study.full, **given}), "")
    if study.plan is None and limit != Limit():
        raise UsageError("this study takes no --profile and no --budget: it has nothing to choose")
    cfg = study.Config.from_dict({**(limit.start or {}), **settings})
    seconds = limit_of(cfg, limit.profile, limit.budget)
    return fit(study, settings, seconds, start=limit.start) if timed or seconds else Fitted(cfg, "")


def _foretold(name: str, study: Study[Config], fitted: Fitted) -> str:
    """Words on a configuration; of one that may take more than LONG also what it is expected to take."""
    if fitted.seconds <= LONG:
        return fitted.words
    from curvescope.studies.preflight import forecast, view

    try:
        found = forecast(name, study, fitted.cfg, model=fitted.model)
    except CurvescopeError as error:  # the run will say more, or find a way
        return f"{fitted.words}\nno forecast: {error.message}"
    if found is None or found.prediction.seconds <= LONG:
        return fitted.words
    return "\n".join(filter(None, [fitted.choice, *view.lines(found)]))


def load(path: str | Path) -> tuple[dict[str, Plain | list[Plain]], Shown]:
    """Configuration (with `study` and `version`) and result of a finished run."""
    path = Path(path)
    if not (path / RESULT).exists() or not (path / CONFIG).exists():
        unfinished = (
            " (it is not finished: run the same study again to resume)" if (path / STATE).exists() else ""
        )
        raise CurvescopeError(f"expected a run folder with {CONFIG} and {RESULT}, got {path}{unfinished}")
    config = read_config(path)
    if (study := str(config.get("study"))) not in RUNS:
        find(study)  # says so
    return config, Shown.load(path)


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a run, with `study` and `version`."""
    try:
        return tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CurvescopeError(f"could not read {path / CONFIG}: {error}") from error


def chosen(path: Path) -> dict[str, Plain | list[Plain]]:
    """The settings of a run that nobody gave and that are not the study's own: chosen to be in time."""
    if not (path / ASKED).exists():
        return {}
    config = read_config(path)
    try:
        asked = tomllib.loads((path / ASKED).read_text(encoding="utf-8"))["settings"]
        own = find(config["study"]).Config.from_dict(asked).to_dict()
    except (OSError, ValueError, KeyError, UsageError):  # damaged
        return {}
    return {name: config[name] for name in own if name in config and config[name] != own[name]}

"""Run several studies of one model in sequence; reuse finished runs, and continue after a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from curvescope.core.config import Settings, Value
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import Progress
from curvescope.models.zoo import BUNDLED
from curvescope.runs.folder import Say
from curvescope.studies import find, run_study
from curvescope.studies.problem_config import ModelOnData, TokenModel, load_model, load_token_model

GEOMETRY = ("heads", "trajectory", "embeddings", "layernorm", "probes")  # studies of one stream of tokens


def unsuited(studies: list[str], given: Settings) -> dict[str, str]:
    """Return the studies that do not support the model, with the reason; raise if the model is invalid.

    Args:
        given: settings, with the model.
    """
    known = {field.name for field in fields(TokenModel)}
    cfg = {name: value for name, value in given.items() if name in known and value not in (None, [])}
    found = {}
    try:
        load_token_model(TokenModel.from_dict(cfg))
    except CurvescopeError as error:
        load_model(ModelOnData.from_dict(cfg))  # raises if the model is invalid
        found = {study: error.message for study in studies if study in GEOMETRY}
    if "dynamics" in studies and given.get("model") not in BUNDLED and not given.get("checkpoints"):
        found["dynamics"] = "expected a model with checkpoints; list them with --checkpoints"
    return found


NAMED = ("blocks", "norms")
"""Settings with names that a bundled model has and another model may not have."""


class Wanted(NamedTuple):
    """A requested study and the reason for it."""

    study: str
    why: str
    seconds: float  # estimate on one core, for the bundled model with these settings
    settings: Mapping[
        str, Value
    ] = {}  # settings of the quick profile; the full profile uses the study's defaults
    always: Mapping[str, Value] = {}  # settings of both profiles, for a bundled model

    def joined(self, other: Wanted) -> Wanted:
        """Combine two requests for the same study into one run."""
        why = self.why if other.why in self.why else f"{self.why}; {other.why}"
        settings, always = {**self.settings, **other.settings}, {**self.always, **other.always}
        return Wanted(self.study, why, max(self.seconds, other.seconds), settings, always)


class Made(NamedTuple):
    """Run folders and errors, by study name."""

    folders: dict[str, Path]
    failed: dict[str, Exception]


Begin = Callable[[int, Wanted], None]
"""Called when a study begins, with its number from 1."""
Fail = Callable[[Wanted, Exception], None]
"""Called when a study has failed."""


def run_all(
    wanted: Sequence[Wanted],
    given: Settings,
    *,
    out: Path,
    profile: str = "quick",
    force: bool = False,
    strict: bool = False,
    begin: Begin = lambda number, one: None,
    fail: Fail = lambda one, error: None,
    progress: Progress | None = None,
    say: Say = lambda line: None,
    tell: Say | None = None,
) -> Made:
    """Run the studies in order, each in its own folder under `out`.

    Args:
        given: settings for every study that has a setting of that name; includes `model`.
        profile: quick uses the settings of `wanted`, and smaller ones if a model that is not bundled would
            take more than a minute; full uses the defaults of the studies.
        strict: raise the first error; otherwise skip a study that fails.
    """
    made = Made({}, {})
    for number, one in enumerate(wanted, start=1):
        begin(number, one)
        try:
            settings, limit = _settings(one, given, profile)
            made.folders[one.study] = run_study.run(
                one.study, settings, out=out, progress=progress, say=say, tell=tell, force=force, limit=limit
            )[0]
        except Exception as error:
            if strict:
                raise
            made.failed[one.study] = error
            fail(one, error)
    return made


def _settings(one: Wanted, given: Settings, profile: str) -> tuple[Settings, run_study.Limit | None]:
    """Return the settings of a study and its time limit."""
    study = find(one.study)
    known = {field.name for field in fields(study.Config)}
    own = {name: value for name, value in given.items() if name in known and value not in (None, [])}
    quick = {} if profile == "full" else {name: v for name, v in one.settings.items() if name not in own}
    if given.get("model") in BUNDLED:
        return {**one.always, **quick, **own}, None
    quick = {name: value for name, value in quick.items() if name not in NAMED}
    return ({**quick, **own}, None) if study.plan is None else (own, run_study.Limit(profile, start=quick))

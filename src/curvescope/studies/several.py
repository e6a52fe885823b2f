"""Several studies of one model, one behind the other: what is finished is found, a failure stops no other."""

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
from curvescope.studies import find, folder
from curvescope.studies.setting import ModelOnData, TokenModel, load_model, load_token_model

GEOMETRY = ("heads", "trajectory", "embeddings", "layernorm", "probes")  # studies of one stream of tokens


def unsuited(studies: list[str], given: Settings) -> dict[str, str]:
    """The studies among these that the model is not made for, with the reason; a bad model is an error.

    Args:
        given: settings, with the model.
    """
    known = {field.name for field in fields(TokenModel)}
    cfg = {name: value for name, value in given.items() if name in known and value not in (None, [])}
    found = {}
    try:
        load_token_model(TokenModel.from_dict(cfg))
    except CurvescopeError as error:
        load_model(ModelOnData.from_dict(cfg))  # raises where it is no model at all
        found = {study: error.message for study in studies if study in GEOMETRY}
    if "dynamics" in studies and given.get("model") not in BUNDLED and not given.get("checkpoints"):
        found["dynamics"] = "a model without checkpoints has no course; --checkpoints names them"
    return found


NAMED = ("blocks", "norms")
"""Settings that name what a bundled model has, and another one may not."""


class Wanted(NamedTuple):
    """A study that is wanted, and why."""

    study: str
    why: str
    seconds: float  # of one core, for the bundled model with these settings: how it compares with others
    settings: Mapping[str, Value] = {}  # of the quick profile; full has the study's own
    always: Mapping[str, Value] = {}  # of both, for a bundled model

    def joined(self, other: Wanted) -> Wanted:
        """Both in one run."""
        why = self.why if other.why in self.why else f"{self.why}; {other.why}"
        settings, always = {**self.settings, **other.settings}, {**self.always, **other.always}
        return Wanted(self.study, why, max(self.seconds, other.seconds), settings, always)


class Made(NamedTuple):
    """What came of them, by the names of studies."""

    folders: dict[str, Path]
    failed: dict[str, Exception]


Begin = Callable[[int, Wanted], None]
"""Called with the number of a study, from 1, as it begins."""
Fail = Callable[[Wanted, Exception], None]
"""Called as a study has failed."""


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
    """Run the studies in their order, each in a folder of its own under `out`.

    Args:
        given: settings for every study that has one of the name; `model` among them.
        profile: quick takes the settings of `wanted`, or less where a study of a model that is not bundled
            would take more than a minute; full the studies' own.
        strict: raise the first error; else a study that fails is left behind.
    """
    made = Made({}, {})
    for number, one in enumerate(wanted, start=1):
        begin(number, one)
        try:
            settings, limit = _settings(one, given, profile)
            made.folders[one.study] = folder.run(
                one.study, settings, out=out, progress=progress, say=say, tell=tell, force=force, limit=limit
            )[0]
        except Exception as error:
            if strict:
                raise
            made.failed[one.study] = error
            fail(one, error)
    return made


def _settings(one: Wanted, given: Settings, profile: str) -> tuple[Settings, folder.Limit | None]:
    """What a study is given, and how long it may take."""
    study = find(one.study)
    known = {field.name for field in fields(study.Config)}
    own = {name: value for name, value in given.items() if name in known and value not in (None, [])}
    quick = {} if profile == "full" else {name: v for name, v in one.settings.items() if name not in own}
    if given.get("model") in BUNDLED:
        return {**one.always, **quick, **own}, None
    quick = {name: value for name, value in quick.items() if name not in NAMED}
    return ({**quick, **own}, None) if study.plan is None else (own, folder.Limit(profile, start=quick))

"""A run folder as the page reads it: settings, result, environment, and where its files are from the page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from curvescope.data.corpora import CORPORA
from curvescope.runs.folder import ENVIRONMENT
from curvescope.runs.listing import start_time
from curvescope.runs.study_result import Shown
from curvescope.studies import run_study

IMAGES = "digits"  # what models that see are given, also in the place of a text


class Sheet(NamedTuple):
    """Path of the page, and the largest size of a drawing on it."""

    page: Path
    largest: int


@dataclass(frozen=True)
class Read:
    """A finished run."""

    number: int  # among the runs of a page, from 1
    path: Path
    study: str
    settings: dict[str, Any]
    version: str
    result: Shown
    env: dict[str, str]
    begun: datetime
    called: str = ""  # its model, by as much of the path as tells it from others; "": by the last part

    @property
    def model(self) -> str:
        """`tiny-gpt@early`: its name and revision; "" where the run has no model of its own."""
        name, revision = self.called or _path(self).name, self.settings.get("revision")
        return f"{name}@{revision}" if name and revision else name

    @property
    def subjects(self) -> list[str]:
        """The models that it is about."""
        return self.result.subjects() or [name for name in (self.model,) if name]

    @property
    def asked(self) -> tuple[str, ...]:
        """The settings that choose the sample: runs that agree in them saw the same one."""
        return self._data, *(str(self.settings.get(name)) for name in ("model", "tokens", "seq_len", "seed"))

    @property
    def terms(self) -> float | None:
        """Number of terms of the loss; None if the result does not have it."""
        found = getattr(self.result, "num_terms", None)
        return float(found) if isinstance(found, int | float) else None

    @property
    def sample(self) -> str:
        """Describe the sample: `128 tokens of sample`, `2 terms of digits`; "" for no data, or several
        samples.

        Without a count in the result the setting stands for it where it is what was taken: for a corpus.
        """
        data, tokens, terms = self._data, self.settings.get("tokens"), self.terms
        if not data or self.settings.get("datasets"):
            return ""
        if ":" in data or not isinstance(tokens, int):
            return data
        if terms is None:
            return f"{tokens:,} tokens of {data}" if data in CORPORA else data
        return f"{terms:,.0f} {'tokens' if terms == tokens else 'terms'} of {data}"

    @property
    def _data(self) -> str:
        """Last part of the requested name, or of the name that a model was given instead."""
        data, told = Path(str(self.settings.get("data") or "")).name, str(getattr(self.result, "data", ""))
        return told.removeprefix("text:") if data == "auto" or (data and told == IMAGES) else data

    @property
    def source(self) -> str:
        """`spectrum/20260101-120000-0123abcd`."""
        return f"{self.path.parent.name}/{self.path.name}"


def read(path: Path, number: int) -> Read:
    """The run in a folder."""
    config, result = run_study.load(path)
    return Read(
        number=number,
        path=path,
        study=str(config.pop("study")),
        version=str(config.pop("version", "")),
        settings=config,
        result=result,
        env=read_env(path / ENVIRONMENT),
        begun=start_time(path),
    )


def told_apart(runs: Sequence[Read]) -> list[Read]:
    """The same runs, models of one name called by as many last parts of their paths as tell them apart."""
    shared: dict[str, set[Path]] = {}
    for run in runs:
        shared.setdefault(_path(run).name, set()).add(_path(run))
    names: dict[Path, str] = {}
    for paths in shared.values():
        longest = max(len(path.parts) for path in paths)
        for parts in range(1, longest + 1):
            tails = {path: str(Path(*path.parts[-parts:])) for path in paths}
            names |= tails
            if len(set(tails.values())) == len(paths):
                break
    return [replace(run, called=names[_path(run)]) if _path(run).name else run for run in runs]


def _path(run: Read) -> Path:
    """Path or name of the model."""
    return Path(str(run.settings.get("model", "")))


def read_env(path: Path) -> dict[str, str]:
    """Versions and machine; nothing where the file is missing or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def link(path: Path, page: Path) -> str:
    """Address of a file from the page; "" if the file does not exist or cannot be reached."""
    if not path.is_file():
        return ""
    try:
        return quote(Path(os.path.relpath(path, page.parent)).as_posix())
    except ValueError:  # another drive
        return ""

"""A run folder as the page reads it: settings, result, environment, and where its files are from the page."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from curvescope.runs.folder import ENVIRONMENT
from curvescope.runs.listing import begun
from curvescope.runs.shown import Shown
from curvescope.studies import folder


class Sheet(NamedTuple):
    """What everything on a page has to fit: where the file is, and how large a drawing in it may be."""

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

    @property
    def model(self) -> str:
        """`tiny-gpt@early`: its name and revision; "" where the run has no model of its own."""
        name, revision = Path(str(self.settings.get("model", ""))).name, self.settings.get("revision")
        return f"{name}@{revision}" if name and revision else name

    @property
    def subjects(self) -> list[str]:
        """The models that it is about."""
        return self.result.subjects() or [name for name in (self.model,) if name]

    @property
    def sample(self) -> str:
        """`128 tokens of sample`: what it was measured on; "" where it has no data, or several."""
        data, tokens = Path(str(self.settings.get("data") or "")).name, self.settings.get("tokens")
        if data == "auto":
            data = str(getattr(self.result, "data", "")).removeprefix("text:")
        if not data or self.settings.get("datasets"):
            return ""
        return f"{tokens:,} tokens of {data}" if isinstance(tokens, int) and ":" not in data else data

    @property
    def source(self) -> str:
        """`spectrum/20260101-120000-0123abcd`."""
        return f"{self.path.parent.name}/{self.path.name}"


def read(path: Path, number: int) -> Read:
    """The run in a folder."""
    config, result = folder.load(path)
    return Read(
        number=number,
        path=path,
        study=str(config.pop("study")),
        version=str(config.pop("version", "")),
        settings=config,
        result=result,
        env=read_env(path / ENVIRONMENT),
        begun=begun(path),
    )


def read_env(path: Path) -> dict[str, str]:
    """Versions and machine; nothing where the file is missing or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def link(path: Path, page: Path) -> str:
    """The address of a file from the page; "" where there is no such file, or no way to it."""
    if not path.is_file():
        return ""
    try:
        return quote(Path(os.path.relpath(path, page.parent)).as_posix())
    except ValueError:  # another drive
        return ""

"""What the figures of all papers are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from curvescope.core.config import Config, setting

Profile = Literal["quick", "full"]


@dataclass(frozen=True)
class FigureConfig(Config):
    """How hard to work, and where. A figure that is exact and quick anyway is the same in both profiles."""

    profile: Profile = setting("quick", "quick takes minutes, full has the paper's own repeats")
    replay: bool = setting(False, "the paper's own random streams, where a figure does not use them anyway")
    device: str = setting("cpu", "cpu, cuda, …")

"""What the figures of all papers are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from curvescope.core.config import Config

Profile = Literal["quick", "full"]


@dataclass(frozen=True)
class FigureConfig(Config):
    """How hard to work, and where. A figure that is exact and quick anyway is the same in both profiles."""

    profile: Profile = "quick"
    replay: bool = False  # the paper's own random streams, where a figure does not use them anyway
    device: str = "cpu"

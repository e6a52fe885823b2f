"""What the study is told: which configurations, of which size, for how long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.studies.why_adam.networks import CHOICES, HEADS, Size
from curvescope.studies.why_adam.work import APART, CHECKPOINTS, EVALUATED, LOOKS



class Profile(NamedTuple):
    """What a run of the study has unless a setting says otherwise."""

    size: Size
    seeds: int
    steps: int
    batch_size: int


PROFILES = {
    "quick": Profile(Size(width=16, layers=1, digits=2), seeds=5, steps=400, batch_size=16),
    "full": Profile(Size(width=16, layers=2, digits=3), seeds=8, steps=2000, batch_size=32),
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """What is trained. The defaults take a few minutes on a CPU."""

    scale: Literal["quick", "full"] = setting("quick", "minutes on a CPU; full: deeper, longer, more seeds")
    configurations: tuple[str, ...] = setting(tuple(CHOICES), "of those that are known")
    seeds: int = setting(0, "of weights and batches; 0: the scale's, 5 or 8")
    steps: int = setting(0, "of every run; 0: the scale's, 400 or 2000")
    width: int = setting(0, "of the Transformers' stream, even; MLPs have twice as much; 0: the scale's, 16")
    batch_size: int = setting(0, "sums of a step; 0: the scale's, 16 or 32")
    measured: int = setting(16, "sums whose loss has the curvature that is measured")
    draws: int = setting(2000, "of the bootstrap")
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "of everything random")

    def __post_init__(self) -> None:
        as_tuples(self, "configurations")
        super().__post_init__()
        at_least(self, 0, "batch_size", "width")
        at_least(self, 2, "measured")
        at_least(self, 50, "draws")
        for name, fewest in {"seeds": 3, "steps": 40}.items():
            if getattr(self, name):
                at_least(self, fewest, name)
        for name in self.configurations:
            if name not in CHOICES:
                raise UsageError(f"configurations: unknown {name!r}", hint=near_misses(name, list(CHOICES)))
        if not self.configurations or len(set(self.configurations)) < len(self.configurations):
            raise UsageError(f"expected some configurations, each once, got {self.configurations}")
        if self.width % HEADS:
            raise UsageError(f"width: expected a multiple of {HEADS}, got {self.width}")
        if self.measured > EVALUATED:
            raise UsageError(f"measured: expected at most {EVALUATED}, got {self.measured}")

    @property
    def profile(self) -> Profile:
        """The scale, with what was set in its place."""
        own = PROFILES[self.scale]
        return Profile(
            replace(own.size, width=self.width or own.size.width),
            self.seeds or own.seeds,
            self.steps or own.steps,
            self.batch_size or own.batch_size,
        )

    def after(self, shares: tuple[float, ...]) -> list[int]:
        """Steps of shares of a run."""
        return [round(share * self.profile.steps) for share in shares]

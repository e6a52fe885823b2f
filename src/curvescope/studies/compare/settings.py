"""What is compared and how hard it is looked at."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.models.zoo.names import BUNDLED, REVISIONS
from curvescope.studies.gap.pair import Effort
from curvescope.studies.setting import ModelOnData

AT = "@"  # between a model and its revision


class Asked(NamedTuple):
    """One of the things to compare: its name, and where it comes from."""

    name: str
    cfg: ModelOnData


@dataclass(frozen=True)
class Config(ModelOnData):
    """Two or more models on the same data, or one model on two or more. About a minute on a CPU."""

    tokens: int = setting(256, "of a text; labeled texts and images: ⌈tokens / seq_len⌉ of them")
    models: tuple[str, ...] = setting(
        (), "two or more, a checkpoint as NAME@REVISION; the first is what others are compared with"
    )
    datasets: tuple[str, ...] = setting((), "two or more for one model, in the place of data")
    blocks: tuple[str, ...] = setting((), "globs of blocks to compare; by default the matrices")
    num_probes: int = setting(8, "random vectors of traces and norms of the whole")
    num_steps: int = setting(24, "Lanczos steps for both ends of the whole")
    num_density_probes: int = setting(3, "random vectors of each density; 0: no densities")
    num_density_steps: int = setting(20, "Lanczos steps of each of them, at least 3")
    num_block_probes: int = setting(4, "random vectors of each block")
    num_block_steps: int = setting(8, "Lanczos steps of each block")
    max_exact: int = setting(64, "what has at most so many entries is written out, not estimated")

    def __post_init__(self) -> None:
        as_tuples(self, "models", "datasets", "blocks")
        super().__post_init__()
        at_least(self, 2, "num_probes", "num_block_probes")
        at_least(self, 1, "num_steps", "num_block_steps")
        at_least(self, 0, "num_density_probes", "max_exact")
        at_least(self, 3, "num_density_steps")
        self._check()
        first = self.asked()[0].cfg
        for name in ("model", "revision", "data"):  # those of the first, for whoever asks for one
            object.__setattr__(self, name, getattr(first, name))

    def _check(self) -> None:
        own = next(field.default for field in fields(ModelOnData) if field.name == "model")
        if len(self.models) > 1 and len(self.datasets) > 1:
            raise UsageError("expected several models or several datasets, got several of both")
        if self.models and self.model not in (own, split(self.models[0])[0]):
            raise UsageError(f"expected models alone, got model={self.model!r} too", hint="leave it out")
        doubled = [name for side in (self.models, self.datasets) for name in side if side.count(name) > 1]
        if doubled:
            raise UsageError(f"expected different things to compare, got {doubled[0]!r} twice")
        if len(self.asked()) < 2:
            raise UsageError(
                f"expected two or more models or datasets, got {self.asked()[0].name!r} alone",
                hint="curvescope compare tiny-gpt@initial tiny-gpt@final",
            )

    def asked(self) -> list[Asked]:
        """Models, or data sets; of a bundled model alone, how it was before training and how it is after."""
        plain = ModelOnData(**{field.name: getattr(self, field.name) for field in fields(ModelOnData)})
        models = self.models
        if not models and len(self.datasets) < 2 and self.model in BUNDLED:
            models = tuple(f"{self.model}{AT}{revision}" for revision in (REVISIONS[0], REVISIONS[-1]))
        if len(models) > 1:
            data = self.datasets[0] if self.datasets else self.data
            pairs = zip(short(models), map(split, models), strict=True)
            return [Asked(n, replace(plain, model=m, revision=r, data=data)) for n, (m, r) in pairs]
        model, revision = split(models[0]) if models else (self.model, self.revision)
        one = replace(plain, model=model, revision=revision)
        if not self.datasets:
            return [Asked(models[0] if models else model, one)]
        names = zip(short(self.datasets), self.datasets, strict=True)
        return [Asked(name, replace(one, data=data)) for name, data in names]

    def effort(self) -> Effort:
        """Of the whole."""
        return Effort(
            self.num_probes,
            self.num_steps,
            self.num_density_probes,
            self.num_density_steps,
            self.max_exact,
            self.seed,
        )


def short(names: tuple[str, ...]) -> tuple[str, ...]:
    """The last parts of paths, where these tell them apart."""
    last = tuple(Path(name).name or name for name in names)
    return last if len(set(last)) == len(last) else names


def split(name: str) -> tuple[str, str | None]:
    """`tiny-gpt@early` is the model tiny-gpt at its revision early; a file of that name is a file."""
    model, at, revision = name.rpartition(AT)
    if not at or not model or not revision or Path(name).exists():
        return name, None
    return model, revision

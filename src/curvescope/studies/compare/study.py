"""Models, checkpoints or data sets side by side, each against the first: how their curvature differs.

Every side is measured with the same random vectors on the same sample of the data, one model in memory at a
time: H, its GGN H_o and H_f = H − H_o as a whole (`gap.pair`), and every diagonal block of H that
is chosen (`algorithms.blocks.probes`). Blocks are matched by name. Pieces are stored in `state` as they are
done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.blocks.probes import OwnProbes, own_probes
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.study import Cost, Plan
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.compare.analysis import OF_BLOCKS, QUANTITIES, Estimate
from curvescope.studies.gap.analysis import ALL, Effort, Pair, measure_pair
from curvescope.studies.setting import ModelOnData, make_problem, notes_of

if TYPE_CHECKING:
    pass

MOST = 8  # blocks that are named in a note


def comparison_notes(cfg: Config, found: Comparison, own: list[str]) -> list[str]:
    """What a reader should know of how these were compared."""
    said = list(own)
    several = len(cfg.datasets) < 2
    if several and not found.alike:
        counts = " and ".join(f"{side.num_terms:g} ({side.name})" for side in found.sides)
        said.append(
            "the models read the data as different tokens or targets, so that neither losses, which are per "
            f"term, nor what follows from them are of one scale; terms: {counts}"
        )
    for side, names in found.alone.items():
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        said.append(
            f"only {side} has {', '.join(names[:MOST])}{more}: without a partner, they are not compared"
        )
    said.append(
        "intervals are those of the estimates on this sample of the data; what another sample would change "
        "is not in them (--seed draws another)"
    )
    return said


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


# ------------------------------------------------------------------------------------------------------ study

MATRICES = ("E", "P", "L*.W_*", "U", "W_*")  # the blocks by default; all where none is there


@dataclass(frozen=True)
class Side(Result):
    """One model on one set of data."""

    name: str
    model: str
    data: str
    num_terms: float
    num_parameters: int
    whole: Pair
    blocks: dict[str, OwnProbes]
    sizes: np.ndarray  # entries of each block

    def quantity(self, name: str, block: str = "") -> Estimate:
        """One of QUANTITIES, or of OF_BLOCKS of a block."""
        return OF_BLOCKS[name](self.blocks[block]) if block else QUANTITIES[name](self.whole)


@dataclass(frozen=True)
class Comparison(Shown):
    """All sides; the first is what others are compared with."""

    loss_name: str
    sides: list[Side]
    alike: bool  # whether all saw the same tokens
    on_data: bool | None = None  # whether sides are data sets; None: as the names of their data tell

    @property
    def blocks(self) -> list[str]:
        """Blocks that all sides have, in the order of the first."""
        return [name for name in self.sides[0].blocks if all(name in side.blocks for side in self.sides)]

    @property
    def alone(self) -> dict[str, list[str]]:
        """Blocks that some side does not have, by the sides that have them."""
        shared = set(self.blocks)
        found = {side.name: [name for name in side.blocks if name not in shared] for side in self.sides}
        return {name: blocks for name, blocks in found.items() if blocks}

    def difference(self, side: int, name: str, block: str = "") -> Estimate:
        """A quantity of a side less that of the first."""
        return self.sides[side].quantity(name, block).minus(self.sides[0].quantity(name, block))

    def ratio(self, side: int, name: str, block: str = "") -> Estimate:
        """A quantity of a side over that of the first."""
        return self.sides[side].quantity(name, block).over(self.sides[0].quantity(name, block))

    def subjects(self) -> list[str]:
        """The models, or the model on each of the data sets."""
        models, data = ({getattr(side, what) for side in self.sides} for what in ("model", "data"))
        on_data = len(models) == 1 and len(data) > 1 if self.on_data is None else self.on_data
        return [f"{side.model} on {side.name}" if on_data else side.name for side in self.sides]


class Seen(NamedTuple):
    """What is known of a side before it is measured."""

    asked: Asked
    model: str
    data: str
    loss_name: str
    num_terms: float
    num_parameters: int
    blocks: dict[str, int]  # their entries
    batches: str  # fingerprints
    contents: str
    notes: list[str]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Comparison:
    """Measure every side.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    seen = [look(cfg, asked) for asked in cfg.asked()]

    @lru_cache(maxsize=1)
    def problem(side: int) -> Problem:
        return make_problem(seen[side].asked.cfg)

    pieces = [piece for side in range(len(seen)) for piece in _pieces(cfg, seen, side, problem)]
    contents = fingerprint(*(one.contents for one in seen))
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    sides = [_side(one, i, found) for i, one in enumerate(seen)]
    alike = len({one.batches for one in seen}) == 1
    result = Comparison(seen[0].loss_name, sides, alike, on_data=len(cfg.datasets) > 1)
    return replace(result, notes=comparison_notes(cfg, result, _notes(seen)))


def look(cfg: Config, asked: Asked) -> Seen:
    """Load a side, check it, and let it go."""
    problem = make_problem(asked.cfg)
    return Seen(
        asked,
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        num_terms=problem.num_terms,
        num_parameters=problem.model.size_of(*problem.space()),
        blocks=chosen_blocks(cfg, problem),
        batches=fingerprint(problem.batches),
        contents=fingerprint(problem.model, problem.batches),
        notes=notes_of(asked.cfg, problem),
    )


def chosen_blocks(cfg: Config, problem: Problem) -> dict[str, int]:
    """The blocks that are compared, with their entries; a glob that matches nothing is an error."""
    chosen = problem.space(*(cfg.blocks or ("*",)))
    blocks = {block.name: problem.model.size_of(block) for block in chosen}
    matrices = {n: size for n, size in blocks.items() if any(fnmatchcase(n, glob) for glob in MATRICES)}
    return blocks if cfg.blocks or not matrices else matrices


def _pieces(cfg: Config, seen: Sequence[Seen], side: int, problem: Callable[[int], Problem]) -> list[Piece]:
    """The whole of a side, then its blocks."""
    name = seen[side].asked.name

    def whole() -> Result:
        return measure_pair(problem(side), ALL, cfg.effort(), keep=True)

    def of_block(block: str) -> Result:
        return own_probes(
            Hessian(problem(side), block),
            num_probes=cfg.num_block_probes,
            num_steps=cfg.num_block_steps,
            max_exact=cfg.max_exact,
            seed=cfg.seed,
        )

    found = [Piece(f"side{side}.whole", whole, f"{name}: H, GGN and functional Hessian")]
    for number, block in enumerate(seen[side].blocks):
        found.append(Piece(f"side{side}.block{number}", partial(of_block, block), f"{name}: {block}"))
    return found


def _side(one: Seen, number: int, found: Finished) -> Side:
    return Side(
        name=one.asked.name,
        model=one.model,
        data=one.data,
        num_terms=one.num_terms,
        num_parameters=one.num_parameters,
        whole=found.take(Pair, f"side{number}.whole"),
        blocks={name: found.take(OwnProbes, f"side{number}.block{i}") for i, name in enumerate(one.blocks)},
        sizes=np.array(list(one.blocks.values())),
    )


def _notes(seen: Sequence[Seen]) -> list[str]:
    """Those of all sides as they are, those of some with their names."""
    shared = [note for note in seen[0].notes if all(note in one.notes for one in seen)]
    return shared + [f"{one.asked.name}: {note}" for one in seen for note in one.notes if note not in shared]


# ------------------------------------------------------------------------------------------------------- plan

OF_BLOCK = 1 / 3  # of a product of the whole operator: nothing outside the block is differentiated


def cost(cfg: Config, problem: Problem) -> Cost:
    """H, H_o and H_f of the whole, and H of every block, on every side."""
    sizes = chosen_blocks(cfg, problem).values()
    each = cfg.num_block_probes + cfg.num_block_steps
    own = sum(size if size <= max(cfg.max_exact, each) else each for size in sizes)
    density = cfg.num_density_probes * cfg.num_density_steps
    whole = 3 * cfg.num_probes + 2 * (cfg.num_steps + density)
    size = problem.model.size_of(*problem.space())
    if size <= max(cfg.max_exact, cfg.num_probes + cfg.num_steps):
        whole = 5 * size
    sides = len(cfg.asked())
    return Cost(sides * (1 + len(sizes)), sides * (whole + OF_BLOCK * own), graphs=sides * (3 + len(sizes)))


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 128},
        {"tokens": 128, "num_probes": 6, "num_steps": 16, "num_density_probes": 2, "num_block_probes": 3},
        {
            "tokens": 64, "num_probes": 4, "num_steps": 12, "num_density_probes": 2, "num_density_steps": 12,
            "num_block_probes": 3, "num_block_steps": 6,
        },
        {
            "tokens": 32, "num_probes": 3, "num_steps": 8, "num_density_probes": 0, "num_block_probes": 2,
            "num_block_steps": 4,
        },
    ),
)  # fmt: skip

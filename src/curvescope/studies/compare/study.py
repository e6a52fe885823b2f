"""Comparison of models, checkpoints or data sets with the first of them: how their curvature differs.

Every side is measured with the same random vectors on the same sample of the data, one model in memory at a
time: the full H, its GGN H_o and H_f = H − H_o (`gap.pair`), and every chosen diagonal block of H
(`algorithms.blocks.probes`). Blocks are matched by name. Finished pieces are stored in `state`.

Intervals of differences and ratios.

For a quantity with value, low and high on the sides a and b,

    the difference  b − a  is in  [low_b − high_a, high_b − low_a],
    the ratio       b / a  is in  [low_b / high_a, high_b / low_a],

the latter if both are above zero. For estimates with normal errors this holds at least as often as each
interval, whatever random vectors the two share, because the error of b − a is at most the sum of both errors.
Quantities of the whole also have a sampling error: half of the interval over other data is added in
quadrature. It comes from differences group by group if both sides read the same sequences. A difference is
decided if its interval excludes zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from curvescope.algorithms.blocks.probes import Ends, OwnProbes, own_probes
from curvescope.algorithms.estimates.intervals import student
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.operators import GGN, Hessian
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study import Plan, Step
from curvescope.runs.study_result import Shown
from curvescope.sampling import Sampled, half_of_difference
from curvescope.studies.common.planning import (
    PlannedMatrix,
    lanczos,
    planned_own_probes,
    probed,
    sampled_ends,
)
from curvescope.studies.common.sampling import (
    NUM_PROBES,
    SampledNumbers,
    sampled_loss,
    sampled_sharpness,
    sampled_sums,
)
from curvescope.studies.gap.analysis import ALL, Pair, ProbeEffort, measure_pair, planned_pairs
from curvescope.studies.problem_config import ModelOnData, SampledOnData, make_problem, notes_of

LARGER, SMALLER, EQUAL, OPEN = "larger", "smaller", "equal", "not decided"


class Estimate(NamedTuple):
    """A number and its 95 % interval; both ends are nan if unknown."""

    value: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Half width of the interval on its wider side."""
        return max(self.value - self.low, self.high - self.value)

    def minus(self, other: Estimate) -> Estimate:
        """Difference of two estimates."""
        return Estimate(self.value - other.value, self.low - other.high, self.high - other.low)

    def over(self, other: Estimate) -> Estimate:
        """Ratio of two estimates; nan unless both are positive; 0 or infinite ends if 0 is inside."""
        if not (self.value > 0 and other.value > 0):
            return Estimate(math.nan, math.nan, math.nan)
        low = max(self.low, 0.0) / other.high if other.high > 0 else math.nan
        high = self.high / other.low if other.low > 0 else math.inf
        return Estimate(self.value / other.value, low, math.nan if math.isnan(other.low) else high)

    def widened(self, half: float) -> Estimate:
        """Add half an interval over samples to the own interval, in quadrature; nan adds nothing."""
        if math.isnan(half):
            return self
        low = self.value - math.hypot(self.value - self.low, half)
        return Estimate(self.value, low, self.value + math.hypot(self.high - self.value, half))

    def stretched(self, half: float) -> Estimate:
        """Return `widened` for the logarithm of a positive number."""
        if math.isnan(half) or not self.low > 0 or not math.isfinite(self.high):
            return self
        value, low, high = (math.log(x) for x in self)
        return Estimate(*(math.exp(x) for x in Estimate(value, low, high).widened(half)))

    @property
    def verdict(self) -> str:
        """Verdict on a difference: larger, smaller, equal or not decided."""
        if self.value == self.low == self.high == 0:
            return EQUAL
        return LARGER if self.low > 0 else SMALLER if self.high < 0 else OPEN


def _loss(pair: Pair) -> Estimate:
    return Estimate(pair.loss, pair.loss, pair.loss)


def _ends(found: OwnProbes) -> Ends:
    assert found.ends is not None
    return found.ends


def top(found: OwnProbes) -> Estimate:
    """Estimate of λ_max; the Lanczos value is its lower end."""
    ends = _ends(found)
    return Estimate(float(ends.values[1]), float(ends.values[1]), float(ends.high))


def bottom(found: OwnProbes) -> Estimate:
    """Estimate of λ_min; the Lanczos value is its upper end."""
    ends = _ends(found)
    return Estimate(float(ends.values[0]), float(ends.low), float(ends.values[0]))


def trace(found: OwnProbes) -> Estimate:
    """Estimate of the trace."""
    return Estimate(found.trace, found.trace_low, found.trace_high)


def norm(found: OwnProbes) -> Estimate:
    """Estimate of the Frobenius norm."""
    return Estimate(found.norm, found.norm_low, found.norm_high)


def _share(pair: Pair) -> Estimate:
    value, error = pair.share()
    half = 0.0 if error == 0 else student(len(pair.hessian.squared_samples) - 1) * error
    return Estimate(value, max(value - half, 0.0), value + half)


def _gap(pair: Pair) -> Estimate:
    return Estimate(pair.gap().value, *pair.gap_interval())


QUANTITIES: Mapping[str, Callable[[Pair], Estimate]] = {
    "loss": _loss,
    "λ_max": lambda pair: top(pair.hessian),
    "λ_min": lambda pair: bottom(pair.hessian),
    "trace": lambda pair: trace(pair.hessian),
    "‖H‖_F": lambda pair: norm(pair.hessian),
    "λ_max of the GGN": lambda pair: top(pair.ggn),
    "trace of the GGN": lambda pair: trace(pair.ggn),
    "functional share": _share,
    "λ_max gap": _gap,
}
"""Quantities of a whole model, in the order of tables and figures."""
OF_BLOCKS: Mapping[str, Callable[[OwnProbes], Estimate]] = {"λ_max": top, "trace": trace, "‖H‖_F": norm}
"""Quantities of a diagonal block of the Hessian."""


MOST = 8  # maximum number of blocks named in a note


def comparison_notes(cfg: Config, found: Comparison, own: list[str]) -> list[str]:
    """Return notes on the conditions of the comparison."""
    said = list(own)
    several = len(cfg.datasets) < 2
    if several and not found.alike:
        counts = " and ".join(f"{side.num_terms:g} ({side.name})" for side in found.sides)
        said.append(
            "the models tokenize the data differently, so losses per term and all numbers derived from "
            f"them have different scales; terms: {counts}"
        )
    for side, names in found.alone.items():
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        said.append(f"only {side} has {', '.join(names[:MOST])}{more}; these are not compared")
    measured = set.intersection(*(set(side.sampled) for side in found.sides))
    said.append(
        f"differences of {', '.join(name for name in QUANTITIES if name in measured)} include the "
        "sampling error (variation between samples of this size); other intervals cover only the "
        "numerical error on this sample (--seed draws another)"
        if measured
        else "intervals cover only the numerical error on this sample of the data, not the variation "
        "between samples (--seed draws another sample)"
    )
    return said


AT = "@"  # separator of a model and its revision


class SideSource(NamedTuple):
    """Name and source of one side of the comparison."""

    name: str
    cfg: SampledOnData


@dataclass(frozen=True)
class Config(SampledOnData):
    """Two or more models on the same data, or one model on two or more data sets. About a minute on a CPU."""

    tokens: int = setting(256, "tokens of a text; of labeled texts and images, ⌈tokens / seq_len⌉ items")
    models: tuple[str, ...] = setting(
        (), "two or more models, a checkpoint as NAME@REVISION; the others are compared with the first"
    )
    datasets: tuple[str, ...] = setting((), "two or more data sets for one model, instead of data")
    blocks: tuple[str, ...] = setting((), "globs of blocks to compare; by default the matrices")
    num_probes: int = setting(8, "random vectors for traces and norms of the whole model", least=2)
    num_steps: int = setting(24, "Lanczos steps for both ends of the whole spectrum", least=1)
    num_density_probes: int = setting(3, "random vectors of each density; 0: no densities", least=0)
    num_density_steps: int = setting(20, "Lanczos steps of each density, at least 3", least=3)
    num_block_probes: int = setting(4, "random vectors of each block", least=2)
    num_block_steps: int = setting(8, "Lanczos steps of each block", least=1)
    max_exact: int = setting(
        64, "blocks with at most so many entries are computed in full, not estimated", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check()
        first = self.asked()[0].cfg
        for name in ("model", "revision", "data"):  # code that reads a single model gets the first
            object.__setattr__(self, name, getattr(first, name))

    def _check(self) -> None:
        own = next(field.default for field in fields(ModelOnData) if field.name == "model")
        if len(self.models) > 1 and len(self.datasets) > 1:
            raise UsageError("expected several models or several datasets, got both")
        if self.models and self.model not in (own, split(self.models[0])[0]):
            raise UsageError(f"expected only models, got model={self.model!r} too", hint="remove model")
        doubled = [name for side in (self.models, self.datasets) for name in side if side.count(name) > 1]
        if doubled:
            raise UsageError(f"expected different things to compare, got {doubled[0]!r} twice")
        if len(self.asked()) < 2:
            raise UsageError(
                f"expected two or more models or datasets, got only {self.asked()[0].name!r}",
                hint="curvescope compare tiny-gpt@initial tiny-gpt@final",
            )

    def asked(self) -> list[SideSource]:
        """Return the models or data sets; a single bundled model is compared with its untrained one."""
        plain = SampledOnData(**{field.name: getattr(self, field.name) for field in fields(SampledOnData)})
        models = self.models
        if not models and len(self.datasets) < 2 and self.model in BUNDLED:
            models = tuple(f"{self.model}{AT}{revision}" for revision in (REVISIONS[0], REVISIONS[-1]))
        if len(models) > 1:
            data = self.datasets[0] if self.datasets else self.data
            pairs = zip(short(models), map(split, models), strict=True)
            return [SideSource(n, replace(plain, model=m, revision=r, data=data)) for n, (m, r) in pairs]
        model, revision = split(models[0]) if models else (self.model, self.revision)
        one = replace(plain, model=model, revision=revision)
        if not self.datasets:
            return [SideSource(models[0] if models else model, one)]
        names = zip(short(self.datasets), self.datasets, strict=True)
        return [SideSource(name, replace(one, data=data)) for name, data in names]

    def effort(self) -> ProbeEffort:
        """Probes and steps for the whole model."""
        return ProbeEffort(
            self.num_probes,
            self.num_steps,
            self.num_density_probes,
            self.num_density_steps,
            self.max_exact,
            self.seed,
        )


def short(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the last parts of paths if these are distinct, else the paths."""
    last = tuple(Path(name).name or name for name in names)
    return last if len(set(last)) == len(last) else names


def split(name: str) -> tuple[str, str | None]:
    """Split `tiny-gpt@early` into model and revision; an existing file of that name is not split."""
    model, at, revision = name.rpartition(AT)
    if not at or not model or not revision or Path(name).exists():
        return name, None
    return model, revision


# ------------------------------------------------------------------------------------------------------ study

MATRICES = ("E", "P", "L*.W_*", "U", "W_*")  # blocks by default; all blocks if none matches


@dataclass(frozen=True)
class Side(Result):
    """Measurements of one model on one data set."""

    name: str
    model: str
    data: str
    num_terms: float
    num_parameters: int
    whole: Pair
    blocks: dict[str, OwnProbes]
    sizes: np.ndarray  # number of entries of each block
    sampled: dict[str, Sampled] = field(default_factory=dict)  # of the whole, by the names of QUANTITIES

    def quantity(self, name: str, block: str = "") -> Estimate:
        """Return one of QUANTITIES, or one of OF_BLOCKS for a block."""
        return OF_BLOCKS[name](self.blocks[block]) if block else QUANTITIES[name](self.whole)


@dataclass(frozen=True)
class Comparison(Shown):
    """All sides; the others are compared with the first."""

    loss_name: str
    sides: list[Side]
    alike: bool  # True if all sides have the same tokens
    on_data: bool | None = None  # True if sides are data sets; None: inferred from the names of their data

    @property
    def blocks(self) -> list[str]:
        """Blocks that all sides have, in the order of the first side."""
        return [name for name in self.sides[0].blocks if all(name in side.blocks for side in self.sides)]

    @property
    def alone(self) -> dict[str, list[str]]:
        """Blocks that are missing on another side, by the side that has them."""
        shared = set(self.blocks)
        found = {side.name: [name for name in side.blocks if name not in shared] for side in self.sides}
        return {name: blocks for name, blocks in found.items() if blocks}

    def difference(self, side: int, name: str, block: str = "") -> Estimate:
        """A quantity of a side minus that of the first; of the whole, the interval includes other data."""
        one, first = self.sides[side], self.sides[0]
        numerical = one.quantity(name, block).minus(first.quantity(name, block))
        if block or name not in one.sampled or name not in first.sampled:
            return numerical
        half = half_of_difference(one.sampled[name], first.sampled[name], paired=self.alike)
        return numerical.widened(half)

    def ratio(self, side: int, name: str, block: str = "") -> Estimate:
        """A quantity of a side over that of the first; of the whole, the interval includes other data."""
        one, first = self.sides[side], self.sides[0]
        numerical = one.quantity(name, block).over(first.quantity(name, block))
        if block or name not in one.sampled or name not in first.sampled or not numerical.value > 0:
            return numerical
        relative = [s.sampled[name].relative for s in (one, first)]
        half = half_of_difference(*relative, paired=self.alike)
        return numerical.stretched(half)

    def subjects(self) -> list[str]:
        """Labels of the sides: the models, or the model on each of the data sets."""
        models, data = ({getattr(side, what) for side in self.sides} for what in ("model", "data"))
        on_data = len(models) == 1 and len(data) > 1 if self.on_data is None else self.on_data
        return [f"{side.model} on {side.name}" if on_data else side.name for side in self.sides]


class SideContents(NamedTuple):
    """Blocks, fingerprints and notes of a side, read before it is measured."""

    asked: SideSource
    model: str
    data: str
    loss_name: str
    num_terms: float
    num_parameters: int
    blocks: dict[str, int]  # number of entries of each block
    batches: str  # fingerprints
    contents: str
    notes: list[str]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Comparison:
    """Measure every side."""
    seen = [look(cfg, asked) for asked in cfg.asked()]

    @lru_cache(maxsize=1)
    def problem(side: int) -> Problem:
        return make_problem(seen[side].asked.cfg)

    pieces = [piece for side in range(len(seen)) for piece in _pieces(cfg, seen, side, problem)]
    contents = fingerprint(*(one.contents for one in seen))
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    sides = [_side(one, i, found, cfg) for i, one in enumerate(seen)]
    alike = len({one.batches for one in seen}) == 1
    result = Comparison(seen[0].loss_name, sides, alike, on_data=len(cfg.datasets) > 1)
    return replace(result, notes=comparison_notes(cfg, result, _notes(seen)))


def look(cfg: Config, asked: SideSource) -> SideContents:
    """Load and check a side, then free its memory."""
    problem = make_problem(asked.cfg)
    return SideContents(
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
    """Return the blocks to compare with their sizes; raise if a glob matches nothing."""
    chosen = problem.space(*(cfg.blocks or ("*",)))
    blocks = {block.name: problem.model.size_of(block) for block in chosen}
    matrices = {n: size for n, size in blocks.items() if any(fnmatchcase(n, glob) for glob in MATRICES)}
    return blocks if cfg.blocks or not matrices else matrices


def _pieces(
    cfg: Config, seen: Sequence[SideContents], side: int, problem: Callable[[int], Problem]
) -> list[Piece]:
    """Return the pieces of a side: the whole model, then its blocks."""
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

    def sampled() -> Result:
        return _sampled(problem(side), cfg)

    found = [Piece(f"side{side}.whole", whole, f"{name}: H, GGN and functional Hessian")]
    if cfg.sampling:
        found.append(Piece(f"side{side}.sampling", sampled, f"{name}: sampling errors"))
    for number, block in enumerate(seen[side].blocks):
        found.append(Piece(f"side{side}.block{number}", partial(of_block, block), f"{name}: {block}"))
    return found


def _sampled(problem: Problem, cfg: Config) -> SampledNumbers:
    """The quantities of the whole that have a sampling error, by their names in QUANTITIES."""
    H, G = Hessian(problem), GGN(problem)
    loss = sampled_loss(H, cfg)
    if loss.reason:
        return loss
    numbers = dict(loss.numbers)
    for op, of, norm in ((H, "", "‖H‖_F"), (G, " of the GGN", "")):
        _ends, top = sampled_sharpness(op, cfg, num_steps=cfg.num_block_steps)
        sums = sampled_sums(op, cfg).numbers
        numbers |= {f"λ_max{of}": number for number in top.numbers.values()}
        numbers |= {f"trace{of}": sums["trace"]} | ({norm: sums["norm"]} if norm else {})
    return SampledNumbers(numbers)


def _side(one: SideContents, number: int, found: FinishedPieces, cfg: Config) -> Side:
    return Side(
        name=one.asked.name,
        model=one.model,
        data=one.data,
        num_terms=one.num_terms,
        num_parameters=one.num_parameters,
        whole=found.take(Pair, f"side{number}.whole"),
        blocks={name: found.take(OwnProbes, f"side{number}.block{i}") for i, name in enumerate(one.blocks)},
        sizes=np.array(list(one.blocks.values())),
        sampled=found.take(SampledNumbers, f"side{number}.sampling").numbers if cfg.sampling else {},
    )


def _notes(seen: Sequence[SideContents]) -> list[str]:
    """Join the notes: shared ones once, others with the name of their side."""
    shared = [note for note in seen[0].notes if all(note in one.notes for one in seen)]
    return shared + [f"{one.asked.name}: {note}" for one in seen for note in one.notes if note not in shared]


# ------------------------------------------------------------------------------------------------------- plan


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Plan H, H_o and H_f of the whole model, and H of every block, on every side."""
    sides = len(cfg.asked())
    parts = [PlannedMatrix(problem, "hessian", (name,)) for name in chosen_blocks(cfg, problem)]
    of_blocks = planned_own_probes("blocks", parts, cfg.num_block_probes, cfg.num_block_steps, cfg.max_exact)
    sampled = [PlannedMatrix(problem, kind) for kind in ("hessian", "ggn") if cfg.sampling]
    errors = [
        step._replace(products=sides * step.products, made=sides)
        for part in sampled
        for step in (
            lanczos("sharpness", part, cfg.num_block_steps),
            sampled_ends("parts of the data", part, "*.sampling"),
            probed("trace and norm on groups", part, NUM_PROBES),
        )
    ]
    return [
        *planned_pairs("the whole", cfg.effort(), problem, [()], sides),
        *errors,
        *(step._replace(products=sides * step.products, made=sides) for step in of_blocks),
    ]


PLAN = Plan(
    steps,
    (
        {"num_probes": 6, "num_steps": 16, "num_density_probes": 2, "num_block_probes": 3},
        {
            "num_probes": 4, "num_steps": 12, "num_density_probes": 2, "num_density_steps": 12,
            "num_block_probes": 3, "num_block_steps": 6,
        },
        {
            "num_probes": 3, "num_steps": 8, "num_density_probes": 0, "num_block_probes": 2,
            "num_block_steps": 4,
        },
    ),
)  # fmt: skip

"""The blocks of a model, layer × role: the sharpest block, and trace, norms and density of each.

The study also measures how different the blocks are from each other, the question of 'Why Transformers Need
Adam: A Hessian Perspective' (Zhang and others 2024).

A block with at most 64 entries (`max_exact`) is written out with one product per entry. Every other block has
12 Lanczos steps and 8 probes of its own (4 if it has fewer than 1,000 entries). They use the operator of that
block, which differentiates nothing outside the block and so costs a third of a product of all blocks. They
give λ_max, the trace and ‖H_bb‖. Probes that all blocks share do not give ‖H_bb‖, because E‖(H v)_b‖² is the
sum of ‖H_bc‖² over the whole row; they give all traces once more. Finished pieces are stored in `state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from curvescope.algorithms import (
    BlockTraces,
    Eigenpairs,
    SpectralDensity,
    block_traces,
    eigsh,
    spectral_density,
)
from curvescope.algorithms.blocks.heterogeneity import heterogeneity
from curvescope.algorithms.blocks.probes import OwnProbes, own_probes
from curvescope.core.blocks import Block
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.hessian_terms import TITLES
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.parameter_selection import select
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, Planned, State, work_through
from curvescope.runs.study import Plan, Selection, Step
from curvescope.runs.study_result import Shown
from curvescope.sampling import Sampled
from curvescope.studies.blocks.analysis import Part
from curvescope.studies.common.planning import (
    PlannedMatrix,
    eigenvalues,
    lanczos,
    owned,
    planned_own_probes,
    probed,
    sampled_ends,
    together,
)
from curvescope.studies.common.sampling import (
    NUM_PROBES,
    OFF,
    SampledEnds,
    SampledNumbers,
    notes_of_sampling,
    sampled_sharpness,
    sampled_sums,
)
from curvescope.studies.problem_config import SampledOnData, make_problem, notes_of, sequences_there

if TYPE_CHECKING:
    import pandas as pd

Globs = tuple[str, ...]
R = TypeVar("R", bound=Result)
SMALL = 1000  # entries; blocks with fewer have num_small_probes
MOST_RANKED = 4  # sharpest blocks whose order is checked on other data


@dataclass(frozen=True)
class Config(SampledOnData):
    """Settings of the study. The defaults take about a minute on a CPU."""

    operators: tuple[str, ...] = setting(("hessian", "ggn"), "some of hessian, ggn, functional")
    blocks: Globs = setting(("*",), "whose traces; single heads too, e.g. L*.h*.W_Q")
    norms: Globs | None = setting(None, "blocks with own probes and a Frobenius norm; by default all")
    extremes: Globs = setting((), "blocks with extreme eigenvalues and the spectral norm")
    density: Globs = setting((), "blocks with a spectral density, compared with each other")
    num_trace_probes: int = setting(16, "random vectors of the traces, which all blocks share")
    num_norm_probes: int = setting(8, "random vectors of each block alone")
    num_small_probes: int = setting(4, "likewise, for blocks with fewer than 1,000 entries")
    num_density_probes: int = setting(6, "random vectors of each density")
    num_steps: int = setting(40, "Lanczos steps of each of them")
    max_products: int = setting(200, "most products for the eigenvalues of one block")
    num_sharp_steps: int = setting(
        12, "Lanczos steps for λ_max of each block with own probes and of all; 0: none"
    )
    max_exact: int = setting(64, "blocks with at most so many entries are written out, not estimated")
    max_blocks: int = setting(10_000, "blocks with own probes at most, those with most parameters first")

    def __post_init__(self) -> None:
        for name in ("operators", "blocks", "norms", "extremes", "density"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        super().__post_init__()
        for name in self.operators:
            if name not in OPERATORS:
                raise UsageError(
                    f"operators: expected some of {', '.join(OPERATORS)}, got {name!r}",
                    hint=near_misses(str(name), list(OPERATORS)),
                )
        if not self.operators:
            raise UsageError("operators: expected at least one, got none")
        least = {"num_trace_probes": 1, "num_norm_probes": 1, "num_density_probes": 1, "num_steps": 3}
        least |= {
            "num_small_probes": 1,
            "max_products": 4,
            "num_sharp_steps": 0,
            "max_exact": 0,
            "max_blocks": 0,
        }
        for name, fewest in least.items():
            if getattr(self, name) < fewest:
                raise UsageError(f"{name}: expected at least {fewest}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Blocks(Shown):
    """Result: the blocks of a model, on one set of data."""

    model: str
    data: str
    loss_name: str
    loss: float
    num_terms: float
    names: list[str]  # every block that was measured
    sizes: np.ndarray  # entries of each
    parts: dict[str, Part]

    def tables(self) -> dict[str, pd.DataFrame]:
        """Tables by name: one per operator, the sharpest block first, and one of divergences."""
        import pandas as pd

        size = dict(zip(self.names, self.sizes.tolist(), strict=True))
        tables = {
            operator: pd.DataFrame(
                [
                    {"block": name, "parameters": size[name], **part.row(name)}
                    for name in dict.fromkeys([*part.ranking(), *self.names])
                ]
            )
            for operator, part in self.parts.items()
        }
        for frame in tables.values():
            if "converged" in frame:
                frame["converged"] = frame["converged"].fillna("–")  # not measured
        pairs = [
            part.heterogeneity.to_frame().assign(operator=operator)
            for operator, part in self.parts.items()
            if part.heterogeneity is not None
        ]
        return tables | ({"heterogeneity": pd.concat(pairs, ignore_index=True)} if pairs else {})


Measure = Callable[[CurvatureOperator], Result]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Blocks:
    """Measure the blocks of every operator.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; a run that is resumed reads them.
    """
    problem = make_problem(cfg)
    operators = {
        name: OPERATORS[name](problem, *cfg.blocks, engine=cfg.engine, checkpoint=cfg.checkpoint)  # pyright: ignore[reportArgumentType]
        for name in cfg.operators
    }
    chosen = chosen_blocks(cfg, problem)

    def pieces(cfg: Config) -> list[Piece]:
        own = chosen_blocks(cfg, problem)
        planned = [
            Piece(f"{name}.{piece}", partial(measure, op), f"{piece.replace('.', ' of ', 1)}, {TITLES[name]}")
            for name, op in operators.items()
            if name in cfg.operators
            for piece, measure in _pieces(cfg, own).items()
        ]
        if cfg.sampling:
            measured = {name: op for name, op in operators.items() if name in cfg.operators}
            planned += [piece for name, op in measured.items() for piece in _sampling(cfg, name, op, own)]
        return planned

    finished = work_through(
        pieces(cfg),
        contents=fingerprint(problem.model, problem.batches),
        progress=progress,
        state=state,
        planned=Planned(cfg, problem, pieces),
    )
    last = "sampling" if cfg.sampling else "sharpness" if cfg.num_sharp_steps else "traces"
    parts = {name: _part(name, finished, chosen, cfg) for name in operators if f"{name}.{last}" in finished}
    reason = finished.take(SampledNumbers, f"{next(iter(parts))}.sampling").reason if cfg.sampling else OFF
    text = sequences_there(cfg, problem.model) is not None
    notes = [*notes_of(cfg, problem), *notes_of_sampling(cfg, reason, text=text)]
    return _result(problem, chosen, parts, notes)


def chosen_blocks(cfg: Config, problem: Problem) -> dict[str, list[Block]]:
    """Return the blocks of every kind of piece, and raise if a pattern matches nothing.

    Patterns select from the blocks that have traces; patterns of heads (L0.h*.W_Q) from the model's heads.
    """
    space = problem.space(*cfg.blocks)
    own = {block.name: block for block in space}
    heads = problem.model.heads
    norms = list(space) if cfg.norms is None else select(cfg.norms, own, heads) if cfg.norms else []
    largest = {block.name for block in _by_size(norms)[: cfg.max_blocks]}
    return {
        "trace": list(space),
        "norm": [block for block in norms if block.name in largest],
        "extremes": select(cfg.extremes, own, heads) if cfg.extremes else [],
        "density": select(cfg.density, own, heads) if cfg.density else [],
    }


def _by_size(blocks: Sequence[Block]) -> list[Block]:
    """Sort blocks by size, the largest first: if time runs out, the small ones are left out."""
    return sorted(blocks, key=lambda block: -block.size)


def _pieces(cfg: Config, chosen: dict[str, list[Block]]) -> dict[str, Measure]:
    """Return the pieces of one operator: traces and ends of all blocks at once, the rest block by block."""
    work: dict[str, Measure] = {
        "norm": lambda op: own_probes(
            op,
            num_probes=cfg.num_small_probes if op.shape[0] < SMALL else cfg.num_norm_probes,
            num_steps=cfg.num_sharp_steps,
            max_exact=cfg.max_exact,
            seed=cfg.seed,
        ),
        "extremes": lambda op: _ends(op, cfg),
        "density": lambda op: spectral_density(
            op, num_probes=cfg.num_density_probes, num_steps=cfg.num_steps, seed=cfg.seed
        ),
    }
    measures: dict[str, Measure] = {
        "traces": lambda op: block_traces(op, num_probes=cfg.num_trace_probes, seed=cfg.seed)
    }
    if cfg.num_sharp_steps:
        measures["sharpness"] = lambda op: SampledEnds(
            *sampled_sharpness(op, cfg, num_steps=cfg.num_sharp_steps)
        )
    for kind, measure in work.items():
        for block in _by_size(chosen[kind]):
            measures[f"{kind}.{block.name}"] = partial(_of_block, measure, block.name)
    return measures


def _sampling(cfg: Config, name: str, op: CurvatureOperator, chosen: dict[str, list[Block]]) -> list[Piece]:
    """Return the pieces that measure sampling errors: trace and norm of all blocks, λ_max of the sharpest."""

    def sums(traces: BlockTraces) -> SampledNumbers:
        total = traces.total
        return sampled_sums(op, cfg, trace=(total.value, total.stderr, len(total.samples)))

    def ranking(*measured: OwnProbes) -> SampledNumbers:
        tops = {b.name: p.ends.values[1] for b, p in zip(chosen["norm"], measured, strict=True) if p.ends}
        numbers = {}
        for block in sorted(tops, key=lambda block: -tops[block])[:MOST_RANKED]:
            _ends, sampled = sampled_sharpness(op.block(block), cfg, num_steps=cfg.num_sharp_steps)
            if "lambda_max" in sampled.numbers:
                numbers[block] = sampled.numbers["lambda_max"]
        return SampledNumbers(numbers)

    pieces = [Piece(f"{name}.sampling", sums, f"sampling error, {TITLES[name]}", needs=(f"{name}.traces",))]
    if cfg.num_sharp_steps and chosen["norm"]:
        needs = tuple(f"{name}.norm.{block.name}" for block in chosen["norm"])
        words = f"order of the sharpest blocks, {TITLES[name]}"
        pieces.append(Piece(f"{name}.ranking", ranking, words, needs=needs))
    return pieces


def _of_block(measure: Measure, name: str, op: CurvatureOperator) -> Result:
    """Measure one diagonal block by the operator of that block."""
    return measure(op.block(name))


def _ends(op: CurvatureOperator, cfg: Config) -> Eigenpairs:
    """Lowest and highest eigenvalue; for a positive semi-definite block, with many at 0, only the highest."""
    k = 1 if op.psd else min(2, op.shape[0])
    which = "LA" if k == 1 else "BE"
    return eigsh(op, k, which=which, vectors=False, max_products=cfg.max_products, seed=cfg.seed)


def _part(operator: str, finished: FinishedPieces, chosen: dict[str, list[Block]], cfg: Config) -> Part:
    def of(kind: str, result: type[R]) -> dict[str, R]:
        names = {b.name: f"{operator}.{kind}.{b.name}" for b in chosen[kind]}
        return {block: finished.take(result, name) for block, name in names.items() if name in finished}

    densities = of("density", SpectralDensity)
    whole = finished.take(SampledEnds, f"{operator}.sharpness") if cfg.num_sharp_steps else None
    sampled = {} if whole is None else dict(whole.sampled.numbers)
    ranked: dict[str, Sampled] = {}
    if cfg.sampling:
        sampled |= finished.take(SampledNumbers, f"{operator}.sampling").numbers
        if f"{operator}.ranking" in finished:
            ranked = finished.take(SampledNumbers, f"{operator}.ranking").numbers
    return Part(
        traces=finished.take(BlockTraces, f"{operator}.traces"),
        norms=of("norm", OwnProbes),
        extremes=of("extremes", Eigenpairs),
        densities=densities,
        heterogeneity=heterogeneity(densities) if len(densities) > 1 else None,
        whole=None if whole is None else whole.ends,
        sampled=sampled,
        sampled_blocks=ranked,
    )


def _result(
    problem: Problem, chosen: dict[str, list[Block]], parts: dict[str, Part], notes: list[str]
) -> Blocks:
    requested = {block.name: block for blocks in chosen.values() for block in blocks}
    return Blocks(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        loss=problem.loss_value(),
        num_terms=problem.num_terms,
        names=list(requested),
        sizes=np.array([problem.model.size_of(block) for block in requested.values()]),
        parts=parts,
        notes=notes,
    )


# ------------------------------------------------------------------------------------------------------- plan


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Return the steps of a run: traces and ends of all blocks together, and the pieces of each block."""
    chosen, planned = chosen_blocks(cfg, problem), []
    for name in cfg.operators:
        whole = PlannedMatrix(problem, name, cfg.blocks)
        parts = {kind: [whole._replace(space=(b.name,)) for b in some] for kind, some in chosen.items()}
        planned.append(owned(probed("traces", whole, cfg.num_trace_probes), f"{name}.traces"))
        if cfg.num_sharp_steps:
            planned.append(owned(lanczos("ends", whole, cfg.num_sharp_steps), f"{name}.sharpness"))
        how = cfg.num_sharp_steps, cfg.max_exact
        few, many = (
            [part for part, b in zip(parts["norm"], chosen["norm"], strict=True) if (b.size < SMALL) == small]
            for small in (True, False)
        )
        own = planned_own_probes("small blocks", few, cfg.num_small_probes, *how)
        own += planned_own_probes("blocks", many, cfg.num_norm_probes, *how)
        planned += [
            owned(step, *(f"{name}.norm.{space}" for spaces in step.spaces for space in spaces))
            for step in own
        ]
        planned += [
            owned(
                eigenvalues("eigenvalues", p, 1 if p.psd else 2, cfg.max_products),
                f"{name}.extremes.{p.space[0]}",
            )
            for p in parts["extremes"]
        ]
        if parts["density"]:
            products = cfg.num_density_probes * cfg.num_steps * len(parts["density"])
            step = together("densities", parts["density"], products, basis=cfg.num_steps + 1)
            planned.append(owned(step, f"{name}.density.*"))
        if cfg.sampling:
            planned.append(owned(probed("trace and norm on groups", whole, NUM_PROBES), f"{name}.sampling"))
        if cfg.sampling and cfg.num_sharp_steps:
            planned.append(sampled_ends("parts of the data", whole, f"{name}.sharpness"))
            for b in chosen["norm"][:MOST_RANKED]:
                one = whole._replace(space=(b.name,))
                planned.append(owned(lanczos("sharpest blocks", one, cfg.num_sharp_steps), f"{name}.ranking"))
                planned.append(sampled_ends("parts of the data", one, f"{name}.ranking"))
    return planned


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks


SMALLEST = {"num_trace_probes": 6, "num_norm_probes": 3, "num_small_probes": 3, "num_sharp_steps": 6}
PLAN = Plan(
    steps,
    (
        {"num_trace_probes": 12, "num_norm_probes": 6, "num_sharp_steps": 10},
        {"num_trace_probes": 8, "num_norm_probes": 4, "num_sharp_steps": 10},
        {"num_trace_probes": 8, "num_norm_probes": 3, "num_small_probes": 3, "num_sharp_steps": 8},
        {"num_trace_probes": 6, "num_norm_probes": 3, "num_small_probes": 3, "num_sharp_steps": 6},
    ),
    blocks,
    selections=(
        *(
            Selection(
                {**SMALLEST, "max_blocks": count},
                f"traces of all blocks, and λ_max and norms of the {count} largest blocks",
            )
            for count in (48, 24, 12, 6)
        ),
        *(
            Selection(
                {**SMALLEST, "max_blocks": count, "operators": ("hessian",)},
                f"of the Hessian traces of all blocks, and λ_max and norms of the {count} largest blocks",
            )
            for count in (12, 6, 3)
        ),
        Selection(
            {
                **SMALLEST, "num_trace_probes": 3, "num_sharp_steps": 5, "max_blocks": 0,
                "operators": ("hessian",),
            },
            "traces of all blocks of the Hessian, and its λ_max",
        ),
    ),
)  # fmt: skip

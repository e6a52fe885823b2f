"""The blocks of a model, layer × role: which is sharpest, and trace, norms and density of each.

And how different the blocks are from each other, the question of 'Why Transformers Need Adam: A Hessian
Perspective' (Zhang and others 2024). What is small is exact: a block with at most 64 entries
(`max_exact`) is written out with one product per entry. Every other block has 16 Lanczos steps and 8 probes
of its own (4 if it has fewer than 1,000 entries), through the operator of that block, which costs a third of
columns of the whole one: nothing outside the block is differentiated. They give λ_max, the trace and
‖H_bb‖, which probes that blocks share do not: E‖(H v)_b‖² is the sum of ‖H_bc‖² over the whole row. Shared
probes give all traces once more, and the better of the two is shown. Pieces are stored in `state` as they are
done.
"""

from __future__ import annotations

from collections.abc import Callable
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
from curvescope.algorithms.blocks.probes import Ends, OwnProbes, extreme_ends, own_probes
from curvescope.core.blocks import Block
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.parts import TITLES
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.choice import select
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.study import Cost, Plan, Step
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.blocks.analysis import Part
from curvescope.studies.common.planning import (
    PlannedMatrix,
    eigenvalues,
    lanczos,
    planned_own_probes,
    probed,
    together,
)
from curvescope.studies.setting import ModelOnData, make_problem, notes_of

if TYPE_CHECKING:
    import pandas as pd

Globs = tuple[str, ...]
R = TypeVar("R", bound=Result)
SMALL = 1000  # entries; blocks with fewer have num_small_probes


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at and how hard. The defaults take about a minute on a CPU."""

    operators: tuple[str, ...] = setting(("hessian", "ggn"), "some of hessian, ggn, functional")
    blocks: Globs = setting(("*",), "whose traces; single heads too, e.g. L*.h*.W_Q")
    norms: Globs | None = setting(None, "blocks with own probes and a Frobenius norm; by default all")
    extremes: Globs = setting((), "blocks with extreme eigenvalues and the spectral norm")
    density: Globs = setting((), "blocks with a spectral density, compared with each other")
    num_trace_probes: int = setting(16, "random vectors of the traces, which all blocks share")
    num_norm_probes: int = setting(8, "random vectors of each block's own")
    num_small_probes: int = setting(4, "of their own, for blocks with fewer than 1,000 entries")
    num_density_probes: int = setting(6, "random vectors of each density")
    num_steps: int = setting(40, "Lanczos steps of each of them")
    max_products: int = setting(200, "most products for the eigenvalues of one block")
    num_sharp_steps: int = setting(
        12, "Lanczos steps for λ_max of each block with own probes and of all; 0: none"
    )
    max_exact: int = setting(64, "blocks with at most so many entries are written out, not estimated")

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
        least |= {"num_small_probes": 1, "max_products": 4, "num_sharp_steps": 0, "max_exact": 0}
        for name, fewest in least.items():
            if getattr(self, name) < fewest:
                raise UsageError(f"{name}: expected at least {fewest}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Blocks(Shown):
    """The blocks of a model, on one set of data."""

    model: str
    data: str
    loss_name: str
    loss: float
    num_terms: float
    names: list[str]  # every block that something was asked of
    sizes: np.ndarray  # entries of each
    parts: dict[str, Part]

    def tables(self) -> dict[str, pd.DataFrame]:
        """One table per operator, the sharpest block first, and one of divergences."""
        import pandas as pd

        size = dict(zip(self.names, self.sizes.tolist(), strict=True))
        found = {
            operator: pd.DataFrame(
                [
                    {"block": name, "parameters": size[name], **part.row(name)}
                    for name in dict.fromkeys([*part.ranking(), *self.names])
                ]
            )
            for operator, part in self.parts.items()
        }
        for frame in found.values():
            if "converged" in frame:
                frame["converged"] = frame["converged"].fillna("–")  # of a block that was not asked for
        pairs = [
            part.heterogeneity.to_frame().assign(operator=operator)
            for operator, part in self.parts.items()
            if part.heterogeneity is not None
        ]
        return found | ({"heterogeneity": pd.concat(pairs, ignore_index=True)} if pairs else {})


Measure = Callable[[CurvatureOperator], Result]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Blocks:
    """Measure the blocks of every operator.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    problem = make_problem(cfg)
    operators = {
        name: OPERATORS[name](problem, *cfg.blocks, engine=cfg.engine, checkpoint=cfg.checkpoint)  # pyright: ignore[reportArgumentType]
        for name in cfg.operators
    }
    chosen = chosen_blocks(cfg, problem)
    pieces = [
        Piece(f"{name}.{piece}", partial(measure, op), f"{piece.replace('.', ' of ', 1)}, {TITLES[name]}")
        for name, op in operators.items()
        for piece, measure in _pieces(cfg, chosen).items()
    ]
    contents = fingerprint(problem.model, problem.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    parts = {name: _part(name, found, chosen, whole=cfg.num_sharp_steps > 0) for name in operators}
    return _result(problem, chosen, parts, notes_of(cfg, problem))


def chosen_blocks(cfg: Config, problem: Problem) -> dict[str, list[Block]]:
    """The blocks of every kind of piece; a pattern that matches nothing is found before the work.

    Patterns look among the blocks that have traces, and those of heads (L0.h*.W_Q) among the model's heads.
    """
    space = problem.space(*cfg.blocks)
    own = {block.name: block for block in space}
    heads = problem.model.heads
    return {
        "trace": list(space),
        "norm": list(space) if cfg.norms is None else select(cfg.norms, own, heads) if cfg.norms else [],
        "extremes": select(cfg.extremes, own, heads) if cfg.extremes else [],
        "density": select(cfg.density, own, heads) if cfg.density else [],
    }


def _pieces(cfg: Config, chosen: dict[str, list[Block]]) -> dict[str, Measure]:
    """What is measured of one operator: traces and ends of all blocks at once, the rest block by block."""
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
    found: dict[str, Measure] = {
        "traces": lambda op: block_traces(op, num_probes=cfg.num_trace_probes, seed=cfg.seed)
    }
    if cfg.num_sharp_steps:
        found["sharpness"] = lambda op: extreme_ends(op, num_steps=cfg.num_sharp_steps, seed=cfg.seed)
    for kind, measure in work.items():
        for block in chosen[kind]:
            found[f"{kind}.{block.name}"] = partial(_of_block, measure, block.name)
    return found


def _of_block(measure: Measure, name: str, op: CurvatureOperator) -> Result:
    """A measure of one diagonal block, by the operator of that block."""
    return measure(op.block(name))


def _ends(op: CurvatureOperator, cfg: Config) -> Eigenpairs:
    """Lowest and highest eigenvalue; of a positive semi-definite block the highest: others crowd at 0."""
    k = 1 if op.psd else min(2, op.shape[0])
    which = "LA" if k == 1 else "BE"
    return eigsh(op, k, which=which, vectors=False, max_products=cfg.max_products, seed=cfg.seed)


def _part(operator: str, found: Finished, chosen: dict[str, list[Block]], *, whole: bool) -> Part:
    def of(kind: str, result: type[R]) -> dict[str, R]:
        return {b.name: found.take(result, f"{operator}.{kind}.{b.name}") for b in chosen[kind]}

    densities = of("density", SpectralDensity)
    return Part(
        traces=found.take(BlockTraces, f"{operator}.traces"),
        norms=of("norm", OwnProbes),
        extremes=of("extremes", Eigenpairs),
        densities=densities,
        heterogeneity=heterogeneity(densities) if len(densities) > 1 else None,
        whole=found.take(Ends, f"{operator}.sharpness") if whole else None,
    )


def _result(
    problem: Problem, chosen: dict[str, list[Block]], parts: dict[str, Part], notes: list[str]
) -> Blocks:
    asked = {block.name: block for blocks in chosen.values() for block in blocks}
    return Blocks(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        loss=problem.loss_value(),
        num_terms=problem.num_terms,
        names=list(asked),
        sizes=np.array([problem.model.size_of(block) for block in asked.values()]),
        parts=parts,
        notes=notes,
    )


# ------------------------------------------------------------------------------------------------------- plan

OF_BLOCK = 1 / 3  # of a product of the whole operator: nothing outside the block is differentiated


def cost(cfg: Config, problem: Problem) -> Cost:
    """Traces and ends of all blocks together, and what each block has of its own."""
    chosen = chosen_blocks(cfg, problem)
    own = sum(_own(cfg, problem.model.size_of(block)) for block in chosen["norm"])
    own += cfg.max_products * len(chosen["extremes"])
    own += cfg.num_density_probes * cfg.num_steps * len(chosen["density"])
    together = cfg.num_trace_probes + cfg.num_sharp_steps
    pieces = 1 + (cfg.num_sharp_steps > 0) + sum(len(chosen[k]) for k in ("norm", "extremes", "density"))
    num = len(cfg.operators)
    return Cost(num * pieces, num * (together + OF_BLOCK * own))


def _own(cfg: Config, size: int) -> int:
    """Products of one block: its matrix where that is small, else probes and a basis."""
    if size <= cfg.max_exact:
        return size
    return cfg.num_sharp_steps + (cfg.num_small_probes if size < SMALL else cfg.num_norm_probes)


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same step by step."""
    chosen, found = chosen_blocks(cfg, problem), []
    for name in cfg.operators:
        whole = PlannedMatrix(problem, name, cfg.blocks)
        parts = {kind: [whole._replace(space=(b.name,)) for b in some] for kind, some in chosen.items()}
        found.append(probed("traces", whole, cfg.num_trace_probes))
        if cfg.num_sharp_steps:
            found.append(lanczos("ends", whole, cfg.num_sharp_steps))
        few = [part for part, b in zip(parts["norm"], chosen["norm"], strict=True) if b.size < SMALL]
        many = [part for part in parts["norm"] if part not in few]
        how = cfg.num_sharp_steps, cfg.max_exact
        found += planned_own_probes("small blocks", few, cfg.num_small_probes, *how)
        found += planned_own_probes("blocks", many, cfg.num_norm_probes, *how)
        found += [
            eigenvalues("eigenvalues", p, 1 if p.psd else 2, cfg.max_products) for p in parts["extremes"]
        ]
        if parts["density"]:
            products = cfg.num_density_probes * cfg.num_steps * len(parts["density"])
            found.append(together("densities", parts["density"], products, basis=cfg.num_steps + 1))
    return found


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product."""
    return cfg.blocks


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 256, "num_trace_probes": 12, "num_norm_probes": 6, "num_sharp_steps": 10},
        {
            "tokens": 128, "num_trace_probes": 8, "num_norm_probes": 4, "num_small_probes": 4,
            "num_sharp_steps": 10,
        },
        {
            "tokens": 64, "num_trace_probes": 8, "num_norm_probes": 3, "num_small_probes": 3,
            "num_sharp_steps": 8,
        },
        {
            "tokens": 32, "num_trace_probes": 6, "num_norm_probes": 3, "num_small_probes": 3,
            "num_sharp_steps": 6,
        },
    ),
    steps,
)  # fmt: skip

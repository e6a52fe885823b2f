"""How well the GGN predicts the Hessian: λ_max, trace, norm and density, per block and over training.

Every block is measured at every checkpoint (`pair`), and the whole model at the last one with other targets
(`targets`): the loss small, large, and drawn from the model itself, where H_f vanishes on the average.
Checkpoints are those of a bundled model, or models of the same shape that `checkpoints` names; the
data are the same for all. Pieces are stored in `state` as they are done.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from curvescope.algorithms.columns import columns_at_once
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.progress import Progress
from curvescope.models.model import Model
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.study import Cost, Plan, Step
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.common.planning import PlannedMatrix, planned_own_probes, together
from curvescope.studies.gap.analysis import (
    ALL,
    KINDS,
    Draws,
    Effort,
    Kind,
    Pair,
    can_replace,
    measure_draws,
    measure_pair,
    with_targets,
)
from curvescope.studies.setting import (
    OF_CHECKPOINTS,
    ModelOnData,
    checkpoint_names,
    load_checkpoints,
    make_problem,
    notes_of,
)

if TYPE_CHECKING:
    pass

ROLES = tuple(f"L*.W_{role}" for role in "QKVO12")


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at and how hard. The defaults take about a minute on a CPU."""

    tokens: int = setting(128, "of a text; labeled texts and images: ⌈tokens / seq_len⌉ of them")
    checkpoints: tuple[str, ...] = setting((), OF_CHECKPOINTS)
    blocks: tuple[str, ...] = setting((), "globs, each a block of its own; by default L*.W_Q, … that exist")
    apart: bool = setting(False, "every block that a glob matches by itself, not all of them together")
    num_probes: int = setting(4, "random vectors of traces and norms")
    num_steps: int = setting(10, "Lanczos steps for λ_max of a block, twice as many for the whole model")
    num_density_probes: int = setting(3, "random vectors of each density; 0: no densities, no distances")
    num_density_steps: int = setting(8, "Lanczos steps of a density, twice as many for the whole model")
    num_draws: int = setting(8, "of targets from the model itself; 0: no other targets at all")
    max_exact: int = setting(64, "a block with at most so many entries is written out, not estimated")

    def __post_init__(self) -> None:
        as_tuples(self, "checkpoints", "blocks")
        super().__post_init__()
        at_least(self, 2, "num_probes")
        at_least(self, 1, "num_steps")
        at_least(self, 0, "num_density_probes", "max_exact", "num_draws")
        at_least(self, 3, "num_density_steps")

    def effort(self, block: str) -> Effort:
        """Of a block; the whole model has twice the steps."""
        twice = 2 if block == ALL else 1
        steps = twice * self.num_steps, twice * self.num_density_steps
        return Effort(self.num_probes, steps[0], self.num_density_probes, steps[1], self.max_exact, self.seed)


@dataclass(frozen=True)
class Gap(Shown):
    """H and H_o of a model's blocks over checkpoints, and of the whole with other targets."""

    model: str
    data: str
    loss_name: str
    num_terms: float
    checkpoints: list[str]
    blocks: list[str]  # ALL first
    pairs: dict[str, Pair]  # by f"{checkpoint}.{block}"
    targets: dict[str, Pair]  # of the whole model at the last checkpoint, by what the targets are
    draws: Draws | None

    def pair(self, checkpoint: str, block: str = ALL) -> Pair:
        """What was measured of a block."""
        return self.pairs[f"{checkpoint}.{block}"]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Gap:
    """Measure all blocks at all checkpoints.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    problem = make_problem(cfg)
    points = load_checkpoints(cfg, cfg.checkpoints, problem.model)
    return measure(problem, points, cfg, notes_of(cfg, problem), progress=progress, state=state)


def measure(
    problem: Problem,
    points: dict[str, Model],
    cfg: Config,
    notes: list[str],
    *,
    progress: Progress | None = None,
    state: State | None = None,
) -> Gap:
    """The study on a problem of one's own, at the parameters of these models."""
    at = {name: problem.at(dict(model.named_parameters())) for name, model in points.items()}
    blocks = [ALL, *chosen_blocks(cfg, problem)]
    pieces = [
        Piece(
            _piece(i, j),
            partial(measure_pair, one, block, cfg.effort(block), keep=block == ALL),
            f"{block} at {name}",
        )
        for i, (name, one) in enumerate(at.items())
        for j, block in enumerate(blocks)
    ]
    last = at[list(at)[-1]]
    replaced = replaces(cfg, problem)
    if replaced:
        pieces += _target_pieces(cfg, last)
    contents = fingerprint(problem.model, problem.batches, *points.values())
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    return _result(problem, found, list(at), blocks, notes, replaced=replaced)


def _target_pieces(cfg: Config, problem: Problem) -> list[Piece]:
    effort = cfg.effort(ALL)._replace(num_density_probes=0)

    def other(kind: Kind) -> Pair:
        return measure_pair(with_targets(problem, kind, seed=cfg.seed), ALL, effort)

    draws = {"num_draws": max(cfg.num_draws, 2), "num_probes": 2, "seed": cfg.seed}
    found = [Piece(f"targets.{kind}", partial(other, kind), f"targets {kind}") for kind in KINDS]
    return [*found, Piece("draws", partial(measure_draws, problem, **draws), "targets drawn again and again")]


def replaces(cfg: Config, problem: Problem) -> bool:
    """Whether other targets are asked for, and can be had."""
    return cfg.num_draws > 0 and can_replace(problem)


def chosen_blocks(cfg: Config, problem: Problem) -> list[str]:
    """The globs, or every block that they match."""
    there = [block.name for block in problem.space()]
    globs = cfg.blocks or tuple(g for g in ROLES if fnmatch.filter(there, g))
    for glob in globs:
        problem.space(glob)  # raises where it matches nothing
    if not cfg.apart:
        return list(dict.fromkeys(globs))
    return list(dict.fromkeys(block.name for glob in globs for block in problem.space(glob)))


def _piece(checkpoint: int, block: int) -> str:
    """By numbers: names of checkpoints and globs are no names of folders."""
    return f"checkpoint{checkpoint}.block{block}"


def _result(
    problem: Problem,
    found: Finished,
    names: list[str],
    blocks: list[str],
    notes: list[str],
    *,
    replaced: bool,
) -> Gap:
    pieces = {
        f"{name}.{block}": _piece(i, j) for i, name in enumerate(names) for j, block in enumerate(blocks)
    }
    return Gap(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        num_terms=problem.num_terms,
        checkpoints=names,
        blocks=blocks,
        pairs={key: found.take(Pair, piece) for key, piece in pieces.items()},
        targets={kind: found.take(Pair, f"targets.{kind}") for kind in KINDS} if replaced else {},
        draws=found.take(Draws, "draws") if replaced else None,
        notes=notes,
    )


# ------------------------------------------------------------------------------------------------------- plan

OF_BLOCK = 0.6  # of a product of the whole operator


def cost(cfg: Config, problem: Problem) -> Cost:
    """Every block at every checkpoint, the whole model with other targets, and draws of targets."""
    points = len(checkpoint_names(cfg, cfg.checkpoints))
    blocks = [problem.model.size_of(*problem.space(block)) for block in chosen_blocks(cfg, problem)]
    of_blocks = sum(_products(cfg, "", size) for size in blocks)
    size = problem.model.size_of(*problem.space())
    whole = _products(cfg, ALL, size)
    other = len(KINDS) if replaces(cfg, problem) else 0
    without = _products(replace(cfg, num_density_probes=0), ALL, size)
    products = points * (OF_BLOCK * of_blocks + whole) + other * without + 2 * cfg.num_draws
    pairs = points * (1 + len(blocks)) + other
    return Cost(pairs + (other > 0), products, graphs=3 * pairs + cfg.num_draws)


def _products(cfg: Config, block: str, size: int) -> int:
    """Of H, H_o and H_f of one block."""
    effort = cfg.effort(block)
    if size <= effort.max_exact:
        return 5 * size
    density = effort.num_density_probes * effort.num_density_steps
    return 3 * effort.num_probes + 2 * (effort.num_steps + density)


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """The same step by step: the whole at every checkpoint, blocks, other targets, draws."""
    points = len(checkpoint_names(cfg, cfg.checkpoints))
    found = _pairs("the whole", cfg.effort(ALL), problem, [()], points)
    if chosen := [(block,) for block in chosen_blocks(cfg, problem)]:
        found += _pairs("blocks", cfg.effort(""), problem, chosen, points)
    if replaces(cfg, problem):
        without = cfg.effort(ALL)._replace(num_density_probes=0)
        found += _pairs("other targets", without, problem, [()], len(KINDS))
        draws = max(cfg.num_draws, 2)
        found.append(Step("draws of targets", "functional", 2 * draws, columns=2, made=draws))
    return found


def _pairs(
    what: str, effort: Effort, problem: Problem, spaces: list[tuple[str, ...]], times: int
) -> list[Step]:
    """`measure_pair` of every space, so many times."""
    found = []
    for kind in ("hessian", "ggn", "functional"):
        parts = [PlannedMatrix(problem, kind, space) for space in spaces]
        half = kind == "functional"
        some = [] if half or not effort.num_density_probes else [_densities(what, parts, effort)]
        some += planned_own_probes(
            what, parts, effort.num_probes, 0 if half else effort.num_steps, effort.max_exact
        )
        found += [
            step._replace(products=times * step.products, made=times if i == 0 else 0)
            for i, step in enumerate(some)
        ]
    return found


def _densities(what: str, parts: list[PlannedMatrix], effort: Effort) -> Step:
    products = effort.num_density_probes * effort.num_density_steps * len(parts)
    widths = [columns_at_once(part.operator) for part in parts]
    columns = min(effort.num_density_probes, *widths)
    basis = effort.num_density_steps + 1
    return together(f"density of {what}", parts, products, columns=columns, basis=basis)


def blocks(cfg: Config) -> tuple[str, ...]:
    """The parameters of a product: all."""
    return ("*",)


PLAN = Plan(
    blocks,
    cost,
    (
        {"tokens": 64},
        {"tokens": 64, "num_probes": 3, "num_density_probes": 2, "num_draws": 4},
        {"tokens": 32, "num_probes": 3, "num_steps": 8, "num_density_probes": 2, "num_draws": 2},
        {"tokens": 32, "num_probes": 2, "num_steps": 6, "num_density_probes": 0, "num_draws": 0},
    ),
    steps,
)

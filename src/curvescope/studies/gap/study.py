"""Error of the GGN as an approximation of the Hessian: λ_max, trace, norm and density, per block, over
training.

Every block is measured at every checkpoint (`pair`), and the whole model at the last one with other targets
(`targets`): those with small and large loss, and those drawn from the model, for which the mean of H_f is
zero. `checkpoints` names models of the same shape; the default is the checkpoints of a bundled model. The
data are the same for all. Finished pieces are stored in `state`.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from functools import partial

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.models.model import Model
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study import Plan, Step
from curvescope.runs.study_result import Shown
from curvescope.studies.gap.analysis import (
    ALL,
    KINDS,
    Draws,
    Kind,
    Pair,
    ProbeEffort,
    can_replace,
    measure_draws,
    measure_pair,
    planned_pairs,
    with_targets,
)
from curvescope.studies.problem_config import (
    OF_CHECKPOINTS,
    ModelOnData,
    checkpoint_names,
    load_checkpoints,
    make_problem,
    notes_of,
)

ROLES = tuple(f"L*.W_{role}" for role in "QKVO12")


@dataclass(frozen=True)
class Config(ModelOnData):
    """Blocks, checkpoints and effort. The defaults take about a minute on a CPU."""

    tokens: int = setting(128, "tokens of a text; of labeled texts and images, ⌈tokens / seq_len⌉ items")
    checkpoints: tuple[str, ...] = setting((), OF_CHECKPOINTS)
    blocks: tuple[str, ...] = setting((), "globs, each measured as one block; default: L*.W_Q, … that exist")
    apart: bool = setting(False, "measure every block that a glob matches separately, not together")
    num_probes: int = setting(4, "random vectors for traces and norms", least=2)
    num_steps: int = setting(
        10, "Lanczos steps for λ_max of a block, twice as many for the whole model", least=1
    )
    num_density_probes: int = setting(
        3, "random vectors of each density; 0: no densities, no distances", least=0
    )
    num_density_steps: int = setting(
        8, "Lanczos steps of a density, twice as many for the whole model", least=3
    )
    num_draws: int = setting(8, "draws of targets from the model; 0 omits all other targets", least=0)
    max_exact: int = setting(
        64, "blocks with at most so many entries are computed in full, not estimated", least=0
    )

    def effort(self, block: str) -> ProbeEffort:
        """Probes and steps for a block; the whole model has twice the steps."""
        twice = 2 if block == ALL else 1
        steps = twice * self.num_steps, twice * self.num_density_steps
        return ProbeEffort(
            self.num_probes, steps[0], self.num_density_probes, steps[1], self.max_exact, self.seed
        )


@dataclass(frozen=True)
class Gap(Shown):
    """Measurements of H and H_o of blocks over checkpoints, and of the whole model with other targets."""

    model: str
    data: str
    loss_name: str
    num_terms: float
    checkpoints: list[str]
    blocks: list[str]  # ALL first
    pairs: dict[str, Pair]  # by f"{checkpoint}.{block}"
    targets: dict[str, Pair]  # whole model at the last checkpoint, by kind of targets
    draws: Draws | None

    def pair(self, checkpoint: str, block: str = ALL) -> Pair:
        """Return the measurements of a block."""
        return self.pairs[f"{checkpoint}.{block}"]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Gap:
    """Measure all blocks at all checkpoints."""
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
    """Run the study on a given problem, at the parameters of these models."""
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
    return [*found, Piece("draws", partial(measure_draws, problem, **draws), "repeated draws of targets")]


def replaces(cfg: Config, problem: Problem) -> bool:
    """Return True if the settings request other targets and the problem supports them."""
    return cfg.num_draws > 0 and can_replace(problem)


def chosen_blocks(cfg: Config, problem: Problem) -> list[str]:
    """Return the globs, or every block that they match."""
    there = [block.name for block in problem.space()]
    globs = cfg.blocks or tuple(g for g in ROLES if fnmatch.filter(there, g))
    for glob in globs:
        problem.space(glob)  # raises if it matches nothing
    if not cfg.apart:
        return list(dict.fromkeys(globs))
    return list(dict.fromkeys(block.name for glob in globs for block in problem.space(glob)))


def _piece(checkpoint: int, block: int) -> str:
    """Name of a piece; numbered, because names of checkpoints and globs are not valid folder names."""
    return f"checkpoint{checkpoint}.block{block}"


def _result(
    problem: Problem,
    found: FinishedPieces,
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


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Plan the whole model at every checkpoint, blocks, other targets, and draws of targets."""
    points = len(checkpoint_names(cfg, cfg.checkpoints))
    found = planned_pairs("the whole", cfg.effort(ALL), problem, [()], points)
    if chosen := [(block,) for block in chosen_blocks(cfg, problem)]:
        found += planned_pairs("blocks", cfg.effort(""), problem, chosen, points)
    if replaces(cfg, problem):
        without = cfg.effort(ALL)._replace(num_density_probes=0)
        found += planned_pairs("other targets", without, problem, [()], len(KINDS))
        draws = max(cfg.num_draws, 2)
        found.append(Step("draws of targets", "functional", 2 * draws, columns=2, made=draws))
    return found


PLAN = Plan(
    steps,
    (
        {"num_probes": 3, "num_density_probes": 2, "num_draws": 4},
        {"num_probes": 3, "num_steps": 8, "num_density_probes": 2, "num_draws": 2},
        {"num_probes": 2, "num_steps": 6, "num_density_probes": 0, "num_draws": 0},
    ),
)

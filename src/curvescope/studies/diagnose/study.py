"""Diagnosis of a model: findings with numbers, worst first.

A few measurements of curvature, gradients, heads and data (`measured`), and checks of them (`checks`), each
with a limit that healthy models keep. A check that does not apply to a model says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from curvescope.algorithms import Sharpness
from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study import Plan, Step
from curvescope.runs.study_result import Shown
from curvescope.studies.common.planning import PlannedMatrix, lanczos, together
from curvescope.studies.common.sampling import notes_of_sampling
from curvescope.studies.diagnose import measurements
from curvescope.studies.diagnose.checks import Finding, Seen, look
from curvescope.studies.diagnose.measurements import (
    MOST,
    BlockEnds,
    Depth,
    Effort,
    Heads,
    Parts,
    Rows,
    Samples,
    Whole,
    adam_sharpness,
    matrices,
    measure_depth,
    measure_heads,
    measure_samples,
    sgd_sharpness,
)
from curvescope.studies.problem_config import SampledOnData, make_problem, notes_of, sequences_there
from curvescope.studies.sinks.analysis import basis_length

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Config(SampledOnData):
    """Settings of the comparison and the accuracy. The defaults take under a minute on two cores."""

    lr: float | None = setting(None, "the learning rate that is meant; without it the ceiling is told")
    optimizer: Literal["sgd", "adam", "adamw"] = setting("sgd", "whose ceiling")
    momentum: float = setting(0.0, "β of SGD")
    optimizer_state: str | None = setting(None, "a file of Adam's state_dict; without it v is from gradients")
    num_probes: int = setting(3, "Lanczos runs for both ends and the bulk")
    num_steps: int = setting(14, "steps of each of them")
    num_shared: int = setting(4, "random vectors for the curvature of all blocks")
    block_steps: int = setting(8, "Lanczos steps for λ_max of every matrix; 0: none")
    num_parts: int = setting(4, "disjoint parts of the data, to see how much depends on their choice")
    part_steps: int = setting(8, "Lanczos steps on each of them")
    num_sample_probes: int = setting(3, "random vectors for the trace of every sequence")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "num_probes", "num_parts")
        at_least(self, 2, "num_shared", "num_sample_probes")
        at_least(self, 4, "num_steps", "part_steps")
        at_least(self, 0, "block_steps")
        if self.lr is not None and not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"lr: expected a learning rate above 0, got {self.lr:g}")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum: expected at least 0 and below 1, got {self.momentum:g}")
        if self.optimizer == "sgd" and self.optimizer_state is not None:
            raise UsageError("optimizer_state is that of adam or adamw, got optimizer sgd")
        if self.optimizer_state is not None and not Path(self.optimizer_state).is_file():
            raise UsageError(f"optimizer_state: there is no file {self.optimizer_state}")
        if self.optimizer != "sgd" and self.momentum:
            raise UsageError(f"momentum is a setting of sgd, got optimizer {self.optimizer}")

    @property
    def effort(self) -> Effort:
        """Accuracy of the measurements."""
        return Effort(
            self.num_probes,
            self.num_steps,
            self.num_shared,
            self.block_steps,
            self.part_steps,
            self.num_parts,
            self.seed,
            self.engine,
            self.checkpoint,
        )


@dataclass(frozen=True)
class Diagnosis(Shown):
    """Findings for one model on one set of data, and the measurements behind them."""

    model: str
    data: str
    loss_name: str
    num_terms: float
    checks: list[Finding]  # all of them, worst first
    lr: float | None
    whole: Whole
    rows: Rows
    parts: Parts
    samples: Samples
    heads: Heads
    depth: Depth
    sharpness: Sharpness
    blocks: BlockEnds | None

    @property
    def findings(self) -> list[Finding]:
        """Faults, warnings and notes, worst first, and the learning rate in any case."""
        return [check for check in self.checks if check.found or check.name == "learning_rate"]

    @property
    def unusual(self) -> list[Finding]:
        """Findings that are beyond a limit: all but the ceilings of learning rates that are told anyway."""
        return [check for check in self.findings if check.found and not math.isnan(check.limit)]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Diagnosis:
    """Measure, then look.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled during the run, and used when it resumes.
    """
    problem = make_problem(cfg)
    text = sequences_there(cfg, problem.model) is not None
    return diagnose(problem, cfg, notes_of(cfg, problem), text=text, progress=progress, state=state)


def diagnose(
    problem: Problem,
    cfg: Config | None = None,
    notes: list[str] | None = None,
    *,
    text: bool = False,
    progress: Progress | None = None,
    state: State | None = None,
) -> Diagnosis:
    """Diagnose a problem of one's own; the settings of the model and its data do not count.

    Args:
        problem: The model on its data.
        cfg: How hard to look.
        notes: What a reader should know of the data.
        text: True if the data are a sample of one text.
        progress: Called with (what, number, total) as each piece begins.
        state: Finished pieces by name; filled during the run, and used when it resumes.
    """
    cfg = cfg or Config()
    pieces = _pieces(problem, cfg)
    contents = fingerprint(problem.model, problem.batches)
    done = work_through(pieces, contents=contents, progress=progress, state=state)
    seen = Seen(
        whole=done.take(Whole, "whole"),
        rows=done.take(Rows, "rows"),
        parts=done.take(Parts, "parts"),
        samples=done.take(Samples, "samples"),
        heads=done.take(Heads, "heads"),
        depth=done.take(Depth, "depth"),
        sharpness=done.take(Sharpness, "sharpness"),
        blocks=done.take(BlockEnds, "blocks") if cfg.block_steps else None,
        learning_rate=cfg.lr,
    )
    measured: dict[str, Any] = seen._asdict()
    measured["lr"] = measured.pop("learning_rate")
    return Diagnosis(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        num_terms=problem.num_terms,
        checks=look(seen),
        **measured,
        notes=[*(notes or []), *notes_of_sampling(cfg, seen.parts.reason, text=text)]
        + [f"{seen.sharpness.optimizer}: {word}" for word in seen.sharpness.assumed],
    )


def _pieces(problem: Problem, cfg: Config) -> list[Piece]:
    """Pieces of work, the cheap and most informative first."""
    effort = cfg.effort
    pieces = [
        Piece("heads", partial(measure_heads, problem), "heads"),
        Piece("depth", partial(measure_depth, problem), "the stream"),
        Piece("whole", partial(measurements.measure_whole, problem, effort), "both ends of the spectrum"),
        Piece("rows", partial(measurements.measure_rows, problem, effort), "curvature of all blocks"),
        Piece(
            "parts",
            partial(measurements.measure_parts, problem, effort, cfg),
            "parts of the data",
            needs=("whole",),
        ),
        Piece(
            "samples",
            partial(measure_samples, problem, num_probes=cfg.num_sample_probes, seed=cfg.seed),
            "single sequences",
        ),
    ]
    if cfg.optimizer == "sgd":

        def sharpness(whole: Whole) -> Sharpness:
            return sgd_sharpness(whole, cfg.momentum, cfg.seed)

        pieces.append(Piece("sharpness", sharpness, "the ceiling", needs=("whole",)))
    else:
        work = partial(adam_sharpness, problem, cfg.optimizer, cfg.optimizer_state, effort, cfg.lr)
        pieces.append(Piece("sharpness", work, f"the sharpness that {cfg.optimizer} sees"))
    if cfg.block_steps:
        work = partial(measurements.measure_blocks, problem, effort)
        pieces.append(Piece("blocks", work, "ceilings of single blocks"))
    return pieces


# ------------------------------------------------------------------------------------------------------- plan

SAMPLE = 3  # products that a probe takes on every sequence by itself


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Products over all tokens; every piece has an operator of its own."""
    whole, probes, length = PlannedMatrix(problem, "hessian"), cfg.num_probes, cfg.num_steps
    basis = basis_length(whole.operator, probes, length)
    ends = together("both ends", [whole], probes * length, columns=probes, basis=basis)
    steps = [
        ends,
        Step("rows of blocks", "hessian", cfg.num_shared),
        lanczos("parts of the data", whole, cfg.part_steps),
        *([Step("sampling error", "hessian", cfg.num_parts)] if cfg.sampling else []),
        Step("single sequences", "ggn", SAMPLE * cfg.num_sample_probes),
        Step("gradients", "gradient", 3),
    ]
    if cfg.optimizer != "sgd":
        steps.append(Step("the sharpness that Adam sees", "hessian", MOST))
    if cfg.block_steps:
        parts = [whole._replace(space=(name,)) for name in matrices(problem)]
        count = cfg.block_steps * len(parts)
        steps.append(together("ceilings of blocks", parts, count, basis=cfg.block_steps + 1))
    return [step._replace(made=1, alone=True) for step in steps]


PLAN = Plan(
    steps,
    (
        {"block_steps": 4},
        {"block_steps": 0},
        {"block_steps": 0, "num_probes": 2, "num_steps": 10, "num_shared": 3, "num_sample_probes": 2},
        {
            "block_steps": 0, "num_probes": 2, "num_steps": 8, "num_shared": 2, "num_sample_probes": 2,
            "part_steps": 6,
        },
    ),
)  # fmt: skip

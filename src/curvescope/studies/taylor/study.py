"""Study of the range of derivatives at one point: loss along lines and on a plane, and gradient descent.

The lines go along the gradient, an update of Adam, the sharpest directions, random directions, and to another
checkpoint. On each line the loss is compared with its quadratic and cubic predictions, with the radius up to
which each holds. Gradient descent is predicted step by step from one Lanczos run, and measured. Its learning
rates lie just below and just above the ceiling 2/λ_max, at the model and next to a point that fits the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvescope.algorithms import Eigenpairs, QuadraticDescent
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.model import Model
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.operators import LossLine, LossPlane
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import FinishedPieces, State, work_through
from curvescope.runs.study import Plan, Step
from curvescope.runs.study_result import Shown
from curvescope.studies.problem_config import ModelOnData, load_checkpoints, make_problem, notes_of
from curvescope.studies.taylor import analysis
from curvescope.studies.taylor.analysis import DescentRun, Settled

NOWHERE = "none"


@dataclass(frozen=True)
class Config(ModelOnData):
    """Settings of the study. The defaults take less than a minute on a CPU."""

    tokens: int = setting(
        128, "tokens read from a text; for labeled texts and images: ⌈tokens / seq_len⌉ examples"
    )
    seq_len: int = setting(32, "tokens of one sequence")
    dtype: str = setting("float64", "float32 or float64; descent near a settled point needs float64")
    towards: str | None = setting(
        None,
        "another checkpoint, a revision or a folder; for a bundled model, by default the checkpoint before",
    )
    num_top: int = setting(2, "number of sharpest directions (top eigenvectors of the Hessian)", least=1)
    num_random: int = setting(1, "random directions", least=0)
    update: bool = setting(True, "measure the line along an update of Adam")
    cubic: bool = setting(True, "compute third derivatives")
    num_points: int = setting(17, "points of a line, besides those of the search for the radius", least=2)
    plane_points: int = setting(9, "points along each axis of the plane; 0: no plane", least=0)
    tolerance: float = setting(0.1, "tolerance of a prediction, relative to the sum of its terms")
    shares: tuple[float, ...] = setting(
        (0.1, 0.95, 1.05), "learning rates of gradient descent, in units of 2/λ_max"
    )
    num_steps: int = setting(30, "steps of gradient descent", least=1)
    settle: float = setting(0.02, "fit the data until the loss is this share of its initial value; 0: skip")
    fit_steps: int = setting(100, "most steps of Adam for this fit", least=1)
    fit_rate: float = setting(1e-3, "learning rate of Adam for this fit")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plane_points == 1:
            raise UsageError("plane_points: expected 0 or at least 2, got 1")
        if not self.tolerance > 0 or not self.fit_rate > 0 or not 0 <= self.settle < 1:
            raise UsageError("expected tolerance and fit_rate above 0, and settle at least 0 and below 1")
        if any(not share > 0 for share in self.shares):
            raise UsageError(f"shares: expected numbers above 0, got {self.shares}")


@dataclass(frozen=True)
class SettledPart(Result):
    """Descent on the loss without its slope, next to a point that fits the data."""

    losses: np.ndarray  # losses of Adam during the fit
    reached: bool
    loss: float
    sharpest: float  # λ_max
    residual: float
    along: LossLine  # in the direction in which the descent starts
    predicted: QuadraticDescent
    descents: list[DescentRun]


@dataclass(frozen=True)
class Taylor(Shown):
    """Lines, a plane and descents at a model, and descents next to a settled point."""

    model: str
    data: str
    loss_name: str
    num_parameters: int
    loss: float
    sharpest: np.ndarray  # (num_top,) largest eigenvalues of the Hessian
    residuals: np.ndarray  # (num_top,) an eigenvalue lies within this distance
    lines: dict[str, LossLine]  # by direction
    plane: LossPlane | None
    predicted: QuadraticDescent | None  # at the model, for all shares
    descents: list[DescentRun]
    settled: SettledPart | None


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Taylor:
    """Measure lines, plane and descents."""
    problem = make_problem(cfg)
    other = other_point(cfg, problem.model)
    lines = analysis.lines(cfg, problem, other)
    pieces = [*lines.values(), *analysis.descents(cfg, problem), *analysis.settled(cfg, problem)]
    contents = fingerprint(problem.model, problem.batches, *([] if other is None else [other]))
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    pairs = found.take(Eigenpairs, analysis.SHARP)
    notes = [
        *notes_of(cfg, problem),
        *([] if pairs.converged else ["the sharpest directions have not converged"]),
    ]
    return Taylor(
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        num_parameters=problem.space().size,
        loss=problem.loss_value(),
        sharpest=pairs.values,
        residuals=pairs.residuals,
        lines={
            name: found.take(LossLine, piece.name)
            for name, piece in lines.items()
            if name not in analysis.NO_LINES
        },
        plane=found.take(LossPlane, analysis.PLANE) if cfg.plane_points else None,
        predicted=found.take(QuadraticDescent, analysis.PREDICTED) if cfg.shares else None,
        descents=[found.take(DescentRun, analysis.descent(i)) for i in range(len(cfg.shares))],
        settled=_settled_part(cfg, found) if cfg.settle and cfg.shares else None,
        notes=notes,
    )


def other_point(cfg: Config, model: Model) -> Model | None:
    """Return the checkpoint at the end of a line; of a bundled model by default the one before."""
    name = cfg.towards
    if name is None and cfg.model in BUNDLED:
        at = REVISIONS.index(cfg.revision or REVISIONS[-1])
        name = REVISIONS[at - 1] if at else REVISIONS[1]
    if name is None or name == NOWHERE:
        return None
    return load_checkpoints(cfg, (name,), model)[name]


def _settled_part(cfg: Config, found: FinishedPieces) -> SettledPart:
    point, pairs = found.take(Settled, analysis.SETTLED), found.take(Eigenpairs, analysis.SETTLED_SHARP)
    along = found.take(LossLine, analysis.SETTLED_LINE)
    return SettledPart(
        losses=point.losses,
        reached=point.reached,
        loss=along.expansion.loss,
        sharpest=float(pairs.values[0]),
        residual=float(pairs.residuals[0]),
        along=along,
        predicted=found.take(QuadraticDescent, analysis.SETTLED_PREDICTED),
        descents=[found.take(DescentRun, analysis.settled_descent(i)) for i in range(len(cfg.shares))],
    )


THIRD = 5.0  # cost of a third derivative in products
RADII = 35  # losses of a line besides its grid, for rounding and radii
SHARPEST = 40  # products for the top eigenvectors


def steps(cfg: Config, problem: Problem) -> list[Step]:
    """Planned work: Lanczos, third derivatives, losses on lines and plane, and steps of descent."""
    lines = 2 + cfg.update + cfg.num_top + cfg.num_random
    places = 2 if cfg.settle and cfg.shares else 1
    taken = places * cfg.num_steps * len(cfg.shares)
    fitted = cfg.fit_steps if places == 2 else 0
    products = places * (SHARPEST + cfg.num_steps * bool(cfg.shares)) + SHARPEST / 2 * len(cfg.shares)
    losses = (lines + places - 1) * (cfg.num_points + RADII) + cfg.plane_points**2 + taken
    return [
        Step("eigenvectors and predictions", "hessian", products, basis=SHARPEST),
        Step("along lines", "hessian", (lines + places - 1) * (1 + THIRD * cfg.cubic)),
        Step("losses", "loss", losses),
        Step("gradients", "gradient", lines + taken + fitted),
    ]


PLAN = Plan(
    steps,
    (
        {"plane_points": 7, "num_points": 11},
        {"plane_points": 7, "num_points": 11, "num_steps": 20, "num_top": 1},
        {"plane_points": 5, "num_points": 9, "num_steps": 10, "num_top": 1, "settle": 0.0, "cubic": False},
        {
            "plane_points": 0, "num_points": 7, "num_steps": 5, "num_top": 1, "settle": 0.0,
            "cubic": False, "update": False,
        },
    ),
)  # fmt: skip

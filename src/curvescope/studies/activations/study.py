"""Curvature in activations: how sharply the loss bends in every token's state, at every point of the stream.

For each token and point the loss of its sequence is taken as a function of that one state, all others held
fixed at what they are: the largest and smallest eigenvalue of its Hessian, the trace, and the sharpest
direction as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.numbers import rounded
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.capture.points import find_point, stream_points
from curvescope.models.model import Model
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.activations.analysis import Matrix, TokenCurvature, token_curvature, token_names
from curvescope.studies.setting import ModelOnData, make_problem, notes_of
from curvescope.viz.writers import visible

if TYPE_CHECKING:
    pass

SHARE = 0.01  # of λ_max, that a residual may be for a reader not to be told


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at. The defaults take half a minute on a CPU."""

    tokens: int = setting(64, "of a text; every one of them gets a row at every point")
    seq_len: int = setting(32, "tokens of one sequence; the cost grows with its square")
    points: tuple[str, ...] = setting(
        (), "embed, L3.mid, L2.h1.out, a submodule, …; by default embed, the end of every layer, and final"
    )
    matrix: Matrix = setting("hessian", "hessian, or ggn for its GGN")
    num_steps: int = setting(12, "Lanczos steps in every token's block")
    num_probes: int = setting(8, "random vectors for the traces; blocks of no more rows than both are exact")
    k: int = setting(3, "tokens on each side of the sharpest direction")

    def __post_init__(self) -> None:
        as_tuples(self, "points")
        super().__post_init__()
        at_least(self, 1, "num_steps", "k")
        at_least(self, 2, "num_probes")


@dataclass(frozen=True)
class Activations(Shown):
    """The tokens of some data at some points of a model."""

    model: str
    data: str
    matrix: str
    loss: float
    points: list[TokenCurvature]  # in the order they were asked for
    texts: list[str]  # of the tokens, in the order of the first point's rows

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        medians = {p.at: float(np.median(p.lambda_max)) for p in self.points}
        relative = {p.at: float(np.median(p.relative)) for p in self.points}
        steep = max(relative, key=lambda at: relative[at])
        top = max(self.points, key=lambda p: float(p.relative.max()))
        m = int(top.relative.argmax())
        where = f"token {top.position[m]} of sequence {top.sequence[m]}"
        negative = float(np.mean(np.concatenate([p.trace < 0 for p in self.points])))
        lines = [
            ("tokens", str(len(self.texts)), f"of {self.data}, at {len(self.points)} points of {self.model}"),
            ("loss", f"{self.loss:.4f}", "mean over all terms"),
            ("λ_max", rounded(medians[steep]), f"median over tokens at {steep}, nats per squared unit of x"),
            ("λ_max |x|²", rounded(relative[steep]), f"the largest median over tokens of any point: {steep}"),
            (
                "sharpest token",
                f"'{visible(self.texts[m])}'" if self.texts[m] else str(top.position[m]),
                f"{where} at {top.at}: λ_max |x|² is {top.relative[m]:.3g}; down the loss: {top.towards[m]}",
            ),
            ("negative traces", f"{negative:.0%}", "of all tokens and points bend down more than up"),
        ]
        return [*lines, *(("note", "", note) for note in [*self.notes, *self._unsure()])]

    def _unsure(self) -> list[str]:
        far = [p.at for p in self.points if (p.residual > SHARE * np.abs(p.lambda_max)).any()]
        said = "λ_max is not found to 1 % for some tokens at"
        return [f"{said} {', '.join(far)}: num_steps can be raised"] if far else []

    def opening(self) -> str:
        """What these numbers say."""
        medians = {p.at: float(np.median(p.relative)) for p in self.points}
        steep, flat = (pick(medians, key=medians.__getitem__) for pick in (max, min))
        negative = float(np.mean(np.concatenate([p.trace < 0 for p in self.points])))
        spread = f", least at {flat} ({rounded(medians[flat])})" if flat != steep else ""
        return (
            f"The loss hangs most on a token's state at {steep}, where the median of λ_max |x|² is "
            f"{rounded(medians[steep])}{spread}. At {negative:.0%} of all tokens and points it bends "
            "down more than up."
        )


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Activations:
    """Measure every token at every point.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    problem = make_problem(cfg)
    points = choose_points(cfg.points, problem.model)
    options = {"num_steps": cfg.num_steps, "num_probes": cfg.num_probes, "k": cfg.k, "seed": cfg.seed}
    options |= {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    pieces = [
        Piece(
            f"tokens at {at}",
            partial(token_curvature, problem, at, matrix=cfg.matrix, **options),
            answer=_answer,
            kind="points",
        )
        for at in points
    ]
    contents = fingerprint(problem.model, problem.batches)
    done = work_through(pieces, contents=contents, progress=progress, state=state)
    found = [done.take(TokenCurvature, f"tokens at {at}") for at in points]
    return Activations(
        problem.model.name,
        problem.batches.name,
        cfg.matrix,
        problem.loss_value(),
        found,
        token_names(problem, found[0]),
        notes=notes_of(cfg, problem),
    )


def choose_points(wanted: tuple[str, ...], model: Model) -> list[str]:
    """The points asked for, each of which is there; by default embed, the ends of layers, and final."""
    ends = [] if wanted else [at for at in stream_points(model) if not at.endswith(".mid")]
    points = list(dict.fromkeys(wanted)) or [*ends, "final"]
    for at in points:
        find_point(model, at)
    return points


def _answer(found: Result) -> str:
    assert isinstance(found, TokenCurvature)
    middle, most = np.median(found.lambda_max), found.lambda_max.max()
    return f"{found.at}: λ_max {middle:.3g} (median), {most:.3g} (most)"

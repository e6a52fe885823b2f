"""Curvature of the loss in the activations of every token, at every point of the residual stream.

For each token and point, the loss of the sequence is a function of that token's activation; all other
activations are fixed. The study measures the largest and smallest eigenvalue of its Hessian, the trace, and
the sharpest direction, decoded as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import EqualBlocks, equal_blocks
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.number_format import rounded
from curvescope.core.progress import Progress, track
from curvescope.core.result import Result
from curvescope.geometry.causal.decoded import decode_at
from curvescope.geometry.vocabulary.names import names_of
from curvescope.models.capture.activation_points import find_point, stream_points
from curvescope.models.model import Model
from curvescope.operators.activations import ActivationGGN, ActivationHessian, ActivationOperator
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Line, Shown
from curvescope.studies.common.columns import stack_tables
from curvescope.studies.problem_config import ModelOnData, make_problem, notes_of
from curvescope.viz.writers import label, visible

Matrix = Literal["hessian", "ggn"]
KINDS: dict[str, type[ActivationOperator]] = {"hessian": ActivationHessian, "ggn": ActivationGGN}


@dataclass(frozen=True)
class TokenCurvature(Result):
    """Curvature of each token x at one point: a row describes the w × w matrix ∂²s/∂x², where s is the summed
    loss of the token's sequence.

    This matrix is N times the token's block of `ActivationHessian`, so it does not depend on the amount of
    other data. An eigenvalue lies within `residual` of `lambda_max`. `towards` holds the tokens that the
    sharpest direction writes on the side where the loss falls, and `away` the tokens on the other side.
    """

    at: str
    width: int
    sequence: np.ndarray  # (M,)
    position: np.ndarray  # (M,)
    lambda_max: np.ndarray  # (M,)
    lambda_min: np.ndarray  # (M,)
    residual: np.ndarray  # (M,)
    trace: np.ndarray  # (M,)
    trace_stderr: np.ndarray  # (M,) over probes; zero where exact
    slope: np.ndarray  # (M,) |∂s/∂x|
    size: np.ndarray  # (M,) |x|
    towards: list[str]
    away: list[str]
    exact: bool

    @property
    def relative(self) -> np.ndarray:
        """λ_max |x|²: curvature along a step measured in units of |x|."""
        return self.lambda_max * self.size**2


def token_curvature(
    problem: Problem,
    at: str,
    *,
    matrix: Matrix = "hessian",
    num_steps: int = 12,
    num_probes: int = 8,
    k: int = 3,
    seed: int = 0,
    engine: Any = "auto",
    checkpoint: bool = False,
) -> TokenCurvature:
    """Measure the curvature of the loss in every token's activations at a point, one batch at a time.

    Args:
        problem: A `cs.Problem`.
        at: The point: `L3.mid`, `embed`, `L2.h1.out`, `final`, any submodule.
        matrix: The Hessian, or its GGN.
        num_steps: Lanczos steps in every token's block.
        num_probes: Random vectors for the traces. Blocks of at most num_steps + num_probes rows are exact.
        k: Number of tokens on each side of a direction; 0 skips decoding.
        engine: How products are executed.
        checkpoint: Recompute layers instead of storing their activations.
        seed: Seed of the start vectors and probes.
    """
    if matrix not in KINDS:
        raise UsageError(f"expected matrix 'hessian' or 'ggn', got {matrix!r}")
    rows, first = [], 0
    for batch in track(problem.batches, f"tokens at {at}"):
        here = range(first, first + batch.num_sequences)
        op = KINDS[matrix](problem, at, tokens=list(here), engine=engine, checkpoint=checkpoint)
        blocks = op.token_blocks()
        ends = equal_blocks(
            blocks, blocks.block_size, num_steps=num_steps, num_probes=num_probes, seed=seed + first
        )
        rows.append(_rows(op, ends, k))
        first = here.stop
    return stack_tables(rows)


def _rows(op: ActivationOperator, ends: EqualBlocks, k: int) -> TokenCurvature:
    """Curvature of the tokens of one batch, times N, because the operator divides by N."""
    N, w = op.problem.num_terms, op.width
    x, slope = (v.view(-1, w).double().cpu().numpy() for v in (op.values(), N * op.gradient()))
    vectors = ends.vectors.cpu().numpy()
    falls = -np.sign((slope * vectors).sum(1, keepdims=True))
    down = vectors * np.where(falls == 0, 1.0, falls)
    sides = _decoded(op, down, k) if k else [[""] * len(x)] * 2
    sequence, position = np.array(op.tokens).T
    return TokenCurvature(
        op.at,
        w,
        sequence,
        position,
        N * ends.values[:, 1],
        N * ends.values[:, 0],
        N * ends.residuals[:, 1],
        N * ends.trace,
        N * ends.trace_stderr,
        np.linalg.norm(slope, axis=1),
        np.linalg.norm(x, axis=1),
        sides[0],
        sides[1],
        ends.exact,
    )


def _decoded(op: ActivationOperator, directions: np.ndarray, k: int) -> list[list[str]]:
    """Decode both sides of every direction into quoted tokens; empty if the model has no vocabulary."""
    try:
        top = decode_at(op.problem.model, op.at, torch.from_numpy(directions), k=k)
    except UsageError:
        return [[""] * len(directions)] * 2
    return [
        [" ".join(map(_quoted, top.text[m][side], top.bytes[m][side])) for m in range(len(directions))]
        for side in (0, 1)
    ]


def _quoted(text: str, raw: str) -> str:
    return f"'{visible(label(text, raw))}'"


def token_names(problem: Problem, curvature: TokenCurvature) -> list[str]:
    """Text of the token of each row; empty if the inputs have no tokens at these positions."""
    model: Model = problem.model
    rows: list[Tensor] = []
    for batch in problem.batches:
        ids = batch.inputs if isinstance(batch.inputs, Tensor) else batch.inputs.get("input_ids")
        rows += [] if ids is None or ids.dim() != 2 or ids.is_floating_point() else list(ids.cpu())
    names, found = names_of(model.tokenizer), []
    for n, t in zip(curvature.sequence.tolist(), curvature.position.tolist(), strict=True):
        here = n < len(rows) and t < len(rows[n])
        found.append(names.text(int(rows[n][t])) if here else "")
    return found


SHARE = 0.01  # a note names points where the residual exceeds this share of λ_max


@dataclass(frozen=True)
class Config(ModelOnData):
    """Data, points and effort. The defaults take half a minute on a CPU."""

    tokens: int = setting(64, "tokens of a text; each gets a row at every point")
    seq_len: int = setting(32, "tokens of one sequence; the cost grows with its square")
    points: tuple[str, ...] = setting(
        (), "points: embed, L3.mid, L2.h1.out, a submodule, …; default: embed, the end of every layer, final"
    )
    matrix: Matrix = setting("hessian", "hessian, or ggn for its GGN")
    num_steps: int = setting(12, "Lanczos steps in every token's block", least=1)
    num_probes: int = setting(
        8, "random vectors for the traces; blocks of at most num_steps + num_probes rows are exact", least=2
    )
    k: int = setting(3, "tokens on each side of the sharpest direction", least=1)


@dataclass(frozen=True)
class Activations(Shown):
    """Curvature in the activations of all tokens, at the chosen points of a model."""

    model: str
    data: str
    matrix: str
    loss: float
    points: list[TokenCurvature]  # in the requested order
    texts: list[str]  # of the tokens, in the order of the first point's rows

    def summary(self) -> list[Line]:
        """Return the key numbers: label, value, explanation."""
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
            ("λ_max |x|²", rounded(relative[steep]), f"largest median over tokens, at {steep}"),
            (
                "sharpest token",
                f"'{visible(self.texts[m])}'" if self.texts[m] else str(top.position[m]),
                f"{where} at {top.at}: λ_max |x|² is {top.relative[m]:.3g}; tokens that lower the loss: "
                f"{top.towards[m]}",
            ),
            (
                "negative traces",
                f"{negative:.0%}",
                "of all tokens and points have a negative trace: more downward than upward curvature",
            ),
        ]
        return [*lines, *(("note", "", note) for note in [*self.notes, *self._unsure()])]

    def _unsure(self) -> list[str]:
        far = [p.at for p in self.points if (p.residual > SHARE * np.abs(p.lambda_max)).any()]
        said = "λ_max is not found to 1 % for some tokens at"
        return [f"{said} {', '.join(far)}: num_steps can be raised"] if far else []

    def opening(self) -> str:
        """Summarize the result in two sentences."""
        medians = {p.at: float(np.median(p.relative)) for p in self.points}
        steep, flat = (pick(medians, key=medians.__getitem__) for pick in (max, min))
        negative = float(np.mean(np.concatenate([p.trace < 0 for p in self.points])))
        spread = f", and lowest at {flat} ({rounded(medians[flat])})" if flat != steep else ""
        return (
            f"The loss is most sensitive to a token's activation at {steep}, where the median of λ_max |x|² "
            f"is {rounded(medians[steep])}{spread}. At {negative:.0%} of all tokens and points the trace is "
            "negative."
        )


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Activations:
    """Measure every token at every point."""
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
    """Return the requested points, which must exist; by default embed, the ends of layers, and final."""
    ends = [] if wanted else [at for at in stream_points(model) if not at.endswith(".mid")]
    points = list(dict.fromkeys(wanted)) or [*ends, "final"]
    for at in points:
        find_point(model, at)
    return points


def _answer(found: Result) -> str:
    assert isinstance(found, TokenCurvature)
    middle, most = np.median(found.lambda_max), found.lambda_max.max()
    return f"{found.at}: λ_max {middle:.3g} (median), {most:.3g} (largest)"

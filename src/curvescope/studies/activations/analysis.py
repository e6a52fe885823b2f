"""The curvature of the loss in every single token's activations at a point, with its sharpest direction."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import EqualBlocks, equal_blocks
from curvescope.core.errors import UsageError
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.geometry.causal.decoded import decode_at
from curvescope.geometry.vocabulary.names import names_of
from curvescope.models.model import Model
from curvescope.operators.activations import ActivationGGN, ActivationHessian, ActivationOperator
from curvescope.problem import Problem
from curvescope.viz.writers import label, visible

Matrix = Literal["hessian", "ggn"]
KINDS: dict[str, type[ActivationOperator]] = {"hessian": ActivationHessian, "ggn": ActivationGGN}


@dataclass(frozen=True)
class TokenCurvature(Result):
    """One row for each token x at a point: of the w × w matrix ∂²s/∂x², s the sum of its sequence's losses.

    It is N times the token's block of `ActivationHessian`, so that it does not depend on how much other data
    there is. An eigenvalue lies within `residual` of `lambda_max`. `towards` are the tokens that the sharpest
    direction writes on the side where the loss falls, `away` those on the other side.
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
        """λ_max |x|²: the curvature along a step that is measured in units of x."""
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
    """The curvature of the loss in every token's activations at a point, one batch of the data at a time.

    Args:
        problem: A `cs.Problem`.
        at: The point: `L3.mid`, `embed`, `L2.h1.out`, `final`, any submodule.
        matrix: The Hessian, or its GGN.
        num_steps: Lanczos steps in every token's block.
        num_probes: For the traces. Blocks of no more than num_steps + num_probes rows are exact.
        k: Tokens on each side of a direction; 0 decodes nothing.
        engine: How products are executed.
        checkpoint: Whether layers are computed again instead of being kept.
        seed: Of starts and probes.
    """
    if matrix not in KINDS:
        raise UsageError(f"expected matrix 'hessian' or 'ggn', got {matrix!r}")
    rows, first = [], 0
    for batch in track(problem.batches, f"tokens at {at}"):
        here = range(first, first + batch.num_sequences)
        op = KINDS[matrix](problem, at, tokens=list(here), engine=engine, checkpoint=checkpoint)
        blocks = op.tokens_apart()
        ends = equal_blocks(
            blocks, blocks.block_size, num_steps=num_steps, num_probes=num_probes, seed=seed + first
        )
        rows.append(_rows(op, ends, k))
        first = here.stop
    return _joined(rows)


def _rows(op: ActivationOperator, ends: EqualBlocks, k: int) -> TokenCurvature:
    """The tokens of one batch; what the operator divides by N is taken times N."""
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
    """Tokens on both sides of every direction, in quotation marks; empty where they have no vocabulary."""
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


def _joined(parts: list[TokenCurvature]) -> TokenCurvature:
    """The tokens of all batches."""
    first = parts[0]
    found = {}
    for field in fields(first):
        values = [getattr(part, field.name) for part in parts]
        kind = type(values[0])
        found[field.name] = (
            np.concatenate(values)
            if kind is np.ndarray
            else [text for value in values for text in value]
            if kind is list
            else values[0]
        )
    return replace(first, **found)


def token_names(problem: Problem, curvature: TokenCurvature) -> list[str]:
    """What the tokens of the rows are called; empty where the inputs are no tokens at these positions."""
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

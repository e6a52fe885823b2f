"""What a model does along the singular directions of a layer, next to what derivatives predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.geometry.causal.attribution import Attribution, logit_attribution
from curvescope.geometry.causal.decoded import Direction, decode_at, direct_change, layer_directions
from curvescope.geometry.causal.steering import ablation, intervene, spread_along, steer
from curvescope.operators.activations import ActivationHessian
from curvescope.problem import Problem
from curvescope.viz.writers import label, visible


@dataclass(frozen=True)
class Directions(Result):
    """Directions of one layer, one row each; a step of α is α standard deviations σ of what is there.

    `slope` and `bend` are σ g · u and σ² uᵀ H u for the same u at every token, so that the change of the loss
    is predicted as α slope + α² bend / 2. The last entry of axis 1 of `loss_change` and `kl` is the ablation.
    """

    names: list[str]
    kinds: list[str]
    at: list[str]
    tokens: list[str]  # that the direction raises on the direct path
    singular_value: np.ndarray  # (D,)
    sigma: np.ndarray  # (D,)
    alphas: np.ndarray  # (A,)
    loss_change: np.ndarray  # (D, A + 1)
    kl: np.ndarray  # (D, A + 1)
    slope: np.ndarray  # (D, 2) of steering by one σ, and of the ablation
    bend: np.ndarray  # (D, 2)
    logit_change: np.ndarray  # (D, A) of those tokens, mean
    logit_direct: np.ndarray  # (D,) predicted for one σ on the direct path

    def predicted(self, order: int) -> np.ndarray:
        """The change of the loss to first or second order: (D, A + 1)."""
        steps = np.append(self.alphas, 1.0)
        which = [0] * len(self.alphas) + [1]
        found = steps * self.slope[:, which]
        return found if order == 1 else found + steps**2 / 2 * self.bend[:, which]


def measure_layer(
    problem: Problem, layer: int, *, num: int, k: int, alphas: Sequence[float], engine: Any = "auto"
) -> Directions:
    """Steer and ablate along every direction of a layer.

    Args:
        problem: A `cs.Problem`.
        layer: Whose weights.
        num: Largest singular directions of each matrix.
        k: Tokens that a direction is decoded into, and whose logits are watched.
        alphas: Strengths, in standard deviations of the activations along the direction.
        engine: How products are executed.
    """
    found = layer_directions(problem.model, layer, num=num)
    rows = []
    for at in dict.fromkeys(direction.at for direction in found):
        own = [direction for direction in found if direction.at == at]
        rows += _at_point(problem, at, own, k, alphas, engine)
    rows = [rows[i] for i in np.argsort([found.index(row["direction"]) for row in rows])]

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows])

    return Directions(
        names=[direction.name for direction in found],
        kinds=[direction.kind for direction in found],
        at=[direction.at for direction in found],
        tokens=[row["tokens"] for row in rows],
        singular_value=np.array([direction.singular_value for direction in found]),
        alphas=np.array(alphas, dtype=float),
        **{name: column(name) for name in ("sigma", "loss_change", "kl", "slope", "bend")},
        **{name: column(name) for name in ("logit_change", "logit_direct")},
    )


def _at_point(
    problem: Problem, at: str, own: list[Direction], k: int, alphas: Sequence[float], engine: Any
) -> list[dict[str, Any]]:
    """The numbers of the directions of one point."""
    vectors = torch.stack([direction.vector for direction in own])
    top = decode_at(problem.model, at, vectors, k=k)
    ids = torch.from_numpy(top.ids[:, 0])
    sigma = spread_along(problem, at, vectors)
    direct = direct_change(problem, at, vectors, ids).mean(1).numpy()
    H = ActivationHessian(problem, at, engine=engine)
    rows = []
    with H.frozen():
        gradient, x = H.gradient(), H.values().view(-1, H.width)
        for i, direction in enumerate(track(own, f"directions at {at}")):
            u = problem.placed(float(sigma[i]) * direction.vector)
            take = ablation(problem, at, u)
            steered = steer(problem, at, u, alphas, watch=ids[i].tolist())
            ablated = intervene(problem, at, take)
            steps = torch.stack([u.expand_as(x).flatten(), take(x).flatten()], dim=1)
            rows.append(
                {
                    "direction": direction,
                    "tokens": " ".join(map(_quoted, top.text[i][0], top.bytes[i][0])),
                    "sigma": sigma[i],
                    "loss_change": np.append(steered.loss_change, ablated.loss_change),
                    "kl": np.append(steered.kl, ablated.kl),
                    "slope": _numbers(gradient @ steps),
                    "bend": _numbers((steps * (H @ steps)).sum(0)),
                    "logit_change": steered.logit_change.mean(1),
                    "logit_direct": sigma[i] * direct[i],
                }
            )
    return rows


def _numbers(x: Tensor) -> np.ndarray:
    return x.double().cpu().numpy()


def _quoted(text: str, raw: str) -> str:
    return f"'{visible(label(text, raw))}'"


@dataclass(frozen=True)
class Parts(Result):
    """What the logits of the targets are made of, in the mean over tokens; empty, with a note, where unknown.

    Standard errors are over sequences.
    """

    names: list[str]
    mean: np.ndarray  # (C,)
    stderr: np.ndarray  # (C,)
    size: np.ndarray  # (C,) root mean square
    logit: float  # mean over tokens
    error: float  # largest difference of a sum from the model's own logit
    note: str = ""


def measure_parts(problem: Problem) -> Parts:
    """Direct logit attribution of the targets of a problem, less the mean logit."""
    parts: list[Attribution] = []
    first, sequence = 0, []
    try:
        for batch in problem.batches:
            if not isinstance(batch.inputs, Tensor) or batch.targets.shape != batch.inputs.shape:
                raise CurvescopeError("attribution needs one target for each token of the inputs")
            parts.append(logit_attribution(problem.model, batch.inputs, batch.targets))
            sequence.append(parts[-1].sequence + first)
            first += batch.num_sequences
    except CurvescopeError as error:
        none = np.zeros(0)
        return Parts([], none, none, none, float("nan"), float("nan"), error.message)
    values, own = np.concatenate([p.values for p in parts], axis=1), np.concatenate(sequence)
    means = np.stack([values[:, own == n].mean(1) for n in np.unique(own)], axis=1)
    spread = means.std(1, ddof=1) if means.shape[1] > 1 else np.full(len(means), np.nan)
    return Parts(
        parts[0].parts,
        values.mean(1),
        spread / np.sqrt(means.shape[1]),
        np.sqrt((values**2).mean(1)),
        float(np.concatenate([p.logits for p in parts]).mean()),
        max(p.error for p in parts),
    )

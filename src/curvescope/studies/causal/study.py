"""Steering and ablation along directions of the weights, compared with the prediction by derivatives.

The study decodes singular directions of W_VO, W_QK and the feed-forward weights as tokens and moves the
activations along them. It compares the change of the loss with its first- and second-order prediction, and
the change of the decoded tokens' logits with the direct path. It also attributes the logits of the target
tokens to heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.config import setting
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import Progress, track
from curvescope.core.result import Result
from curvescope.geometry.causal.attribution import Attribution, logit_attribution
from curvescope.geometry.causal.decoded import SingularDirection, decode_at, direct_change, layer_directions
from curvescope.geometry.causal.steering import ablation, intervene, spread_along, steer
from curvescope.models.forward_errors import check_vocabulary
from curvescope.operators.activations import ActivationHessian
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Line, Shown
from curvescope.studies.problem_config import ModelOnData, choose_layers, make_problem, notes_of
from curvescope.viz.writers import label, visible


@dataclass(frozen=True)
class Directions(Result):
    """Directions of one layer, one row each. A step α moves the activations by α of their standard deviations
    σ.

    `slope` and `bend` are σ g · u and σ² uᵀ H u with the same u at every token. The predicted change of the
    loss is α slope + α² bend / 2. The last entry of axis 1 of `loss_change` and `kl` is the ablation.
    """

    names: list[str]
    kinds: list[str]
    at: list[str]
    tokens: list[str]  # tokens whose logits the direction raises on the direct path
    singular_value: np.ndarray  # (D,)
    sigma: np.ndarray  # (D,)
    alphas: np.ndarray  # (A,)
    loss_change: np.ndarray  # (D, A + 1)
    kl: np.ndarray  # (D, A + 1)
    slope: np.ndarray  # (D, 2) of steering by one σ and of the ablation
    bend: np.ndarray  # (D, 2)
    logit_change: np.ndarray  # (D, A) mean over those tokens
    logit_direct: np.ndarray  # (D,) predicted for one σ on the direct path

    def predicted(self, order: int) -> np.ndarray:
        """Predicted change of the loss to first or second order: (D, A + 1)."""
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
        layer: Index of the layer.
        num: Number of singular directions of each matrix, the largest first.
        k: Number of tokens that a direction is decoded into, and whose logits are measured.
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
    problem: Problem, at: str, own: list[SingularDirection], k: int, alphas: Sequence[float], engine: Any
) -> list[dict[str, Any]]:
    """Measure the directions of one point."""
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
    """Mean contribution of each component to the logit of the target; empty, with a note, if unavailable.

    Standard errors are over sequences.
    """

    names: list[str]
    mean: np.ndarray  # (C,)
    stderr: np.ndarray  # (C,)
    size: np.ndarray  # (C,) root mean square
    logit: float  # mean logit over tokens
    error: float  # largest difference between a sum of parts and the model's logit
    note: str = ""


def measure_parts(problem: Problem) -> Parts:
    """Attribute the logits of the targets, minus the mean logit, to the components of the model."""
    parts: list[Attribution] = []
    first, sequence = 0, []
    try:
        for batch in problem.batches:
            if not isinstance(batch.inputs, Tensor) or batch.targets.shape != batch.inputs.shape:
                raise CurvescopeError(
                    "expected one target for each input token; logit attribution needs them"
                )
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


ALPHAS = (-2.0, -1.0, -0.5, -0.1, 0.1, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Config(ModelOnData):
    """Data, layers and strengths. The defaults take half a minute on a CPU."""

    tokens: int = setting(128, "tokens of a text; every intervention moves all of them")
    seq_len: int = setting(64, "tokens of one sequence")
    layers: tuple[int, ...] = setting(
        (), "layer indices; default: all of up to four layers, else first, middle and last"
    )
    num: int = setting(1, "number of singular directions of each matrix, the largest first", least=1)
    k: int = setting(3, "tokens that a direction is decoded into", least=1)
    alphas: tuple[float, ...] = setting(
        ALPHAS, "strengths of steering, in standard deviations along the direction"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.alphas or not all(np.isfinite(self.alphas)) or 0.0 in self.alphas:
            raise UsageError(f"alphas: expected finite numbers other than 0, got {self.alphas}")


@dataclass(frozen=True)
class Causal(Shown):
    """Tested directions of the chosen layers, and the attribution of the logits."""

    model: str
    data: str
    loss: float
    layers: list[Directions]
    parts: Parts

    def summary(self) -> list[Line]:
        """Return the key numbers: label, value, explanation."""
        found = self.stacked("loss_change")
        names = [name for layer in self.layers for name in layer.names]
        lines: list[Line] = [
            ("directions", str(len(names)), f"of {self.model} on {self.data}, loss {self.loss:.4f}")
        ]
        for order, words in ((1, "first order"), (2, "second order")):
            r = agreement(self.predicted(order)[:, :-1], found[:, :-1])
            lines.append(
                (words, f"{r:.3f}", "correlation of the predicted and the measured change of the loss")
            )
        most = int(np.argmax(np.abs(found[:, -1])))
        lines.append(
            (
                "ablation",
                f"{found[most, -1]:+.3f}",
                f"{names[most]} has the largest change of the loss, in nats",
            )
        )
        direct = np.outer(self.stacked("logit_direct"), self.alphas)
        r = agreement(direct, self.stacked("logit_change"))
        note = "correlation of the decoded tokens' logit changes: predicted on the direct path and measured"
        lines.append(("direct path", f"{r:.3f}", note))
        if self.parts.names:
            top = int(np.argmax(np.abs(self.parts.mean)))
            note = f"{self.parts.names[top]} contributes most to the target's logit, {self.parts.logit:.2f}"
            lines.append(("attribution", f"{self.parts.mean[top]:+.3f}", note))
        return lines + [("note", "", note) for note in self.notes]

    @property
    def alphas(self) -> np.ndarray:
        """Strengths of steering: (A,)."""
        return self.layers[0].alphas

    def stacked(self, name: str) -> np.ndarray:
        """Concatenate a field of the directions of all layers."""
        return np.concatenate([getattr(layer, name) for layer in self.layers])

    def predicted(self, order: int) -> np.ndarray:
        """Predicted change of the loss of all directions: (D, A + 1)."""
        return np.concatenate([layer.predicted(order) for layer in self.layers])

    def opening(self) -> str:
        """Summarize the result in two sentences."""
        found, names = self.stacked("loss_change"), [n for layer in self.layers for n in layer.names]
        first, second = (agreement(self.predicted(order)[:, :-1], found[:, :-1]) for order in (1, 2))
        most = int(np.argmax(np.abs(found[:, -1])))
        return (
            f"The predicted change of the loss under steering along {len(names)} directions correlates with "
            f"the measured one by {first:.2f} from the gradient alone and by {second:.2f} with the Hessian. "
            f"Ablating {names[most]} changes the loss most, by {found[most, -1]:+.3f} nats."
        )


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Causal:
    """Test the directions of every chosen layer, and attribute the logits."""
    problem = make_problem(cfg)
    check_vocabulary(problem.model)
    layers = choose_layers(cfg.layers, problem.model)
    options = {"num": cfg.num, "k": cfg.k, "alphas": cfg.alphas, "engine": cfg.engine}
    pieces = [Piece("attribution", partial(measure_parts, problem))]
    pieces += [
        Piece(
            f"directions of L{i}",
            partial(measure_layer, problem, i, **options),
            answer=partial(_answer, i),
            kind="layers",
        )
        for i in layers
    ]
    contents = fingerprint(problem.model, problem.batches)
    done = work_through(pieces, contents=contents, progress=progress, state=state)
    parts = done.take(Parts, "attribution")
    return Causal(
        problem.model.name,
        problem.batches.name,
        problem.loss_value(),
        [done.take(Directions, f"directions of L{i}") for i in layers],
        parts,
        notes=[*notes_of(cfg, problem), *([parts.note] if parts.note else [])],
    )


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation coefficient of all entries; nan if one array is constant."""
    a, b = a.ravel() - a.mean(), b.ravel() - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else float("nan")


def _answer(layer: int, found: Result) -> str:
    assert isinstance(found, Directions)
    r = agreement(found.predicted(2)[:, :-1], found.loss_change[:, :-1])
    return f"L{layer}: {len(found.names)} directions, measured and predicted changes correlate by {r:.3f}"

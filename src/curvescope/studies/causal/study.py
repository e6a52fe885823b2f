"""Do directions of weights do what they say? Steered and ablated along, next to what derivatives predict.

Singular directions of W_VO and W_QK of every head and of the feed-forward weights are decoded as tokens; then
the activations are moved along them, and the change of the loss is set beside its first- and second-order
prediction, that of the decoded tokens' logits beside the direct path. And what the logits of the right tokens
are made of, head by head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.forward_errors import check_vocabulary
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.causal.analysis import Directions, Parts, measure_layer, measure_parts
from curvescope.studies.setting import ModelOnData, choose_layers, make_problem, notes_of

if TYPE_CHECKING:
    pass

ALPHAS = (-2.0, -1.0, -0.5, -0.1, 0.1, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at. The defaults take half a minute on a CPU."""

    tokens: int = setting(128, "of a text; all of them are moved at once")
    seq_len: int = setting(64, "tokens of one sequence")
    layers: tuple[int, ...] = setting((), "which; by default all of up to four, else first, middle and last")
    num: int = setting(1, "largest singular directions of each matrix")
    k: int = setting(3, "tokens that a direction is decoded into")
    alphas: tuple[float, ...] = setting(ALPHAS, "strengths, in standard deviations along the direction")

    def __post_init__(self) -> None:
        as_tuples(self, "layers", "alphas")
        super().__post_init__()
        at_least(self, 1, "num", "k")
        if not self.alphas or not all(np.isfinite(self.alphas)) or 0.0 in self.alphas:
            raise UsageError(f"alphas: expected finite numbers other than 0, got {self.alphas}")


@dataclass(frozen=True)
class Causal(Shown):
    """Directions of some layers, tested, and what the logits are made of."""

    model: str
    data: str
    loss: float
    layers: list[Directions]
    parts: Parts

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        found = self.stacked("loss_change")
        names = [name for layer in self.layers for name in layer.names]
        lines: list[Line] = [
            ("directions", str(len(names)), f"of {self.model} on {self.data}, loss {self.loss:.4f}")
        ]
        for order, words in ((1, "first order"), (2, "second order")):
            r = agreement(self.predicted(order)[:, :-1], found[:, :-1])
            lines.append(
                (words, f"{r:.3f}", "correlation of the predicted change of the loss with that found")
            )
        most = int(np.argmax(np.abs(found[:, -1])))
        lines.append(
            ("ablation", f"{found[most, -1]:+.3f}", f"{names[most]}: the largest change of the loss, in nats")
        )
        direct = np.outer(self.stacked("logit_direct"), self.alphas)
        r = agreement(direct, self.stacked("logit_change"))
        note = "correlation of the logits of decoded tokens on the direct path with those found"
        lines.append(("direct path", f"{r:.3f}", note))
        if self.parts.names:
            top = int(np.argmax(np.abs(self.parts.mean)))
            note = f"{self.parts.names[top]}: most of the right token's logit, {self.parts.logit:.2f}"
            lines.append(("attribution", f"{self.parts.mean[top]:+.3f}", note))
        return lines + [("note", "", note) for note in self.notes]

    @property
    def alphas(self) -> np.ndarray:
        """Strengths of steering: (A,)."""
        return self.layers[0].alphas

    def stacked(self, name: str) -> np.ndarray:
        """A field of the directions of all layers."""
        return np.concatenate([getattr(layer, name) for layer in self.layers])

    def predicted(self, order: int) -> np.ndarray:
        """The predicted change of the loss of all directions: (D, A + 1)."""
        return np.concatenate([layer.predicted(order) for layer in self.layers])

    def opening(self) -> str:
        """What these numbers say."""
        found, names = self.stacked("loss_change"), [n for layer in self.layers for n in layer.names]
        first, second = (agreement(self.predicted(order)[:, :-1], found[:, :-1]) for order in (1, 2))
        most = int(np.argmax(np.abs(found[:, -1])))
        return (
            f"The gradient predicts what steering along {len(names)} directions does to the loss with a "
            f"correlation of {first:.2f}, the Hessian with it of {second:.2f}. Without {names[most]} the "
            f"loss changes most, by {found[most, -1]:+.3f} nats."
        )


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Causal:
    """Test the directions of every chosen layer, and take the logits apart.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
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
    """The correlation coefficient of all entries; nan where one of them does not vary."""
    a, b = a.ravel() - a.mean(), b.ravel() - b.mean()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else float("nan")


def _answer(layer: int, found: Result) -> str:
    assert isinstance(found, Directions)
    r = agreement(found.predicted(2)[:, :-1], found.loss_change[:, :-1])
    return f"L{layer}: {len(found.names)} directions, found and predicted changes correlate by {r:.3f}"

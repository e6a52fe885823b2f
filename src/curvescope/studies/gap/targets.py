"""The same model with other targets: the loss is made small and large while no parameter moves.

H_f = Σ (∂ℓ/∂f) ∂²f is linear in what the outputs miss, while the GGN of cross-entropy and of the squared
error does not see the targets at all. So between targets only the functional Hessian changes. Targets drawn
from the model itself miss nothing on the average: E[∂ℓ/∂f] = 0, hence E[H_f] = 0. That is seen in S draws by

    ‖E H_f‖² ≈ Σ_{s≠t} ⟨H_f^s, H_f^t⟩ / (S (S − 1)),

which has no bias, next to the mean of ‖H_f^s‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import column_dots
from curvescope.algorithms.estimates.jackknife import jackknife
from curvescope.core.progress import track
from curvescope.core.ranks.spread import over
from curvescope.core.result import Result
from curvescope.core.seeds import generator, probes
from curvescope.data.batches import IGNORED, Batch
from curvescope.losses import Loss
from curvescope.operators import FunctionalHessian
from curvescope.problem import Problem

Kind = Literal["predicted", "drawn", "random"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DRAW = 1 << 20  # streams of draws begin here, apart from those of probes


@dataclass(frozen=True)
class Draws(Result):
    """⟨H_f^s v, H_f^t v⟩ for P probes v and S draws of all targets."""

    gram: np.ndarray  # (P, S, S)

    def expectation(self) -> tuple[float, float]:
        """‖E H_f‖² / E‖H_f‖² and its error by leaving out one draw after the other; zero in theory."""
        K = self.gram.mean(axis=0)
        keep = [np.delete(np.arange(len(K)), s) for s in range(len(K))]
        without = np.array([_cross(K[np.ix_(rest, rest)]) for rest in keep])
        return _cross(K), float(jackknife(_cross(K), without)[0])

    def shrinking(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of draws 1, 2, 4, …, and ‖mean of so many H_f‖ / ‖H_f‖ of a single one, (C,) each."""
        K = self.gram.mean(axis=0)
        counts = 2 ** np.arange(int(math.log2(len(K))) + 1)
        single = np.trace(K) / len(K)
        groups = [[slice(i, i + c) for i in range(0, len(K) - c + 1, c)] for c in counts]
        means = [np.mean([K[group, group].mean() for group in some]) for some in groups]
        return counts, np.sqrt(np.array(means) / single)


def _cross(K: np.ndarray) -> float:
    """The mean of K off its diagonal over that on it."""
    S = len(K)
    return float((K.sum() - np.trace(K)) / (S * (S - 1)) / (np.trace(K) / S))


def can_replace(problem: Problem) -> bool:
    """Whether targets are one tensor, of classes or real numbers, that the loss knows how to draw."""
    known = type(problem.loss).sample_targets is not Loss.sample_targets
    return known and all(isinstance(batch.targets, Tensor) for batch in problem.batches)


def with_targets(problem: Problem, kind: Kind, *, seed: int, draw: int = 0) -> Problem:
    """The problem at the same parameters and inputs with other targets; ignored ones stay ignored.

    predicted: the likeliest class, or the output itself: the least loss of these parameters; drawn: from the
    model's own distribution; random: classes with equal probabilities, or normal numbers of the targets' own
    mean and deviation, whatever the input. Of a model that is spread over ranks each passes all sequences.
    """
    found, first = [], 0
    with torch.no_grad():
        for own in track(problem.batches, "targets"):
            batch, source = own.map(problem.placed), generator(seed, DRAW + draw, first)
            targets = _replaced(problem, batch, kind, source).cpu()
            found.append(Batch(own.inputs, targets, own.weights))
            first += own.num_sequences
    return Problem(problem.model, found, problem.loss, params=problem.choice.params).at(problem.point)


def _replaced(problem: Problem, batch: Batch, kind: Kind, source: torch.Generator) -> Tensor:
    outputs, targets = problem.outputs(batch), batch.targets
    if kind == "drawn":
        return problem.loss.sample_targets(outputs, targets, source)
    if targets.is_floating_point():
        noise = torch.randn(targets.shape, generator=source, dtype=torch.float64).to(targets)
        return outputs.detach() if kind == "predicted" else targets.mean() + targets.std() * noise
    drawn = torch.randint(0, outputs.shape[-1], targets.shape, generator=source).to(targets.device)
    new = outputs.argmax(-1) if kind == "predicted" else drawn
    return torch.where(targets == IGNORED, targets.long(), new)


def measure_draws(problem: Problem, *, num_draws: int, num_probes: int, seed: int) -> Draws:
    """Products of H_f with the same probes, for targets drawn from the model again and again."""
    kind = {"dtype": problem.dtype, "device": problem.device}
    model, space = problem.model, problem.space()
    pieces = model.pieces(space)
    V = probes(model.size_of(*space), num_probes, seed=seed, pieces=pieces, **kind)
    products = [
        FunctionalHessian(with_targets(problem, "drawn", seed=seed, draw=draw)) @ V
        for draw in range(num_draws)
    ]
    with over(model.spread):
        gram = [[column_dots(A, B).double().cpu().numpy() for B in products] for A in products]  # (S, S, P)
    return Draws(np.moveaxis(np.array(gram), -1, 0))

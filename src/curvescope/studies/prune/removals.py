"""What is removed of one block, and what that does: single weights, random groups, the least of every method.

Every removal is measured twice where it can be: plain, and with the surgeon's answer of the other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.surgery.removal import diagonal_saliencies
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.studies.prune.surgeons import Surgeon, fisher_diagonal
from curvescope.studies.weight_changes import Effects, Halves, effects, moved_parameters, weights

ONE_SHOT = ("magnitude", "fisher", "obd", "obs", "magnitude + obs")
GREEDY = "obs greedy"
ITERATED = ("fisher iterated", "obs iterated")
Make = Callable[[Halves, Tensor | None], Surgeon]
"""A surgeon for a block of problems at a point; of weights that are left, if there is a mask."""


@dataclass(frozen=True)
class Samples(Result):
    """K removals that no method has chosen: what each says beforehand, and what comes out."""

    size: int  # weights of one removal
    magnitude: np.ndarray  # (K,) Σ w²
    fisher: np.ndarray  # (K,) ½ Σ F_qq w²
    obd: np.ndarray  # (K,) ½ Σ G_qq w²
    obs: np.ndarray  # (K,) ½ w_Qᵀ ([H⁻¹]_QQ)⁻¹ w_Q
    plain: Effects
    compensated: Effects
    residual: np.ndarray  # (K,) of the systems


@dataclass(frozen=True)
class Sets(Result):
    """The weights of least saliency by M methods, at S sparsities."""

    methods: list[str]
    sparsities: np.ndarray  # (S,)
    own: np.ndarray  # (M, S) what the method says: Σ of its saliencies; nan for magnitudes
    effects: Effects  # of the M S changes, method by method
    residual: np.ndarray  # (M, S)

    def at(self, method: str) -> Effects:
        """Those of one method, one for every sparsity."""
        i, S = self.methods.index(method), len(self.sparsities)
        return self.effects.some(slice(i * S, (i + 1) * S))


def single_weights(w: Tensor, count: int) -> list[Tensor]:
    """Weights from the smallest to the largest, in equal steps of their ranks."""
    order = w.abs().argsort(stable=True)
    ranks = np.unique(np.linspace(0, len(w) - 1, count).round().astype(int))
    return [order[rank : rank + 1] for rank in ranks]


def random_groups(w: Tensor, count: int, share: float, seed: int) -> list[Tensor]:
    """Sets of weights that are drawn at random."""
    size = max(round(share * len(w)), 1)
    return [torch.randperm(len(w), generator=generator(seed, i))[:size].to(w.device) for i in range(count)]


def sample(halves: Halves, block: str, surgeon: Surgeon, sets: list[Tensor]) -> Samples:
    """Remove each of the sets, plain and with the surgeon's answer."""
    w, fisher = weights(halves.problem, block), fisher_diagonal(halves.problem, block)
    plain, made, own, residual = [], [], [], []
    for removed in sets:
        plain.append(removal(w, removed))
        found, rest = surgeon.remove(w, removed)
        made.append(found.delta)
        own.append(found.increase)
        residual.append(rest)
    found = effects(halves, block, [*plain, *made], held_out=False)

    def summed(values: Tensor) -> np.ndarray:
        return np.array([float(values[removed].sum()) for removed in sets])

    return Samples(
        size=len(sets[0]),
        magnitude=summed(w.square()),
        fisher=summed(diagonal_saliencies(w, fisher)),
        obd=summed(diagonal_saliencies(w, surgeon.diagonal)),
        obs=np.array(own),
        plain=found.some(slice(0, len(sets))),
        compensated=found.some(slice(len(sets), None)),
        residual=np.array(residual),
    )


def removal(w: Tensor, removed: Tensor) -> Tensor:
    """δ that takes weights to zero and leaves the others: (n,)."""
    delta = torch.zeros_like(w)
    delta[removed] = -w[removed]
    return delta


def one_shot(halves: Halves, block: str, surgeon: Surgeon, sparsities: tuple[float, ...]) -> Sets:
    """Saliencies once, at the model's own weights."""
    w = weights(halves.problem, block)
    scores = {
        "magnitude": w.abs(),
        "fisher": diagonal_saliencies(w, fisher_diagonal(halves.problem, block)),
        "obd": diagonal_saliencies(w, surgeon.diagonal),
        "obs": surgeon.saliencies(w),
    }
    counts = [round(s * len(w)) for s in sparsities]
    order = {name: score.argsort(stable=True) for name, score in scores.items()}
    order["magnitude + obs"] = order["magnitude"]
    greedy = surgeon.order(w, max(counts))
    if greedy is not None:
        order[GREEDY] = greedy.to(w.device)
    changes, own, residual = [], [], []
    for name, ranks in order.items():
        for removed in (ranks[:count] for count in counts):
            if "obs" in name:
                found, rest = surgeon.remove(w, removed)
                delta, cost = found.delta, found.increase
            else:
                delta, rest = removal(w, removed), 0.0
                cost = np.nan if name == "magnitude" else float(scores[name][removed].sum())
            changes.append(delta)
            own.append(cost)
            residual.append(rest)
    shape = (len(order), len(sparsities))
    return Sets(
        list(order),
        np.array(sparsities),
        np.array(own).reshape(shape),
        effects(halves, block, changes),
        np.array(residual).reshape(shape),
    )


def iterated(halves: Halves, block: str, make: Make, sparsities: tuple[float, ...]) -> Sets:
    """Curvature anew at each sparsity, where the weights are by then; what is gone stays gone."""
    w = weights(halves.problem, block)
    counts = [round(s * len(w)) for s in sparsities]
    changes, own, residual = [], [], []
    for name in ITERATED:
        delta, cost, left = torch.zeros_like(w), 0.0, torch.ones_like(w, dtype=torch.bool)
        for count in counts:
            at = [p.at(moved_parameters(p, block, delta)) for p in halves]
            more = count - int((~left).sum())
            found, gone, price, rest = _round(name, Halves(*at), block, make, w + delta, left, more)
            left = left.index_fill(0, gone, False)
            delta, cost = torch.where(left, delta + found, -w), cost + price
            changes.append(delta)
            own.append(cost)
            residual.append(rest)
    shape = (len(ITERATED), len(sparsities))
    return Sets(
        list(ITERATED),
        np.array(sparsities),
        np.array(own).reshape(shape),
        effects(halves, block, changes),
        np.array(residual).reshape(shape),
    )


def _round(
    name: str, here: Halves, block: str, make: Make, w: Tensor, left: Tensor, count: int
) -> tuple[Tensor, Tensor, float, float]:
    """The next removals among the weights w that are left: δ, which are removed, the price and residual."""
    among = left.nonzero()[:, 0]
    if name == "obs iterated":
        surgeon = make(here, None if bool(left.all()) else left)
        chosen = surgeon.saliencies(w[left]).argsort(stable=True)[:count]
        found, rest = surgeon.remove(w[left], chosen)
        delta = torch.zeros_like(w).index_copy(0, among, found.delta)
        return delta, among[chosen], found.increase, rest
    scores = diagonal_saliencies(w, fisher_diagonal(here.problem, block))[left]
    chosen = scores.argsort(stable=True)[:count]
    return removal(w, among[chosen]), among[chosen], float(scores[chosen].sum()), 0.0

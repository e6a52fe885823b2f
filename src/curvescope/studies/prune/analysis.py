"""Pruning of one block or head: removals, their predicted and their measured effects.

A surgeon removes weights of a block with the block's GGN written out, or with matrix products if it is too
large. Both damp by λ = damping · mean diagonal. The GGN is positive semi-definite; for cross-entropy it
equals the Fisher matrix with targets drawn from the model.

Removals are single weights, random groups, and the weights of least saliency by every method. Every removal
is measured plain and, if possible, compensated: the surgeon adjusts the remaining weights.

A removed head has its rows of W_O set to zero; compensated, the other heads of the layer adjust. These rows
are the head's only output, so zero rows remove the head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.estimates.diagonal import diagonal
from curvescope.algorithms.estimates.ranks import Correlation, difference, rank_correlation
from curvescope.algorithms.surgery.removal import (
    Removal,
    damped_inverse,
    diagonal_saliencies,
    eliminate,
    remove,
    remove_by_products,
    saliencies,
)
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.models.model import Model
from curvescope.operators import GGN, KFAC, EmpiricalFisher, exact_diagonal
from curvescope.operators.kronecker.spectral import LayerSpectrum
from curvescope.problem import Problem
from curvescope.runs.resumable_loop import Piece
from curvescope.studies.common.weight_changes import Effects, Halves, effects, moved_parameters, weights

if TYPE_CHECKING:
    from curvescope.studies.prune.study import Config, Pruned

NUM_ROOTS = 32  # random vectors for a diagonal that is estimated
MOST_LEFT = 3000  # most remaining weights for which the inverse is written out
DENSE, PRODUCTS = "dense", "products"


@dataclass(frozen=True)
class DenseBlock(Result):
    """Dense GGN of a block, or of some of its weights."""

    matrix: np.ndarray  # (n, n)


def dense_block(op: GGN, left: Tensor | None = None) -> DenseBlock:
    """Compute the dense GGN; with `left`, a mask (n,), only over the remaining weights."""
    G = (op if left is None else op.submatrix(left)).to_dense().cpu().numpy()
    return DenseBlock((G + G.T) / 2)


class Surgeon(ABC):
    """Interface that removes weights of one block at one point."""

    how: str
    diagonal: Tensor  # (n,) of the GGN
    damping: float  # λ

    @abstractmethod
    def saliencies(self, w: Tensor) -> Tensor:
        """Saliency w_q² / (2 [H⁻¹]_qq) of every weight: (n,)."""

    @abstractmethod
    def remove(self, w: Tensor, removed: Tensor) -> tuple[Removal, float]:
        """Return the change that sets these weights to zero, and the relative residual of its system."""

    def order(self, w: Tensor, count: int) -> Tensor | None:
        """Return the first `count` weights in greedy order of removal; None if that takes too long."""
        return None


@final
class DenseSurgeon(Surgeon):
    """Surgeon that uses the dense inverse of the block."""

    how = DENSE

    def __init__(self, G: Tensor, damping: float):
        self.inverse, self.damping = damped_inverse(G, damping)
        self.diagonal = G.diagonal().clone()

    def saliencies(self, w: Tensor) -> Tensor:
        return saliencies(w, self.inverse.diagonal())

    def remove(self, w: Tensor, removed: Tensor) -> tuple[Removal, float]:
        return remove(w, self.inverse, removed), 0.0

    def order(self, w: Tensor, count: int) -> Tensor | None:
        return eliminate(w, self.inverse, count).order


@final
class ProductSurgeon(Surgeon):
    """Surgeon that uses the K-FAC inverse for saliencies and conjugate gradients with the GGN for removals.

    With K = A ⊗ B = Q diag(Λ) Qᵀ, Q = Qᵣ ⊗ Q_c, the diagonal of (K + λ I)⁻¹ is (Qᵣ∘Qᵣ) (1/(Λ + λ))
    (Q_c∘Q_c)ᵀ. If at most `MOST_LEFT` weights remain after earlier removals, K over these weights is inverted
    exactly. For more of them, the inverse over all weights is an approximation: it lets removed weights
    compensate, so saliencies come out too small.
    """

    how = PRODUCTS

    def __init__(self, op: GGN, damping: float, seed: int, left: Tensor | None = None):
        self.op = op if left is None else op.submatrix(left)
        whole = diagonal(op, num_probes=NUM_ROOTS, method="roots", seed=seed).values
        self.diagonal = whole if left is None else whole[left]
        self.damping = damping * float(self.diagonal.mean())
        self._whole, self._left, self._seed = op, left, seed

    def saliencies(self, w: Tensor) -> Tensor:
        (block,) = self._whole.space
        K = KFAC(self._whole.problem, block.name, bias="separate", seed=self._seed)
        (spectrum,), (layer,) = K.spectra(), K.layers
        # Positions of the layer's entries, inputs × outputs.
        own = K.space.positions(layer.blocks[0]).to(w.device)
        diagonal = w.new_empty(len(own))
        if self._left is not None and len(w) <= MOST_LEFT:
            left = self._left[own]
            diagonal[own[left]] = _inverse_diagonal(_entries(spectrum, left), self.damping)
        else:
            Qr, Qc = spectrum.vectors
            diagonal[own] = (Qr.square() @ (1 / (spectrum.values + self.damping)) @ Qc.square().T).flatten()
        return saliencies(w, diagonal if self._left is None else diagonal[self._left])

    def remove(self, w: Tensor, removed: Tensor) -> tuple[Removal, float]:
        return remove_by_products(w, self.op, removed, damping=self.damping)


def _entries(spectrum: LayerSpectrum, left: Tensor) -> Tensor:
    """Return K over the remaining weights, a mask (m n,): A_ik B_jl for the weights (i, j) and (k, l)."""
    assert spectrum.sides is not None, "expected factors with eigendecompositions of both sides"
    A, B = ((Q * side) @ Q.T for Q, side in zip(spectrum.vectors, spectrum.sides, strict=True))
    i, j = left.view(len(A), len(B)).nonzero(as_tuple=True)
    return A[i][:, i] * B[j][:, j]


def _inverse_diagonal(K: Tensor, shift: float) -> Tensor:
    """Diagonal of (K + λ I)⁻¹."""
    system = K + shift * torch.eye(len(K), dtype=K.dtype, device=K.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(system)).diagonal()


def fisher_diagonal(problem: Problem, block: str) -> Tensor:
    """Compute the exact diagonal of the empirical Fisher: (n,)."""
    return exact_diagonal(EmpiricalFisher(problem, block), method="outputs").values


# ---------------------------------------------------------------------------------------------------- minimum


@dataclass(frozen=True)
class BlockMinimum(Result):
    """Result of a descent over the weights of one block."""

    delta: np.ndarray  # (n,) change from the model's original weights
    loss: np.ndarray  # (2,) before and after the descent
    gradient_norm: np.ndarray  # (2,)
    evaluations: int


def descend(problem: Problem, block: str, evaluations: int) -> BlockMinimum:
    """Minimize the loss over the weights of a block by L-BFGS, with at most `evaluations` gradients."""
    from scipy.optimize import minimize

    start = weights(problem, block)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        delta = torch.as_tensor(x).to(start)
        shifted = problem.at(moved_parameters(problem, block, delta))
        return shifted.loss_value(), shifted.gradient(block).double().cpu().numpy()

    first, slope = loss(np.zeros(len(start)))
    options = {"maxfun": evaluations, "maxiter": evaluations, "ftol": 0.0, "gtol": 1e-8, "maxcor": 30}
    minimum = minimize(loss, np.zeros(len(start)), jac=True, method="L-BFGS-B", options=options)
    norms = np.array([np.linalg.norm(slope), np.linalg.norm(minimum.jac)])
    return BlockMinimum(minimum.x, np.array([first, minimum.fun]), norms, int(minimum.nfev) + 1)


# --------------------------------------------------------------------------------------------------- removals

GREEDY = "obs greedy"
ITERATED = ("fisher iterated", "obs iterated")
Make = Callable[[Halves, Tensor | None], Surgeon]
"""Function that makes a surgeon for a block at a point; with a mask, only for the remaining weights."""


@dataclass(frozen=True)
class RemovalSamples(Result):
    """K removals that are independent of every method: predicted and measured effects."""

    size: int  # weights of one removal
    magnitude: np.ndarray  # (K,) Σ w²
    fisher: np.ndarray  # (K,) ½ Σ F_qq w²
    obd: np.ndarray  # (K,) ½ Σ G_qq w²
    obs: np.ndarray  # (K,) ½ w_Qᵀ ([H⁻¹]_QQ)⁻¹ w_Q
    plain: Effects
    compensated: Effects
    residual: np.ndarray  # (K,) of the systems


@dataclass(frozen=True)
class RemovalSets(Result):
    """Removal of the weights of least saliency by M methods at S sparsities."""

    methods: list[str]
    sparsities: np.ndarray  # (S,)
    own: np.ndarray  # (M, S) increase predicted by the method: Σ of its saliencies; nan for magnitudes
    effects: Effects  # effects of the M S changes, method by method
    residual: np.ndarray  # (M, S)

    def at(self, method: str) -> Effects:
        """Effects of one method, one for every sparsity."""
        i, S = self.methods.index(method), len(self.sparsities)
        return self.effects.some(slice(i * S, (i + 1) * S))


def single_weights(w: Tensor, count: int) -> list[Tensor]:
    """Choose single weights at equal steps of their magnitude rank."""
    order = w.abs().argsort(stable=True)
    ranks = np.unique(np.linspace(0, len(w) - 1, count).round().astype(int))
    return [order[rank : rank + 1] for rank in ranks]


def random_groups(w: Tensor, count: int, share: float, seed: int) -> list[Tensor]:
    """Draw random groups of weights."""
    size = max(round(share * len(w)), 1)
    return [torch.randperm(len(w), generator=generator(seed, i))[:size].to(w.device) for i in range(count)]


def sample(halves: Halves, block: str, surgeon: Surgeon, sets: list[Tensor]) -> RemovalSamples:
    """Remove each group of weights, plain and compensated."""
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

    return RemovalSamples(
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
    """Return the change δ that sets some weights to zero and keeps the others: (n,)."""
    delta = torch.zeros_like(w)
    delta[removed] = -w[removed]
    return delta


def one_shot(halves: Halves, block: str, surgeon: Surgeon, sparsities: tuple[float, ...]) -> RemovalSets:
    """Remove the weights of least saliency, with saliencies computed once at the original weights."""
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
    return _removal_sets(list(order), sparsities, own, effects(halves, block, changes), residual)


def _removal_sets(
    methods: list[str],
    sparsities: tuple[float, ...],
    own: list[float],
    found: Effects,
    residual: list[float],
) -> RemovalSets:
    shape = (len(methods), len(sparsities))
    costs, residuals = np.array(own).reshape(shape), np.array(residual).reshape(shape)
    return RemovalSets(methods, np.array(sparsities), costs, found, residuals)


def iterated(halves: Halves, block: str, make: Make, sparsities: tuple[float, ...]) -> RemovalSets:
    """Remove weights step by step, with curvature measured anew; removed weights stay removed."""
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
    return _removal_sets(list(ITERATED), sparsities, own, effects(halves, block, changes), residual)


def _round(
    name: str, current: Halves, block: str, make: Make, w: Tensor, left: Tensor, count: int
) -> tuple[Tensor, Tensor, float, float]:
    """Choose the next weights to remove among the remaining ones.

    Returns the change, the removed weights, the predicted increase and the relative residual.
    """
    among = left.nonzero()[:, 0]
    if name == "obs iterated":
        surgeon = make(current, None if bool(left.all()) else left)
        chosen = surgeon.saliencies(w[left]).argsort(stable=True)[:count]
        found, rest = surgeon.remove(w[left], chosen)
        delta = torch.zeros_like(w).index_copy(0, among, found.delta)
        return delta, among[chosen], found.increase, rest
    scores = diagonal_saliencies(w, fisher_diagonal(current.problem, block))[left]
    chosen = scores.argsort(stable=True)[:count]
    return removal(w, among[chosen]), among[chosen], float(scores[chosen].sum()), 0.0


# ------------------------------------------------------------------------------------------------------ heads


@dataclass(frozen=True)
class HeadRemovals(Result):
    """Heads of one layer, removed one at a time."""

    layer: int
    magnitude: np.ndarray  # (h,) Σ w² over the head's rows of W_O
    fisher: np.ndarray  # (h,) ½ Σ F_qq w²
    obd: np.ndarray  # (h,) ½ Σ G_qq w², from an estimated diagonal
    obs: np.ndarray  # (h,) ½ δᵀ (G + λ I) δ of the surgeon's change
    plain: Effects
    compensated: Effects
    residual: np.ndarray  # (h,) of the surgeon's systems


def layers_with_heads(model: Model) -> list[int]:
    """Return the layers whose W_O can be split by heads."""
    count = int(model.facts.get("n_layers", 0))
    names = model.blocks
    return [i for i in range(count) if f"L{i}.W_O" in names and num_heads(model) > 1]


def num_heads(model: Model) -> int:
    """Return the number of heads of a layer; 1 if it is not known."""
    return int(model.facts.get("n_heads", 1) or 1)


def measure_heads(halves: Halves, op: GGN, layer: int, *, damping: float, seed: int) -> HeadRemovals:
    """Remove every head of a layer, plain and compensated by the other heads; `op` is the GGN of W_O."""
    problem, block = halves.problem, f"L{layer}.W_O"
    w, surgeon = weights(problem, block), ProductSurgeon(op, damping, seed)
    fisher = diagonal_saliencies(w, fisher_diagonal(problem, block))
    obd = diagonal_saliencies(w, surgeon.diagonal)
    sets = [_rows(problem, block, layer, head) for head in range(num_heads(problem.model))]
    made = [surgeon.remove(w, removed) for removed in sets]
    found = effects(halves, block, [*(removal(w, r) for r in sets), *(one.delta for one, _ in made)])
    return HeadRemovals(
        layer=layer,
        magnitude=np.array([float(w[r].square().sum()) for r in sets]),
        fisher=np.array([float(fisher[r].sum()) for r in sets]),
        obd=np.array([float(obd[r].sum()) for r in sets]),
        obs=np.array([one.increase for one, _ in made]),
        plain=found.some(slice(0, len(sets))),
        compensated=found.some(slice(len(sets), None)),
        residual=np.array([residual for _, residual in made]),
    )


def _rows(problem: Problem, block: str, layer: int, head: int) -> torch.Tensor:
    """Positions of a head's weights within W_O."""
    own = problem.space(f"L{layer}.h{head}.W_O")
    ones = own.scatter(torch.ones(own.size, dtype=problem.dtype, device=problem.device))
    return problem.space(block).gather(ones).nonzero()[:, 0]


# ----------------------------------------------------------------------------------------------------- pieces

AT_MINIMUM = " at its minimum"


@final
class BlockWork:
    """Pieces of work for one block, at its original weights or at its minimum."""

    def __init__(self, cfg: Config, halves: Halves, name: str, size: int, *, at_minimum: bool):
        self.cfg, self.name, self._halves, self._at_minimum = cfg, name, halves, at_minimum
        self.dense = size <= cfg.max_dense
        self.key = name + AT_MINIMUM * at_minimum

    def pieces(self) -> list[Piece]:
        """Return the pieces in order; curvature comes first, because the others use it."""
        first: list[Piece] = []
        if self._at_minimum:
            first.append(Piece(f"minimum.{self.name}", self.minimum, f"a minimum over {self.name}"))
        before = tuple(piece.name for piece in first)
        if self.dense:
            curvature = Piece(f"curvature.{self.key}", self.curvature, f"GGN of {self.key}", needs=before)
            first.append(curvature)
        needs = tuple(piece.name for piece in first)
        works = {"weights": self.singles, "groups": self.groups, "sets": self.sets}
        words = {"weights": "single weights", "groups": "random groups", "sets": "least weights"}
        if self.cfg.iterate and not self._at_minimum:
            works["iterated"], words["iterated"] = self.rounds, "least weights, curvature measured anew"
        return first + [
            Piece(f"{kind}.{self.key}", work, f"{self.key}: {words[kind]}", needs=needs)
            for kind, work in works.items()
        ]

    def minimum(self) -> BlockMinimum:
        """Minimize the loss over the block."""
        return descend(self._halves.problem, self.name, self.cfg.settle)

    def curvature(self, *known: Result) -> DenseBlock:
        """Compute the dense GGN of the block."""
        return dense_block(ggn(self.cfg, self.here(known), self.name))

    def singles(self, *known: Result) -> RemovalSamples:
        """Single weights."""
        halves = self.here(known)
        sets = single_weights(weights(halves.problem, self.name), self.cfg.num_weights)
        return sample(halves, self.name, self.surgeon(known), sets)

    def groups(self, *known: Result) -> RemovalSamples:
        """Random groups."""
        halves, cfg = self.here(known), self.cfg
        w = weights(halves.problem, self.name)
        sets = random_groups(w, cfg.num_groups, cfg.group_share, cfg.seed)
        return sample(halves, self.name, self.surgeon(known), sets)

    def sets(self, *known: Result) -> RemovalSets:
        """Remove the weights of least saliency by every method, with curvature measured once."""
        return one_shot(self.here(known), self.name, self.surgeon(known), self.cfg.sparsities)

    def rounds(self, *known: Result) -> RemovalSets:
        """Remove the weights of least saliency, with curvature measured anew at each sparsity."""

        def make(here: Halves, left: Tensor | None) -> Surgeon:
            if left is None:
                return self.surgeon(known)
            op, cfg = ggn(self.cfg, here, self.name), self.cfg
            if not self.dense:
                return ProductSurgeon(op, cfg.damping, cfg.seed, left)
            return DenseSurgeon(_tensor(here, dense_block(op, left)), cfg.damping)

        return iterated(self.here(known), self.name, make, self.cfg.sparsities)

    def here(self, known: tuple[Result, ...]) -> Halves:
        """Return the problems at the block's point: original weights or minimum."""
        if not self._at_minimum:
            return self._halves
        minimum = next(one for one in known if isinstance(one, BlockMinimum))
        w = weights(self._halves.problem, self.name)
        delta = torch.as_tensor(minimum.delta).to(w)
        return Halves(*(p.at(moved_parameters(p, self.name, delta)) for p in self._halves))

    def surgeon(self, known: tuple[Result, ...]) -> Surgeon:
        """Return a surgeon with the dense GGN if it was computed, else one that uses products."""
        for one in known:
            if isinstance(one, DenseBlock):
                return DenseSurgeon(_tensor(self._halves, one), self.cfg.damping)
        return ProductSurgeon(ggn(self.cfg, self.here(known), self.name), self.cfg.damping, self.cfg.seed)


def heads_piece(cfg: Config, halves: Halves, layer: int) -> Piece:
    """Return the piece that removes the heads of one layer."""

    def work() -> HeadRemovals:
        op = ggn(cfg, halves, f"L{layer}.W_O")
        return measure_heads(halves, op, layer, damping=cfg.damping, seed=cfg.seed)

    return Piece(f"heads.L{layer}", work, f"heads of L{layer}", kind="heads")


def ggn(cfg: Config, halves: Halves, block: str) -> GGN:
    """Return the GGN of a block, with the execution settings of the configuration."""
    how: dict[str, Any] = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    return GGN(halves.problem, block, **how)


def _tensor(halves: Halves, block: DenseBlock) -> Tensor:
    return torch.as_tensor(block.matrix).to(halves.problem.device, halves.problem.dtype)


# ----------------------------------------------------------------------------------------------- correlations

Some = RemovalSamples | HeadRemovals
PREDICTORS = {
    "magnitude": "Σ w²",
    "fisher": "½ Σ F_qq w²",
    "obd": "½ Σ G_qq w²",
    "second order": "½ δᵀHδ",
    "both orders": "gᵀδ + ½ δᵀHδ",
    "obs": "½ w_Qᵀ ([H⁻¹]_QQ)⁻¹ w_Q",
    "obs + first order": "gᵀδ + ½ w_Qᵀ ([H⁻¹]_QQ)⁻¹ w_Q",
}
PLACE = ", at a minimum"
PLAIN = ("magnitude", "fisher", "obd", "second order", "both orders")
COMPENSATED = ("obs", "obs + first order", "second order", "both orders")


class PredictionRank(NamedTuple):
    """One rank correlation between predicted and measured effects."""

    removed: str  # `single weights`, `random groups`, either `at a minimum`, `heads`
    how: str  # `plain` or `compensated`
    predictor: str
    correlation: Correlation


def removed_kinds(result: Pruned) -> dict[str, list[Some]]:
    """Return the removals that are independent of every method, by kind."""
    kinds: dict[str, list[Some]] = {}
    for kind, samples in (("single weights", result.singles), ("random groups", result.groups)):
        for key, some in samples.items():
            kinds.setdefault(kind + PLACE * key.endswith(AT_MINIMUM), []).append(some)
    if result.heads:
        kinds["heads"] = list(result.heads.values())
    return kinds


def of_effects(some: Some, how: str) -> Effects:
    """Return the effects of plain or of compensated removals."""
    return some.plain if how == "plain" else some.compensated


def predicted(some: Some, how: str, predictor: str) -> np.ndarray:
    """Return what a predictor says about each removal: (K,)."""
    effects = of_effects(some, how)
    values: dict[str, Callable[[], np.ndarray]] = {
        "second order": lambda: effects.second.mean(1),
        "both orders": lambda: effects.predicted.mean(1),
        "obs + first order": lambda: some.obs + effects.first.mean(1),
    }
    return values[predictor]() if predictor in values else getattr(some, predictor)


def measured(some: Some, how: str) -> np.ndarray:
    """Measured increase of the loss: (K,)."""
    return of_effects(some, how).measured.mean(1)


def rows(result: Pruned) -> Iterator[PredictionRank]:
    """Yield all rank correlations: kind of removal, plain or compensated, and predictor."""
    for kind, parts in removed_kinds(result).items():
        for how, predictors in (("plain", PLAIN), ("compensated", COMPENSATED)):
            truth = np.concatenate([measured(some, how) for some in parts])
            for predictor in predictors:
                said = np.concatenate([predicted(some, how, predictor) for some in parts])
                found = rank_correlation(said, truth, draws=result.draws, seed=result.seed)
                yield PredictionRank(kind, how, predictor, found)


def better(result: Pruned, kind: str, one: str, other: str) -> Correlation:
    """ρ of one predictor minus ρ of another, for plain removals."""
    parts = removed_kinds(result)[kind]
    a, b = (np.concatenate([predicted(some, "plain", name) for some in parts]) for name in (one, other))
    truth = np.concatenate([measured(some, "plain") for some in parts])
    return difference(a, b, truth, draws=result.draws, seed=result.seed)

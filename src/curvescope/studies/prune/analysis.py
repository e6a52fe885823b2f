"""Who removes weights of a block: with its GGN written out, or, where that is too large, by products.

Both damp by λ = damping · mean diagonal. The GGN is positive semi-definite; for cross-entropy it is the
Fisher with targets drawn from the model.

What is removed of one block, and what that does: single weights, random groups, the least of every method.

Every removal is measured twice where it can be: plain, and with the surgeon's answer of the other weights.

Whole heads: what comes out when a head's rows of W_O are zero, and the layer's other heads answer.

A head writes its values through W_O alone, so that these rows at zero are the head without output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
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
from curvescope.operators.kronecker.spectral import Spectrum
from curvescope.problem import Problem
from curvescope.runs.work import Piece
from curvescope.studies.common.weight_changes import Effects, Halves, effects, moved_parameters, weights

if TYPE_CHECKING:
    from curvescope.studies.prune.study import Config, Pruned

NUM_ROOTS = 32  # random squares, for a diagonal that is not written out
MOST_LEFT = 3000  # weights whose inverse is written out
DENSE, PRODUCTS = "dense", "products"


@dataclass(frozen=True)
class DenseBlock(Result):
    """The GGN of a block, or of some of its weights."""

    matrix: np.ndarray  # (n, n)


def dense_block(op: GGN, left: Tensor | None = None) -> DenseBlock:
    """Written out; with `left`, a mask (n,), over these weights alone."""
    G = (op if left is None else op.submatrix(left)).to_dense().cpu().numpy()
    return DenseBlock((G + G.T) / 2)


class Surgeon(ABC):
    """Removes weights of one block at one point."""

    how: str
    diagonal: Tensor  # (n,) of the GGN
    damping: float  # λ

    @abstractmethod
    def saliencies(self, w: Tensor) -> Tensor:
        """w_q² / (2 [H⁻¹]_qq): (n,)."""

    @abstractmethod
    def remove(self, w: Tensor, removed: Tensor) -> tuple[Removal, float]:
        """The change that takes these weights to zero, and the relative residual of its system."""

    def order(self, w: Tensor, count: int) -> Tensor | None:
        """The first weights to go, one after the other; None where that takes too long."""
        return None


@final
class DenseSurgeon(Surgeon):
    """With the inverse of the block."""

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
    """Saliencies from the inverse of K-FAC, removal by conjugate gradients with the GGN itself.

    With K = A ⊗ B = Q diag(Λ) Qᵀ, Q = Qᵣ ⊗ Q_c, the diagonal of (K + λ I)⁻¹ is
    (Qᵣ∘Qᵣ) (1/(Λ + λ)) (Q_c∘Q_c)ᵀ. Where only some weights are left, at most `MOST_LEFT`, the inverse is that
    of K over these, written out. For more of them it is an approximation, from the inverse over all weights,
    as if those that are gone could still make up for others: saliencies come out too small.
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
        own = K.space.positions(layer.blocks[0]).to(w.device)  # of the layer's entries, inputs × outputs
        found = w.new_empty(len(own))
        if self._left is not None and len(w) <= MOST_LEFT:
            left = self._left[own]
            found[own[left]] = _inverse_diagonal(_entries(spectrum, left), self.damping)
        else:
            Qr, Qc = spectrum.vectors
            found[own] = (Qr.square() @ (1 / (spectrum.values + self.damping)) @ Qc.square().T).flatten()
        return saliencies(w, found if self._left is None else found[self._left])

    def remove(self, w: Tensor, removed: Tensor) -> tuple[Removal, float]:
        return remove_by_products(w, self.op, removed, damping=self.damping)


def _entries(spectrum: Spectrum, left: Tensor) -> Tensor:
    """K over weights that are left, a mask (m n,): A_ik B_jl for the weights (i, j) and (k, l)."""
    assert spectrum.sides is not None, "factors as they are have eigenvalues of their own"
    A, B = ((Q * side) @ Q.T for Q, side in zip(spectrum.vectors, spectrum.sides, strict=True))
    i, j = left.view(len(A), len(B)).nonzero(as_tuple=True)
    return A[i][:, i] * B[j][:, j]


def _inverse_diagonal(K: Tensor, shift: float) -> Tensor:
    """Of (K + λ I)⁻¹."""
    system = K + shift * torch.eye(len(K), dtype=K.dtype, device=K.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(system)).diagonal()


def fisher_diagonal(problem: Problem, block: str) -> Tensor:
    """The diagonal of the empirical Fisher, exactly: (n,)."""
    return exact_diagonal(EmpiricalFisher(problem, block), way="outputs").values


# ---------------------------------------------------------------------------------------------------- minimum


@dataclass(frozen=True)
class Minimum(Result):
    """Where a descent over one block has come to."""

    delta: np.ndarray  # (n,) from the model's own weights
    loss: np.ndarray  # (2,) at the beginning and at the end
    gradient_norm: np.ndarray  # (2,)
    evaluations: int


def descend(problem: Problem, block: str, evaluations: int) -> Minimum:
    """L-BFGS over the weights of a block, on the data of the problem, for at most so many gradients."""
    from scipy.optimize import minimize

    start = weights(problem, block)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        delta = torch.as_tensor(x).to(start)
        here = problem.at(moved_parameters(problem, block, delta))
        return here.loss_value(), here.gradient(block).double().cpu().numpy()

    first, slope = loss(np.zeros(len(start)))
    options = {"maxfun": evaluations, "maxiter": evaluations, "ftol": 0.0, "gtol": 1e-8, "maxcor": 30}
    found = minimize(loss, np.zeros(len(start)), jac=True, method="L-BFGS-B", options=options)
    norms = np.array([np.linalg.norm(slope), np.linalg.norm(found.jac)])
    return Minimum(found.x, np.array([first, found.fun]), norms, int(found.nfev) + 1)


# --------------------------------------------------------------------------------------------------- removals

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


# ------------------------------------------------------------------------------------------------------ heads


@dataclass(frozen=True)
class Heads(Result):
    """The heads of one layer, removed one at a time."""

    layer: int
    magnitude: np.ndarray  # (h,) Σ w² over the head's rows of W_O
    fisher: np.ndarray  # (h,) ½ Σ F_qq w²
    obd: np.ndarray  # (h,) ½ Σ G_qq w², from an estimated diagonal
    obs: np.ndarray  # (h,) ½ δᵀ (G + λ I) δ of the surgeon's change
    plain: Effects
    compensated: Effects
    residual: np.ndarray  # (h,) of the surgeon's systems


def layers_with_heads(model: Model) -> list[int]:
    """Layers whose W_O is cut into heads."""
    count = int(model.facts.get("n_layers", 0))
    names = model.blocks
    return [i for i in range(count) if f"L{i}.W_O" in names and num_heads(model) > 1]


def num_heads(model: Model) -> int:
    """Heads of a layer; 1 where it is not known."""
    return int(model.facts.get("n_heads", 1) or 1)


def measure_heads(halves: Halves, op: GGN, layer: int, *, damping: float, seed: int) -> Heads:
    """Remove every head of a layer, plain and with the other heads' answer in W_O, of which `op` is."""
    problem, block = halves.problem, f"L{layer}.W_O"
    w, surgeon = weights(problem, block), ProductSurgeon(op, damping, seed)
    fisher = diagonal_saliencies(w, fisher_diagonal(problem, block))
    obd = diagonal_saliencies(w, surgeon.diagonal)
    sets = [_rows(problem, block, layer, head) for head in range(num_heads(problem.model))]
    made = [surgeon.remove(w, removed) for removed in sets]
    found = effects(halves, block, [*(removal(w, r) for r in sets), *(one.delta for one, _ in made)])
    return Heads(
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
    """Pieces of work, which are given the minimum and the GGN where there are any."""

    def __init__(self, cfg: Config, halves: Halves, name: str, size: int, *, at_minimum: bool):
        self.cfg, self.name, self._halves, self._at_minimum = cfg, name, halves, at_minimum
        self.dense = size <= cfg.max_dense
        self.key = name + AT_MINIMUM * at_minimum

    def pieces(self) -> list[Piece]:
        """In order; curvature first, for all that follows."""
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
            works["iterated"], words["iterated"] = self.rounds, "least weights, curvature anew"
        return first + [
            Piece(f"{kind}.{self.key}", work, f"{self.key}: {words[kind]}", needs=needs)
            for kind, work in works.items()
        ]

    def minimum(self) -> Minimum:
        """The place."""
        return descend(self._halves.problem, self.name, self.cfg.settle)

    def curvature(self, *known: Result) -> DenseBlock:
        """The GGN, written out."""
        return dense_block(ggn(self.cfg, self.here(known), self.name))

    def singles(self, *known: Result) -> Samples:
        """Single weights."""
        halves = self.here(known)
        sets = single_weights(weights(halves.problem, self.name), self.cfg.num_weights)
        return sample(halves, self.name, self.surgeon(known), sets)

    def groups(self, *known: Result) -> Samples:
        """Random groups."""
        halves, cfg = self.here(known), self.cfg
        w = weights(halves.problem, self.name)
        sets = random_groups(w, cfg.num_groups, cfg.group_share, cfg.seed)
        return sample(halves, self.name, self.surgeon(known), sets)

    def sets(self, *known: Result) -> Sets:
        """The least weights by every method, at once."""
        return one_shot(self.here(known), self.name, self.surgeon(known), self.cfg.sparsities)

    def rounds(self, *known: Result) -> Sets:
        """The least weights, with curvature anew at each sparsity."""

        def make(here: Halves, left: Tensor | None) -> Surgeon:
            if left is None:
                return self.surgeon(known)
            op, cfg = ggn(self.cfg, here, self.name), self.cfg
            if not self.dense:
                return ProductSurgeon(op, cfg.damping, cfg.seed, left)
            return DenseSurgeon(_tensor(here, dense_block(op, left)), cfg.damping)

        return iterated(self.here(known), self.name, make, self.cfg.sparsities)

    def here(self, known: tuple[Result, ...]) -> Halves:
        """The problems at this place."""
        if not self._at_minimum:
            return self._halves
        minimum = next(one for one in known if isinstance(one, Minimum))
        w = weights(self._halves.problem, self.name)
        delta = torch.as_tensor(minimum.delta).to(w)
        return Halves(*(p.at(moved_parameters(p, self.name, delta)) for p in self._halves))

    def surgeon(self, known: tuple[Result, ...]) -> Surgeon:
        """With the GGN that is known, or by products."""
        for one in known:
            if isinstance(one, DenseBlock):
                return DenseSurgeon(_tensor(self._halves, one), self.cfg.damping)
        return ProductSurgeon(ggn(self.cfg, self.here(known), self.name), self.cfg.damping, self.cfg.seed)


def heads_piece(cfg: Config, halves: Halves, layer: int) -> Piece:
    """The heads of one layer."""

    def work() -> Heads:
        op = ggn(cfg, halves, f"L{layer}.W_O")
        return measure_heads(halves, op, layer, damping=cfg.damping, seed=cfg.seed)

    return Piece(f"heads.L{layer}", work, f"heads of L{layer}", kind="heads")


def ggn(cfg: Config, halves: Halves, block: str) -> GGN:
    """Of a block, executed as the settings say."""
    how: dict[str, Any] = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    return GGN(halves.problem, block, **how)


def _tensor(halves: Halves, block: DenseBlock) -> Tensor:
    return torch.as_tensor(block.matrix).to(halves.problem.device, halves.problem.dtype)


# ----------------------------------------------------------------------------------------------- correlations

Some = Samples | Heads
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


class Row(NamedTuple):
    """One rank correlation."""

    removed: str  # `single weights`, `random groups`, either `at a minimum`, `heads`
    how: str  # `plain` or `compensated`
    predictor: str
    correlation: Correlation


def removed_kinds(result: Pruned) -> dict[str, list[Some]]:
    """What was removed without a method's choice, by its name."""
    found: dict[str, list[Some]] = {}
    for kind, samples in (("single weights", result.singles), ("random groups", result.groups)):
        for key, some in samples.items():
            found.setdefault(kind + PLACE * key.endswith(AT_MINIMUM), []).append(some)
    if result.heads:
        found["heads"] = list(result.heads.values())
    return found


def of_effects(some: Some, how: str) -> Effects:
    """What came out of plain removals, or of compensated ones."""
    return some.plain if how == "plain" else some.compensated


def predicted(some: Some, how: str, predictor: str) -> np.ndarray:
    """What a predictor says of each removal: (K,)."""
    found = of_effects(some, how)
    values: dict[str, Callable[[], np.ndarray]] = {
        "second order": lambda: found.second.mean(1),
        "both orders": lambda: found.predicted.mean(1),
        "obs + first order": lambda: some.obs + found.first.mean(1),
    }
    return values[predictor]() if predictor in values else getattr(some, predictor)


def measured(some: Some, how: str) -> np.ndarray:
    """The increase of the loss: (K,)."""
    return of_effects(some, how).measured.mean(1)


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Removals of all blocks in one row."""
    return np.concatenate(list(parts))


def rows(result: Pruned) -> Iterator[Row]:
    """All of them: what is removed, how, and by which predictor."""
    for kind, parts in removed_kinds(result).items():
        for how, predictors in (("plain", PLAIN), ("compensated", COMPENSATED)):
            truth = joined(measured(some, how) for some in parts)
            for predictor in predictors:
                said = joined(predicted(some, how, predictor) for some in parts)
                found = rank_correlation(said, truth, draws=result.draws, seed=result.seed)
                yield Row(kind, how, predictor, found)


def better(result: Pruned, kind: str, one: str, other: str) -> Correlation:
    """ρ of one predictor less that of another, of plain removals."""
    parts = removed_kinds(result)[kind]
    a, b = (joined(predicted(some, "plain", name) for some in parts) for name in (one, other))
    truth = joined(measured(some, "plain") for some in parts)
    return difference(a, b, truth, draws=result.draws, seed=result.seed)

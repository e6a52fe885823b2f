"""Exact curvature matrices of a small network, and their block-diagonal approximations.

Let r be the rows of all terms (one per class), scaled so that the GGN is G = Σ r rᵀ, and X the part of r in
a block, as a matrix of inputs × outputs:

    identity         (tr G / n) I
    diagonal         diag(G)
    block-diagonal   G_bb, block by block
    kfac, ekfac      cs.KFAC, cs.EKFAC of the GGN, sharing "expand"
    shampoo          (L ⊗ R)^½, L = Σ X Xᵀ, R = Σ Xᵀ X; shampoo-squared is L ⊗ R / tr L
    ggn              G itself

Nothing is sampled: every distance comes from the form of the approximation.

Distances of an approximation A from a matrix B, as a matrix and as a preconditioner:

    frobenius    ‖A − B‖ / ‖B‖
    angle        arccos of ⟨A, B⟩ / (‖A‖ ‖B‖), in degrees; up to 90° its sine is min over s of ‖s A − B‖ / ‖B‖
    divergence   log(tr M / n) − log det(M) / n for M = (A + α I)⁻¹ (B + β I): how unequal the eigenvalues of
                 the preconditioned matrix are, 0 where they are all alike
    lost         1 − (gᵀd)² / (dᵀ C d · gᵀ C⁻¹ g), d = (A + α I)⁻¹ g, C = B + β I: the part of the decrease
                 of the quadratic model that the best step along d does not reach

Here α and β are the same multiple of each matrix's mean diagonal. All but the first are independent of the
scale of A. The last two need a positive B, so the Hessian has only the first two.

Descent with a preconditioner, θ ← θ − η (A + δ I)⁻¹ g: single steps, whole runs, and their tuning.

A is recomputed every few steps, δ is a multiple of its mean diagonal, and g is the gradient over all data.
There is no momentum and no schedule, so optimizers differ only in A. For the identity A + δ I is I.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from curvescope.algorithms.estimates.ranks import Correlation

import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from curvescope.core.result import Result
from curvescope.operators import EKFAC, KFAC, Shampoo
from curvescope.operators.kronecker.base import KroneckerOperator
from curvescope.operators.kronecker.moments import sequence_gradients
from curvescope.operators.kronecker.stream import sequence_groups
from curvescope.problem import Problem
from curvescope.studies.common.statistics import correlation_gain, mean_correlation
from curvescope.train import TrainConfig, train

if TYPE_CHECKING:
    from curvescope.studies.factors.study import Config

CHUNK = 128  # columns of the Hessian at once
IDENTITY, DIAGONAL, BLOCKS, GGN = "identity", "diagonal", "block-diagonal", "ggn"
KFAC_NAME, EKFAC_NAME = "kfac", "ekfac"


class Blocked(NamedTuple):
    """Symmetric block-diagonal matrix: slices and values of its blocks."""

    slices: list[slice]
    parts: list[Tensor]

    @property
    def mean_diagonal(self) -> float:
        """Mean diagonal entry tr A / n."""
        return sum(float(part.trace()) for part in self.parts) / sum(map(len, self.parts))

    def block(self, place: slice) -> Blocked:
        """Return the matrix of one block."""
        if place in self.slices:
            return whole(self.parts[self.slices.index(place)])
        return whole(self.parts[0][place, place])


def whole(A: Tensor) -> Blocked:
    """Wrap any matrix as a single block."""
    return Blocked([slice(0, len(A))], [A])


class VectorLoss:
    """Loss L(θ) of a problem with one batch as a function of a vector, with its derivatives.

    Vectors of this study concatenate the blocks.
    """

    def __init__(self, problem: Problem):
        (self._batch,) = problem.placed_batches("loss")
        self._problem, self._space, self._total = problem, problem.space().in_blocks(), problem.num_terms

    def __call__(self, theta: Tensor) -> Tensor:
        """Return L(θ), differentiable any number of times."""
        problem, batch = self._problem, self._batch
        outputs = functional_call(problem.model.module, self._space.scatter(theta), (batch.inputs,))
        return problem.loss.sum(outputs, batch.targets, batch.weights) / self._total

    def value(self, theta: Tensor) -> float:
        """Return L(θ) as a number."""
        with torch.no_grad():
            return float(self(theta))

    def gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        """Return L(θ) and ∇L(θ)."""
        leaf = theta.detach().requires_grad_()
        value = self(leaf)
        return float(value.detach()), torch.autograd.grad(value, leaf)[0]

    def hessian(self, theta: Tensor) -> Tensor:
        """Hessian ∇²L(θ): (n, n), forward over reverse, CHUNK columns at a time."""
        eye = torch.eye(len(theta), dtype=theta.dtype, device=theta.device)
        slope = grad(self)
        columns = vmap(lambda v: jvp(slope, (theta,), (v,))[1])
        H = torch.cat([columns(some) for some in eye.split(CHUNK)])
        return (H + H.T) / 2


def ggn_rows(problem: Problem) -> Tensor:
    """Rows r with G = Σ r rᵀ: (terms × classes, n)."""
    K = KFAC(problem, kind="ggn")
    found: list[list[Tensor]] = [[] for _ in K.layers]
    for piece in sequence_groups(problem, K.layers, "rows", joint=True):
        inputs = [piece.inputs(layer) for layer in K.layers]
        for outputs in piece.gradients(K.curvature):
            for rows, a, g in zip(found, inputs, outputs, strict=True):
                rows += [X.flatten(0, 1).flatten(1) for X in sequence_gradients(a, g)]
    return torch.cat([torch.cat(rows) for rows in found], dim=1) / problem.num_terms**0.5


def places(problem: Problem) -> dict[str, slice]:
    """Slices of the blocks in a vector, by name."""
    return problem.space().in_blocks().slices


def approximation(name: str, problem: Problem, rows: Tensor | None = None) -> Blocked:
    """Compute one of APPROXIMATIONS at a problem's parameters; `rows` are `ggn_rows`, if already known."""
    return APPROXIMATIONS[name](problem, rows)


def _identity(problem: Problem, rows: Tensor | None) -> Blocked:
    R = ggn_rows(problem) if rows is None else rows
    mean, sizes = float(R.square().sum()) / R.shape[1], [s.stop - s.start for s in _slices(problem)]
    return Blocked(_slices(problem), [mean * torch.eye(size).to(R) for size in sizes])


def _diagonal(problem: Problem, rows: Tensor | None) -> Blocked:
    R = ggn_rows(problem) if rows is None else rows
    diagonal = R.square().sum(0)
    return Blocked(_slices(problem), [diagonal[s].diag() for s in _slices(problem)])


def _blocks(problem: Problem, rows: Tensor | None) -> Blocked:
    R = ggn_rows(problem) if rows is None else rows
    return Blocked(_slices(problem), [R[:, s].T @ R[:, s] for s in _slices(problem)])


def _ggn(problem: Problem, rows: Tensor | None) -> Blocked:
    R = ggn_rows(problem) if rows is None else rows
    return whole(R.T @ R)


def _slices(problem: Problem) -> list[slice]:
    return list(places(problem).values())


def _written_out(K: KroneckerOperator) -> Blocked:
    """Convert a Kronecker-factored operator to a block-diagonal matrix."""
    at = K.space.in_blocks().slices
    parts = []
    for layer, spectrum in zip(K.layers, K.spectra(), strict=True):
        m, n = layer.shape
        eye = torch.eye(m * n, dtype=K.dtype, device=K.device).reshape(m, n, m * n)
        parts.append(spectrum.times(eye).reshape(m * n, m * n))
    return Blocked([at[layer.name] for layer in K.layers], parts)


def _factored(make: Callable[[Problem], KroneckerOperator]) -> Callable[[Problem, Tensor | None], Blocked]:
    return lambda problem, rows: _written_out(make(problem))


APPROXIMATIONS: dict[str, Callable[[Problem, Tensor | None], Blocked]] = {
    IDENTITY: _identity,
    DIAGONAL: _diagonal,
    KFAC_NAME: _factored(lambda problem: KFAC(problem, kind="ggn")),
    EKFAC_NAME: _factored(lambda problem: EKFAC(problem, kind="ggn")),
    "shampoo": _factored(lambda problem: Shampoo(problem, kind="ggn")),
    "shampoo-squared": _factored(lambda problem: Shampoo(problem, kind="ggn", exponent=1.0)),
    BLOCKS: _blocks,
    GGN: _ggn,
}
"""Functions of a problem and of `ggn_rows`, if known, by name."""


# -------------------------------------------------------------------------------------------------- distances

MEASURES = ("frobenius", "angle", "divergence", "lost", "frobenius_hessian", "angle_hessian")
"""The first four measure distance from the GGN, the last two from the Hessian."""


class Target(NamedTuple):
    """Positive matrix B, B + β I, and its Cholesky factor."""

    matrix: Tensor
    damped: Tensor
    root: Tensor


def target(B: Tensor, damping: float) -> Target:
    """Return B with β = damping · tr B / n."""
    C = B + damping * B.diagonal().mean() * torch.eye(len(B), dtype=B.dtype, device=B.device)
    return Target(B, C, torch.linalg.cholesky(C))


def distances(A: Blocked, G: Target, H: Tensor, g: Tensor, damping: float) -> np.ndarray:
    """Compute all MEASURES of A against the GGN and the Hessian, at the gradient g: (6,)."""
    factors = roots(A, damping)
    found = [frobenius(A, G.matrix), angle(A, G.matrix)]
    found += [divergence(A.slices, factors, G), lost(A.slices, factors, G, g)]
    return np.array([*found, frobenius(A, H), angle(A, H)])


def frobenius(A: Blocked, B: Tensor) -> float:
    """Relative error ‖A − B‖ / ‖B‖."""
    rest = B.clone()
    for place, part in zip(*A, strict=True):
        rest[place, place] -= part
    return float(rest.norm() / B.norm())


def angle(A: Blocked, B: Tensor) -> float:
    """Angle arccos ⟨A, B⟩ / (‖A‖ ‖B‖), in degrees."""
    size = math.sqrt(sum(float(part.square().sum()) for part in A.parts)) * float(B.norm())
    cosine = sum(float((B[s, s] * part).sum()) for s, part in zip(*A, strict=True)) / size
    return math.degrees(math.acos(min(1.0, max(-1.0, cosine))))


def divergence(slices: list[slice], factors: list[Tensor], B: Target) -> float:
    """Logarithm of the arithmetic over the geometric mean of the eigenvalues of (A + α)⁻¹ (B + β)."""
    trace, n = 0.0, len(B.matrix)
    for place, root in zip(slices, factors, strict=True):
        trace += float(torch.cholesky_solve(B.damped[place, place], root).trace())
    own, theirs = (sum(_logdet(root) for root in some) for some in ([B.root], factors))
    return max(0.0, math.log(trace / n) - (own - theirs) / n)


def _logdet(root: Tensor) -> float:
    """Logarithm of the determinant of L Lᵀ."""
    return 2 * float(root.diagonal().log().sum())


def lost(slices: list[slice], factors: list[Tensor], B: Target, g: Tensor) -> float:
    """Share of the optimal decrease of gᵀx + xᵀ C x / 2 that no step along (A + α)⁻¹ g reaches."""
    d = direction(slices, factors, g)
    best = g @ torch.cholesky_solve(g[:, None], B.root)[:, 0]
    return max(0.0, 1 - float((g @ d) ** 2 / ((d @ B.damped @ d) * best)))


def between(B: Tensor, slices: list[slice]) -> float:
    """Share of ‖B‖² outside the diagonal blocks."""
    return 1 - sum(float(B[s, s].square().sum()) for s in slices) / float(B.square().sum())


def roots(A: Blocked, damping: float) -> list[Tensor]:
    """Cholesky factors of every block of A + α I, α = damping · tr A / n over all blocks."""
    alpha = damping * A.mean_diagonal
    return [
        torch.linalg.cholesky(part + alpha * torch.eye(len(part), dtype=part.dtype, device=part.device))
        for part in A.parts
    ]


def direction(slices: list[slice], factors: list[Tensor], g: Tensor) -> Tensor:
    """Return (A + α I)⁻¹ g from the Cholesky factors of the blocks."""
    d = torch.empty_like(g)
    for place, root in zip(slices, factors, strict=True):
        d[place] = torch.cholesky_solve(g[place, None], root)[:, 0]
    return d


# ------------------------------------------------------------------------------------------------------ ahead

T = TypeVar("T")


class Workers:
    """Pool of single-threaded processes, started on first use and ended on exit from `with`."""

    def __init__(self, count: int):
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, work: Callable[..., Result], *given: object) -> Future[Result]:
        """Submit a call to the pool, with copies of the arguments."""
        if self._pool is None:
            method = multiprocessing.get_context("spawn")
            one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
            self._pool = ProcessPoolExecutor(self.count, method, **one_thread)
        return self._pool.submit(work, *given)


class Ahead(Generic[T]):
    """Prefetch `work(item, *needed)` for items taken in order, with the same `needed` for all."""

    def __init__(self, work: Callable[..., Result], items: Sequence[T], workers: Workers):
        self._work, self._items, self._workers = work, list(items), workers
        self._begun: dict[T, Future[Result]] = {}

    def take(self, item: T, *needed: Result) -> Result:
        """Return the result for an item; one worker is this process itself."""
        if self._workers.count == 1:
            return self._work(item, *needed)
        if item not in self._begun:
            rest = self._items[self._items.index(item) :]
            self._begun = {one: self._workers.begin(self._work, one, *needed) for one in rest}
        return self._begun.pop(item).result()


# ----------------------------------------------------------------------------------------------- correlations


def over_methods(x: np.ndarray, y: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """Mean over S seeds and C checkpoints of Spearman's ρ over M approximations; x and y are (S, C, M).

    The bootstrap resamples seeds and approximations; the checkpoints of a seed stay together.
    """
    return mean_correlation(x, y, axes=(0, 2), draws=draws, seed=seed, groups=len(y))


def gain(x: np.ndarray, other: np.ndarray, y: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """Difference of this mean between two distances, on the same resamples."""
    return correlation_gain(x, other, y, axes=(0, 2), draws=draws, seed=seed, groups=len(y))


# ---------------------------------------------------------------------------------------------------- descent

LENGTHS = 2.0 ** np.arange(-6, 7)  # lengths of a single step, relative to the minimum of the quadratic model
START = 0.3, 1.0  # initial rate and damping of the tuning
RATE, DAMPING = 10**0.5, 10.0  # factors between neighbors of the grid
FARTHEST = 8, 4  # maximum number of factors to either side
LOST = 1e3  # a larger loss counts as divergence

Cell = tuple[int, int]
"""Grid cell (i, j) of the tuning: START times RATE^i and DAMPING^j."""


@dataclass(frozen=True)
class Descent(Result):
    """Loss of one run before every step and after the last."""

    method: str
    rate: float
    damping: float
    loss: np.ndarray  # (steps + 1,) infinite after divergence

    @property
    def final(self) -> float:
        """Final loss."""
        return float(self.loss[-1])


@dataclass(frozen=True)
class Tuned(Result):
    """Result of the tuning: every trial, and the best one."""

    method: str
    rates: np.ndarray  # (trials,)
    dampings: np.ndarray  # (trials,)
    loss: np.ndarray  # (trials,) final loss of each
    rate: float
    damping: float
    settled: bool  # no neighbor is better


def best_step(
    loss: VectorLoss, theta: Tensor, A: Blocked, G: Tensor, g: Tensor, dampings: tuple[float, ...]
) -> float:
    """Largest decrease of the loss by one step along (A + δ I)⁻¹ g, over dampings and LENGTHS.

    Lengths are multiples of gᵀd / dᵀGd, the minimum of the GGN's quadratic model along d.
    """
    start, least = loss.value(theta), math.inf
    for damping in dampings:
        d = direction(A.slices, roots(A, damping), g)
        unit = float((g @ d) / (d @ G @ d))
        ends = [loss.value(theta - unit * float(length) * d) for length in LENGTHS]
        least = min([least, *filter(math.isfinite, ends)])
    return start - least


def descend(problem: Problem, method: str, *, rate: float, damping: float, steps: int, every: int) -> Descent:
    """Run an optimizer from the model's parameters; recompute the approximation every few steps."""
    loss, space = VectorLoss(problem), problem.space().in_blocks()
    theta = space.gather({name: p.detach() for name, p in problem.named_parameters()})
    found = np.full(steps + 1, math.inf)
    slices: list[slice] = []
    factors: list[Tensor] = []
    for step in range(steps):
        value, g = loss.gradient(theta)
        if not value < LOST:
            break
        found[step] = value
        if method != IDENTITY and step % every == 0:
            A = approximation(method, problem.at(space.scatter(theta)))
            slices, factors = A.slices, roots(A, damping)
        theta = theta - rate * (g if method == IDENTITY else direction(slices, factors, g))
    else:
        end = loss.value(theta)
        found[steps] = end if end < LOST else math.inf
    return Descent(method, rate, damping, found)


def tune(problem: Problem, method: str, *, steps: int, every: int, trials: int) -> Tuned:
    """Find the rate and damping with the lowest final loss by `search`; the identity has no damping."""

    def final(cell: Cell) -> float:
        rate, damping = settings_of(cell)
        return descend(problem, method, rate=rate, damping=damping, steps=steps, every=every).final

    tried, settled = search(final, trials, both=method != IDENTITY)
    pairs = np.array([settings_of(cell) for cell in tried])
    best = settings_of(lowest(tried))
    return Tuned(method, pairs[:, 0], pairs[:, 1], np.array(list(tried.values())), *best, settled)


def settings_of(cell: Cell) -> tuple[float, float]:
    """Rate and damping of a grid cell."""
    return START[0] * RATE ** cell[0], START[1] * DAMPING ** cell[1]


def lowest(tried: dict[Cell, float]) -> Cell:
    """Cell with the lowest value; ties, and all-infinite values, go to the smallest rate."""
    return min(tried, key=lambda cell: (tried[cell], cell[0]))


def search(value: Callable[[Cell], float], most: int, *, both: bool) -> tuple[dict[Cell, float], bool]:
    """Move from (0, 0) to the best neighbor until none is better, or until `most` cells were tried.

    Returns:
        The cells with their values, and True if no neighbor of the best is better.
    """
    tried = {(0, 0): value((0, 0))}
    while True:
        i, j = lowest(tried)
        near = [(i - 1, j), (i + 1, j)] + ([(i, j - 1), (i, j + 1)] if both else [])
        near = [cell for cell in near if abs(cell[0]) <= FARTHEST[0] and abs(cell[1]) <= FARTHEST[1]]
        for cell in near:
            if cell not in tried:
                if len(tried) == most:
                    return tried, False
                tried[cell] = value(cell)
        if lowest(tried) == (i, j):
            return tried, len(near) == (4 if both else 2) and math.isfinite(tried[i, j])


# ------------------------------------------------------------------------------------------------- checkpoint


@dataclass(frozen=True)
class Course(Result):
    """Parameters at C checkpoints of a training run with Adam."""

    theta: np.ndarray  # (C, n)


@dataclass(frozen=True)
class Measured(Result):
    """Distances of M approximations at one checkpoint, for the whole matrix and for each of S blocks."""

    loss: float
    whole: np.ndarray  # (6, M) by MEASURES
    blocks: np.ndarray  # (6, M, S)
    decrease: np.ndarray  # (M,) decrease of the loss by the best single step
    between: np.ndarray  # (2,) share of ‖·‖² between blocks, for the GGN and the Hessian


def train_one(cfg: Config, problem: Problem) -> Course:
    """Train with full-batch Adam, with warm-up and decay of the rate, without weight decay."""
    steps = cfg.checkpoints[-1]
    how = TrainConfig(
        steps=steps, lr=cfg.lr, warmup=min(10, steps), weight_decay=0.0, snapshots=cfg.checkpoints
    )
    _, _, kept = train(problem.model, problem.batches, how)
    space = problem.space().in_blocks()
    return Course(np.stack([space.gather(kept[step]).numpy() for step in cfg.checkpoints]))


def measure(cfg: Config, problem: Problem, theta: np.ndarray) -> Measured:
    """Compare every approximation with the exact matrices at θ."""
    point = torch.as_tensor(theta)
    space = problem.space().in_blocks()
    here, loss, slices = problem.at(space.scatter(point)), VectorLoss(problem), list(space.slices.values())
    value, g = loss.gradient(point)
    rows = ggn_rows(here)
    G, H = rows.T @ rows, loss.hessian(point)
    exact, own = target(G, cfg.damping), [target(G[s, s], cfg.damping) for s in slices]
    whole, blocks, decrease = [], [], []
    for name in cfg.approximations:
        A = approximation(name, here, rows)
        whole.append(distances(A, exact, H, g, cfg.damping))
        each = zip(slices, own, strict=True)
        found = [distances(A.block(s), one, H[s, s], g[s], cfg.damping) for s, one in each]
        blocks.append(np.stack(found, axis=-1))
        decrease.append(best_step(loss, point, A, G, g, cfg.dampings))
    return Measured(
        loss=value,
        whole=np.stack(whole, axis=-1),
        blocks=np.stack(blocks, axis=1),
        decrease=np.array(decrease),
        between=np.array([between(G, slices), between(H, slices)]),
    )

"""The Hessian of a problem, its two parts, and Fisher matrices.

With outputs z(θ), loss L = (1/N) Σ_t w_t ℓ_t(z) and J = ∂z/∂θ:

    Hessian            H   = ∇²L = H_o + H_f
    GGN                H_o = (1/N) Jᵀ (∂²ℓ/∂z²) J
    FunctionalHessian  H_f = (1/N) Σ_i (∂ℓ/∂z_i) ∇²z_i
    Fishers            (1/N) Σ_t w_t g_t g_tᵀ, g_t = ∇ℓ_t at the data's targets or at drawn ones

The diagonal of the GGN as a mean of squares, from a random root of the loss in the outputs.

Let M_x be the second derivative of a sequence's loss in its outputs and ε independent signs, or Gaussian.
With M_x = R Rᵀ (`Loss.root`), g_x = R ε has the covariance M_x, so

    diag(GGN) = E (1/N) Σ_x (J_xᵀ g_x)²:

with one reverse pass for each sequence and draw, and no product. The square of aᵀε has a relative variance of
at most 2 for every a, and so does every entry of the diagonal; with K equally important sequences it is 2/K.
(Classes drawn from the model, as in a Monte-Carlo Fisher, have the same expectation, but a relative variance
of 1/p for an entry that depends on a class of small probability p.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError
from curvescope.core.hessian_terms import MATRIX_SYMBOLS
from curvescope.core.seeds import Probe, generator, probes
from curvescope.data.batches import Batch
from curvescope.engines import EngineName, GaussNewton, Sandwich, SecondDerivative
from curvescope.losses import Loss
from curvescope.models.parameter_selection import Params
from curvescope.operators.base import CurvatureOperator, WeightDecay
from curvescope.operators.samples.per_sample import PerSample
from curvescope.operators.samples.stacked import Graph
from curvescope.problem import Problem


class Hessian(CurvatureOperator):
    """∇²L, by differentiating the gradient."""

    needs_outputs = False

    @property
    def form(self) -> SecondDerivative:
        """Second derivative of the loss."""
        return SecondDerivative("hessian")


class FunctionalHessian(CurvatureOperator):
    """The functional Hessian, computed directly: the Hessian of ⟨G, z(θ)⟩ with G = ∂ℓ/∂z held fixed."""

    @property
    def form(self) -> SecondDerivative:
        """Second derivative of ⟨G, z⟩."""
        return SecondDerivative("functional")


class GGN(CurvatureOperator):
    """The generalized Gauss-Newton matrix H_o = Jᵀ (∂²ℓ/∂z²) J.

    It is positive semi-definite if the loss is convex in the outputs.
    """

    @property
    def form(self) -> GaussNewton:
        """Jᵀ (∂²ℓ/∂z²) J."""
        return GaussNewton()

    @property
    def always_psd(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return True if the loss is convex."""
        return self.problem.loss.convex

    def random_squares(self, count: int, *, probe: Probe, seed: int, at_once: int) -> Iterator[Tensor]:
        """Yield columns (n, k) whose mean is the diagonal, without products; see the module's docstring."""
        options = {"probe": probe, "seed": seed, "at_once": at_once}
        added = 0 if self.shift is None else self.shift.diagonal(self.space)[:, None]
        for columns in random_squares(self.problem, self.space, count, **options):
            yield columns + added


class EmpiricalFisher(CurvatureOperator):
    """(1/N) Σ_t w_t g_t g_tᵀ over terms t, g_t the gradient of term t at the data's own target."""

    always_psd = True

    @property
    def form(self) -> Sandwich:
        """Jᵀ M J with M = Σ_t w_t (∂ℓ_t/∂z) (∂ℓ_t/∂z)ᵀ."""
        return Sandwich(self._middle)

    def _middle(self, index: int, batch: Batch, z: Tensor, u: Tensor) -> Tensor:
        return self.problem.loss.term_outer_product(z, batch.targets, batch.weights, u)


class MonteCarloFisher(CurvatureOperator):
    """The Fisher with targets drawn from the model: the mean of `num_samples` draws per term.

    Its expectation is the GGN for cross-entropy and squared error. The targets are drawn once, sequence by
    sequence from (seed, sequence, sample), so it is one fixed matrix for any batching of the data.
    """

    always_psd = True

    def __init__(
        self,
        problem: Problem,
        *blocks: Params,
        num_samples: int = 1,
        seed: int = 0,
        engine: EngineName = "auto",
        chunk: int | None = None,
        checkpoint: bool = False,
        damping: float = 0.0,
        weight_decay: WeightDecay = 0.0,
    ):
        if num_samples < 1:
            raise UsageError(f"expected num_samples of at least 1, got {num_samples}")
        super().__init__(
            problem,
            *blocks,
            engine=engine,
            chunk=chunk,
            checkpoint=checkpoint,
            damping=damping,
            weight_decay=weight_decay,
        )
        self.seed = seed
        self.drawn = _draw_targets(problem, num_samples, seed)  # shared by this operator's blocks

    @property
    def form(self) -> Sandwich:
        """Jᵀ M J with the mean of M = Σ_t w_t (∂ℓ_t/∂z) (∂ℓ_t/∂z)ᵀ over the draws."""
        return Sandwich(self._middle)

    def _middle(self, index: int, batch: Batch, z: Tensor, u: Tensor) -> Tensor:
        loss, samples = self.problem.loss, self.drawn[index].to(z.device)
        products = [loss.term_outer_product(z, targets, batch.weights, u) for targets in samples]
        return torch.stack(products).mean(0)


def _draw_targets(problem: Problem, num_samples: int, seed: int) -> list[Tensor]:
    """Draw the targets of every batch, (num_samples, *targets.shape)."""
    targets, first_sequence = [], problem.batches.first_sequence
    with torch.no_grad():
        for batch in problem.placed_batches("draw targets"):
            z = problem.outputs(batch)
            samples = [
                sampled_targets(problem.loss, z, batch, first_sequence, s, seed) for s in range(num_samples)
            ]
            targets.append(torch.stack(samples).cpu())
            first_sequence += batch.num_sequences
    return targets


def sampled_targets(loss: Loss, z: Tensor, batch: Batch, first: int, sample: int, seed: int) -> Tensor:
    """Draw a batch's targets at outputs z, sequence by sequence from (seed, sequence, sample).

    Args:
        loss: A log-likelihood.
        z: Outputs on the batch.
        batch: A batch on the model's device.
        first: Number of its first sequence in the data.
        sample: Number of the draw.
        seed: Seed of all draws.
    """
    return torch.cat(
        [
            loss.sample_targets(z[i : i + 1], batch.targets[i : i + 1], generator(seed, first + i, sample))
            for i in range(batch.num_sequences)
        ]
    )


OPERATORS: Mapping[str, type[CurvatureOperator]] = MappingProxyType(
    {"hessian": Hessian, "ggn": GGN, "functional": FunctionalHessian}
)
"""Operator of the Hessian and its parts, by name in `core/hessian_terms.py`."""
BY_SYMBOL: Mapping[str, type[CurvatureOperator]] = MappingProxyType(
    {MATRIX_SYMBOLS[name]: operator for name, operator in OPERATORS.items()}
)
"""Operator by symbol: H, H_o and H_f."""


BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}  # memory of the gradients of several sequences and draws


def random_squares(
    problem: Problem, space: ParamSpace, count: int, *, probe: Probe, seed: int, at_once: int
) -> Iterator[Tensor]:
    """Yield (1/N) Σ_x (J_xᵀ g_x)² of draws 0, …, count − 1 as columns (n, k), `at_once` draws at a time.

    The draw for a sequence depends only on the seed, its index in the data and the number of the draw.
    """
    samples = PerSample(problem, space, "sequence", _chunk(space, at_once))
    shares, sequences = torch.as_tensor(samples.shares), samples.sequences
    batches = problem.batches
    first_sequence = batches.first_sequence
    total = batches.num_sequences if batches.share is None else batches.share.total

    def squares(graph: Graph, rows: slice, draws: range, group: int) -> Tensor:
        z = graph.outputs.detach()
        numbers = [first_sequence + int(x) for x in sequences[rows]]
        options = {"kind": probe, "seed": seed, "dtype": z.dtype, "device": z.device}
        signs = [
            torch.cat([probes(z[0].numel(), 1, first=s * total + x, **options).T for x in numbers])
            for s in draws
        ]
        noise, batch = torch.stack(signs).reshape(-1, *z.shape), graph.batch
        R = problem.loss.root(z, batch.targets, batch.weights, noise)
        return graph.pulled(R, group).square_()

    with samples.frozen():
        for start in range(0, count, at_once):
            draws = range(start, min(start + at_once, count))
            sums = torch.zeros(space.size, len(draws), dtype=space.dtype, device=space.device)
            for rows, values in samples.stream("roots", lambda g, r, group, d=draws: squares(g, r, d, group)):
                sums += torch.einsum("b,bnk->nk", shares[rows].to(values), values)
            yield sums


def _chunk(space: ParamSpace, at_once: int) -> int:
    """Number of sequences at a time."""
    entry = torch.finfo(space.dtype).bits // 8
    return max(1, BLOCK_BYTES.get(space.device.type, 2**30) // (entry * space.size * at_once))

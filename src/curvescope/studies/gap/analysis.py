"""Hessian, GGN and functional Hessian of one block.

With H = H_o + H_f and n parameters, the numbers of a block are

    λ_max(H), λ_max(H_o),   relative gap  1 − λ_max(H_o) / λ_max(H),
    tr, ‖·‖_F of all three,   functional share  ‖H_f‖_F / ‖H‖_F,
    W₁ between the spectra of H and H_o, in units of ρ = ‖H‖_F / √n, the root mean square eigenvalue of H.

In this unit W₁ is at most the functional share (Hoffman and Wielandt). The functional Hessian is computed
directly, because the difference of two products loses it to rounding if it is small.

Replacing the targets makes the loss small or large at fixed parameters.

H_f = Σ (∂ℓ/∂f) ∂²f is linear in the residual, but the GGN of cross-entropy and squared error does not
depend on the targets. So other targets change only the functional Hessian. For targets drawn from the
model, E[∂ℓ/∂f] = 0, hence E[H_f] = 0. With S draws this is estimated by

    ‖E H_f‖² ≈ Σ_{s≠t} ⟨H_f^s, H_f^t⟩ / (S (S − 1)),

which is unbiased, compared with the mean of ‖H_f^s‖².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import SpectralDensity, spectral_density
from curvescope.algorithms.blocks.probes import OwnProbes, own_probes
from curvescope.algorithms.columns import column_dots, columns_at_once
from curvescope.algorithms.estimates.intervals import jackknife, ratio_of_norms
from curvescope.algorithms.spectra.wasserstein import SpectralDistance, wasserstein
from curvescope.core.operator import LinearOperator, Matrix
from curvescope.core.progress import track
from curvescope.core.ranks.shard_layout import sharded_over
from curvescope.core.result import Result
from curvescope.core.seeds import generator, probes
from curvescope.data.batches import IGNORED, Batch
from curvescope.losses import Loss
from curvescope.operators import GGN, FunctionalHessian, Hessian
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem
from curvescope.runs.study import Step
from curvescope.studies.common.planning import PlannedMatrix, planned_own_probes, together

ALL = "all"


class ProbeEffort(NamedTuple):
    """Probes and steps for a block."""

    num_probes: int
    num_steps: int
    num_density_probes: int
    num_density_steps: int
    max_exact: int
    seed: int


class ValueWithError(NamedTuple):
    """Value and error; nan if unknown."""

    value: float
    error: float


@dataclass(frozen=True)
class Pair(Result):
    """Measurements of H, H_o and H_f of one block at one checkpoint."""

    block: str
    size: int
    loss: float
    hessian: OwnProbes
    ggn: OwnProbes
    functional: OwnProbes
    distance: SpectralDistance | None  # None without density probes
    densities: dict[str, SpectralDensity]  # densities of H and H_o; empty if not stored

    @property
    def scale(self) -> float:
        """Root mean square eigenvalue ρ = ‖H‖_F / √n."""
        return self.hessian.norm / math.sqrt(self.size)

    def top(self, part: str) -> ValueWithError:
        """Return λ_max of "hessian" or "ggn"; an eigenvalue lies within the error."""
        ends = getattr(self, part).ends
        return ValueWithError(float(ends.values[1]), float(ends.residuals[1]))

    def gap(self) -> ValueWithError:
        """Relative gap 1 − λ_max(H_o) / λ_max(H) with its error; nan unless λ_max(H) > 0."""
        (h, h_error), (g, g_error) = self.top("hessian"), self.top("ggn")
        if not h > 0:
            return ValueWithError(math.nan, math.nan)
        return ValueWithError(1 - g / h, (g_error + abs(g / h) * h_error) / h)

    def gap_interval(self) -> tuple[float, float]:
        """Interval of the gap with about 95 % coverage, from the bounds of both eigenvalues."""
        h, g = self.hessian.ends, self.ggn.ends
        assert h is not None
        assert g is not None
        if not h.values[1] > 0:
            return math.nan, math.nan
        return float(1 - g.high / h.values[1]), float(1 - g.values[1] / h.high)

    def share(self) -> ValueWithError:
        """Functional share ‖H_f‖_F / ‖H‖_F, with a jackknife error over probes; nan if H is zero."""
        if not self.hessian.norm > 0:
            return ValueWithError(math.nan, math.nan)
        if self.hessian.exact:
            return ValueWithError(self.functional.norm / self.hessian.norm, 0.0)
        return ValueWithError(*ratio_of_norms(self.functional.squared_samples, self.hessian.squared_samples))

    def trace_gap(self) -> ValueWithError:
        """Relative error tr H_f / tr H of the GGN's trace; nan if tr H is zero."""
        if self.hessian.trace == 0:
            return ValueWithError(math.nan, math.nan)
        value = self.functional.trace / self.hessian.trace
        errors = self.functional.trace_stderr, value * self.hessian.trace_stderr
        return ValueWithError(value, math.hypot(*errors) / abs(self.hessian.trace))

    def wasserstein(self) -> ValueWithError:
        """Bias-corrected W₁ in units of ρ; nan if not measured or if there is no curvature.

        The error combines the error over probes and the change over the last half of the Lanczos steps.
        """
        d = self.distance
        if d is None or not self.scale > 0:
            return ValueWithError(math.nan, math.nan)
        value = d.value if math.isnan(d.bias) else max(d.value - d.bias, 0.0)
        return ValueWithError(value / self.scale, d.error / self.scale)


def measure_pair(problem: Problem, block: str, effort: ProbeEffort, *, keep: bool = False) -> Pair:
    """Measure one block, or "all"; `keep` stores the densities, too."""
    patterns = () if block == ALL else (block,)
    size = problem.model.size_of(*problem.space(*patterns))
    exact = size <= max(effort.max_exact, effort.num_probes + effort.num_steps)
    H, G, F = (
        _operator(kind(problem, *patterns), written=exact) for kind in (Hessian, GGN, FunctionalHessian)
    )
    most = size if exact else 0
    measured = partial(own_probes, num_probes=effort.num_probes, max_exact=most, seed=effort.seed)
    densities = {}
    if effort.num_density_probes:
        densities = {"hessian": _density(H, effort, exact), "ggn": _density(G, effort, exact)}
    return Pair(
        block=block,
        size=size,
        loss=problem.loss_value(),
        hessian=measured(H, num_steps=effort.num_steps),
        ggn=measured(G, num_steps=effort.num_steps),
        functional=measured(F, num_steps=0),
        distance=wasserstein(densities["hessian"], densities["ggn"]) if densities else None,
        densities=densities if keep else {},
    )


def planned_pairs(
    what: str, effort: ProbeEffort, problem: Problem, spaces: list[tuple[str, ...]], times: int
) -> list[Step]:
    """Plan the steps of `measure_pair` in every space, repeated `times` times."""
    found = []
    for kind in ("hessian", "ggn", "functional"):
        parts = [PlannedMatrix(problem, kind, space) for space in spaces]
        half = kind == "functional"
        some = [] if half or not effort.num_density_probes else [_densities(what, parts, effort)]
        some += planned_own_probes(
            what, parts, effort.num_probes, 0 if half else effort.num_steps, effort.max_exact
        )
        found += [
            step._replace(products=times * step.products, made=times if i == 0 else 0)
            for i, step in enumerate(some)
        ]
    return found


def _densities(what: str, parts: list[PlannedMatrix], effort: ProbeEffort) -> Step:
    products = effort.num_density_probes * effort.num_density_steps * len(parts)
    widths = [columns_at_once(part.operator) for part in parts]
    columns = min(effort.num_density_probes, *widths)
    basis = effort.num_density_steps + 1
    return together(f"density of {what}", parts, products, columns=columns, basis=basis)


def _operator(op: CurvatureOperator, *, written: bool) -> LinearOperator:
    """Return the operator, or its full matrix, so all measurements share the same products."""
    return Matrix(op.to_dense(), symmetric=True, psd=op.psd) if written else op


def _density(op: LinearOperator, effort: ProbeEffort, exact: bool) -> SpectralDensity:
    steps = op.shape[0] if exact else effort.num_density_steps
    return spectral_density(
        op, num_probes=effort.num_density_probes, num_steps=max(steps, 3), seed=effort.seed
    )


# ---------------------------------------------------------------------------------------------------- targets

Kind = Literal["predicted", "drawn", "random"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DRAW = 1 << 20  # first random stream of draws, separate from those of probes


@dataclass(frozen=True)
class Draws(Result):
    """Inner products ⟨H_f^s v, H_f^t v⟩ for P probes v and S draws of all targets."""

    gram: np.ndarray  # (P, S, S)

    def expectation(self) -> tuple[float, float]:
        """Estimate of ‖E H_f‖² / E‖H_f‖² with its jackknife error over draws; zero in theory."""
        K = self.gram.mean(axis=0)
        keep = [np.delete(np.arange(len(K)), s) for s in range(len(K))]
        without = np.array([_cross(K[np.ix_(rest, rest)]) for rest in keep])
        return _cross(K), float(jackknife(_cross(K), without)[0])

    def shrinking(self) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers of draws 1, 2, 4, …, and ‖mean of so many H_f‖ / ‖single H_f‖, (C,) each."""
        K = self.gram.mean(axis=0)
        counts = 2 ** np.arange(int(math.log2(len(K))) + 1)
        single = np.trace(K) / len(K)
        groups = [[slice(i, i + c) for i in range(0, len(K) - c + 1, c)] for c in counts]
        means = [np.mean([K[group, group].mean() for group in some]) for some in groups]
        return counts, np.sqrt(np.array(means) / single)


def _cross(K: np.ndarray) -> float:
    """Mean off-diagonal entry of K divided by its mean diagonal entry."""
    S = len(K)
    return float((K.sum() - np.trace(K)) / (S * (S - 1)) / (np.trace(K) / S))


def can_replace(problem: Problem) -> bool:
    """Return True if targets are one tensor of classes or real numbers, and the loss can sample them."""
    known = type(problem.loss).sample_targets is not Loss.sample_targets
    return known and all(isinstance(batch.targets, Tensor) for batch in problem.batches)


def with_targets(problem: Problem, kind: Kind, *, seed: int, draw: int = 0) -> Problem:
    """Replace the targets of a problem at the same parameters and inputs; ignored targets stay ignored.

    predicted: the likeliest class, or the output itself, which minimizes the loss at these parameters;
        drawn: sampled from the model's distribution; random: uniform classes, or normal numbers with the
        mean and deviation of the targets, independent of the input. If the model is sharded, every rank
        processes all sequences.
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
    """Measure products of H_f with the same probes, for repeated draws of targets from the model."""
    kind = {"dtype": problem.dtype, "device": problem.device}
    model, space = problem.model, problem.space()
    shard = model.shards(space)
    V = probes(model.size_of(*space), num_probes, seed=seed, shard=shard, **kind)
    products = [
        FunctionalHessian(with_targets(problem, "drawn", seed=seed, draw=draw)) @ V
        for draw in range(num_draws)
    ]
    with sharded_over(model.spread):
        gram = [[column_dots(A, B).double().cpu().numpy() for B in products] for A in products]  # (S, S, P)
    return Draws(np.moveaxis(np.array(gram), -1, 0))

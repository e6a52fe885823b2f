"""|L_{k+1} − L_k| as the sample grows: losses of a model, and random numbers as a control."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import eigsh
from curvescope.closed_form.landscape import (
    ThreeTerms,
    mean_square_increment,
    quadratic_bound,
    quadratic_mean_square,
    samples_for,
    three_terms,
)
from curvescope.core.result import Result
from curvescope.core.seeds import generator, probes
from curvescope.data.batches import Batch
from curvescope.operators import Hessian
from curvescope.operators.samples.per_sample import PerSample, per_sample, probe_columns
from curvescope.problem import Problem

EMA = 0.99  # the published smoothing
FIRST = 10  # samples before a slope is fitted
POINTS = 40  # of a fit, evenly spaced in log k
RESAMPLES = 400
ENDS = (2.5, 97.5)


@dataclass(frozen=True)
class IncrementCurve(Result):
    """Increments |L_{k+1} − L_k| of one set of numbers, averaged over random orders."""

    mean: np.ndarray  # (N − 1,) mean |L_{k+1} − L_k|
    mean_stderr: np.ndarray
    rms: np.ndarray  # (N − 1,) root mean square
    rms_stderr: np.ndarray
    smoothed: np.ndarray  # (N − 1,) exponential moving average of `mean`
    slope: np.ndarray  # d log mean / d log k from FIRST on, and its 95 % interval
    early: np.ndarray  # slope of `smoothed` below FIRST · 10, and its interval
    late: np.ndarray  # slope of `smoothed` in the last half of the range, and its interval
    ratio: np.ndarray  # mean of k(k + 1)(L_{k+1} − L_k)² over Var for k ≤ N/2, and its interval


@dataclass(frozen=True)
class IncrementGrowth(Result):
    """Increments of the model, of the control and by the law, for k = 1, …, N − 1."""

    k: np.ndarray
    model: IncrementCurve
    control: IncrementCurve
    law: np.ndarray  # √(Var/(k(k + 1)))
    law_slope: float
    control_name: str
    variance: float  # variance of the losses, divisor N − 1
    deviation: float  # mean |l − mean|: the limit of k |L_{k+1} − L_k|
    num_orders: int
    seed: int


def growth(losses: np.ndarray, *, num_orders: int, seed: int) -> IncrementGrowth:
    """Increments over random orders of the losses, and over draws of control numbers."""
    N, source = len(losses), np.random.default_rng(seed)
    variance, k = float(losses.var(ddof=1)), np.arange(1, N)
    orders = np.stack([source.permutation(losses) for _ in range(num_orders)])
    drawn, name = _control(losses, (num_orders, N), source)
    law = np.sqrt(mean_square_increment(variance, k.astype(float)))
    return IncrementGrowth(
        k=k,
        model=curve(orders, variance, source),
        control=curve(drawn, variance, source),
        law=law,
        law_slope=slope(k, law[None], FIRST, N)[0],
        control_name=name,
        variance=variance,
        deviation=float(np.abs(losses - losses.mean()).mean()),
        num_orders=num_orders,
        seed=seed,
    )


def increments(values: np.ndarray) -> np.ndarray:
    """L_{k+1} − L_k for k = 1, …, N − 1 along the last axis: (…, N) to (…, N − 1)."""
    means = np.cumsum(values, axis=-1) / np.arange(1, values.shape[-1] + 1)
    return np.diff(means, axis=-1)


def curve(values: np.ndarray, variance: float, source: np.random.Generator) -> IncrementCurve:
    """Mean increments over rows of `values`, each an order of N numbers; intervals resample rows."""
    steps = np.abs(increments(values))
    R, last = steps.shape
    k = np.arange(1, last + 1)
    squares = steps**2
    rms = np.sqrt(squares.mean(0))
    again = np.stack([steps[source.integers(0, R, R)].mean(0) for _ in range(RESAMPLES)])
    mean = np.concatenate([steps.mean(0)[None], again])  # the first row is the estimate
    smoothed = smooth(mean)
    scaled = scaled_squares(steps) / variance
    half = 1.96 * scaled.std(ddof=1) / np.sqrt(R)
    return IncrementCurve(
        mean=mean[0],
        mean_stderr=steps.std(0, ddof=1) / np.sqrt(R),
        rms=rms,
        rms_stderr=squares.std(0, ddof=1) / np.sqrt(R) / (2 * rms + 1e-300),
        smoothed=smoothed[0],
        slope=_interval(slope(k, mean, FIRST, last)),
        early=_interval(slope(k, smoothed, 1, min(10 * FIRST, last))),
        late=_interval(slope(k, smoothed, last // 2, last)),
        ratio=np.array([scaled.mean(), scaled.mean() - half, scaled.mean() + half]),
    )


def scaled_squares(steps: np.ndarray) -> np.ndarray:
    """Mean of k(k + 1)(L_{k+1} − L_k)² over k ≤ N/2, one number per row of increments (…, N − 1).

    Its expectation is the variance. Over all k it equals the variance for every order and would check
    nothing: Σ_i (l_i − L_N)² = Σ_k (k/(k + 1)) (l_{k+1} − L_k)².
    """
    half = max(1, (steps.shape[-1] + 1) // 2)
    k = np.arange(1, half + 1)
    return (steps[..., :half] ** 2 * k * (k + 1)).mean(-1)


def smooth(curves: np.ndarray, keep: float = EMA) -> np.ndarray:
    """Exponential moving average along the last axis: e_1 = x_1, e_k = keep e_{k−1} + (1 − keep) x_k."""
    smoothed = np.empty_like(curves)
    smoothed[..., 0] = curves[..., 0]
    for k in range(1, curves.shape[-1]):
        smoothed[..., k] = keep * smoothed[..., k - 1] + (1 - keep) * curves[..., k]
    return smoothed


def slope(k: np.ndarray, curves: np.ndarray, low: int, high: int) -> np.ndarray:
    """Least-squares slope of log curve against log k, over points evenly spread in log k: (rows,)."""
    spread = np.geomspace(max(low, 1), max(min(high, k[-1]), low + 1), POINTS)
    chosen = np.unique(np.clip(np.round(spread).astype(int), k[0], k[-1])) - 1
    x, y = np.log(k[chosen]), np.log(np.maximum(curves[:, chosen], 1e-300))
    x = x - x.mean()
    return y @ x / max(float(x @ x), 1e-300)


def _interval(values: np.ndarray) -> np.ndarray:
    """Return the estimate, values[0], and the 95 % percentile interval of the resamples, values[1:]."""
    return np.array([values[0], *np.percentile(values[1:], ENDS)])


def _control(
    losses: np.ndarray, shape: tuple[int, int], source: np.random.Generator
) -> tuple[np.ndarray, str]:
    """Draw numbers with the losses' mean and variance: lognormal, or normal if a loss is not positive."""
    mean, variance = float(losses.mean()), float(losses.var(ddof=1))
    if losses.min() <= 0:
        return source.normal(mean, np.sqrt(variance), shape), "normal"
    spread = np.log1p(variance / mean**2)
    return source.lognormal(np.log(mean) - spread / 2, np.sqrt(spread), shape), "lognormal"


# ----------------------------------------------------------------------------------------------------- budget


@dataclass(frozen=True)
class SampleBudget(Result):
    """One row per tolerance τ: the least k with root mean square |L_{k+1} − L_k| ≤ τ."""

    tolerance: np.ndarray  # (T,)
    k: np.ndarray  # (T,) from the pilot half
    low: np.ndarray  # (T,) ends of its interval, by resampling the pilot
    high: np.ndarray
    # (T,) rms at k over all orders of the other half; nan if that half has too few samples.
    held_out: np.ndarray
    held_low: np.ndarray  # (T,) its interval, by resampling that half
    held_high: np.ndarray
    num_pilot: int
    num_held_out: int

    @property
    def verdicts(self) -> list[str]:
        """Return “met”, “missed” or “not checked” for each tolerance, from the held-out interval."""
        pairs = zip(self.tolerance, self.held_low, self.held_out, strict=True)
        return [
            "not checked: too few samples" if np.isnan(rms) else "met" if low <= tau else "missed"
            for tau, low, rms in pairs
        ]


def budget(losses: np.ndarray, tolerances: tuple[float, ...], *, seed: int) -> SampleBudget:
    """Number of samples k for every tolerance, from one half of the losses, checked on the other half."""
    source = np.random.default_rng([seed, 1])
    mixed = source.permutation(losses)
    pilot, rest = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    drawn = [source.choice(pilot, len(pilot)).var(ddof=1) for _ in range(RESAMPLES)]
    others = np.array([source.choice(rest, len(rest)).var(ddof=1) for _ in range(RESAMPLES)])
    rows = []
    for tau in tolerances:
        k = samples_for(float(pilot.var(ddof=1)), tau)
        ends = np.percentile([samples_for(float(v), tau) for v in drawn], ENDS)
        if k >= len(rest):
            rows.append((tau, k, *ends, np.nan, np.nan, np.nan))
            continue
        rms = np.sqrt(mean_square_increment(np.array([rest.var(ddof=1), *others]), k))
        rows.append((tau, k, *ends, rms[0], *np.percentile(rms[1:], ENDS)))
    columns = [np.array(column, dtype=float) for column in zip(*rows, strict=True)]
    return SampleBudget(*columns, num_pilot=len(pilot), num_held_out=len(rest))


# ---------------------------------------------------------------------------------------------------- moments

SUBSET_BYTES = 2**28  # memory for the mean gradients of subsets that are held at once


@dataclass(frozen=True)
class Gradients(Result):
    """Gradients of the samples at w*, and mean gradients of random subsets."""

    norms: np.ndarray  # (S,) ‖g_x‖
    mean_square: float  # ‖ḡ‖²
    sizes: np.ndarray  # (K,) k
    squares: np.ndarray  # (K, R) ‖∇L_k‖² of R subsets of k samples without replacement

    @property
    def covariance(self) -> float:
        """tr Cov(g), divisor S."""
        return float((self.norms**2).mean() - self.mean_square)

    @property
    def unbiased(self) -> float:
        """tr Cov(g), divisor S − 1."""
        return self.covariance * len(self.norms) / (len(self.norms) - 1)


@dataclass(frozen=True)
class Hessians(Result):
    """Products of the samples' Hessians with P probes, or with all basis vectors."""

    traces: np.ndarray  # (S, P) vᵀH_x v
    squares: np.ndarray  # (S, P) ‖H_x v‖²
    mean_squares: np.ndarray  # (P,) ‖H̄ v‖²
    exact: bool  # the sums over basis vectors are the traces and norms themselves

    def traces_of(self, kept: np.ndarray) -> np.ndarray:
        """tr H_x from the probes `kept`: (S,)."""
        return self.traces.sum(1) if self.exact else self.traces[:, kept].mean(1)

    @property
    def frobenius(self) -> np.ndarray:
        """‖H_x‖_F: (S,)."""
        return np.sqrt(self.squares.sum(1) if self.exact else self.squares.mean(1))

    def moments(self, losses: np.ndarray, kept: np.ndarray) -> dict[str, float]:
        """Unbiased Cov(l, t), Var t and E‖H_x − H̄‖_F², divisor S − 1, from the probes `kept`.

        Var t is the mean covariance between two different probes, because one probe would add its own noise.
        """
        S = len(losses)
        spread = (self.squares.mean(0) - self.mean_squares) * S / (S - 1)
        t = self.traces_of(kept)
        if self.exact:
            variance, fluctuation = float(t.var(ddof=1)), float(spread.sum())
        else:
            C = np.cov(self.traces[:, kept].T)
            P = len(kept)
            variance = float((C.sum() - np.trace(C)) / (P * (P - 1)))
            fluctuation = float(spread[kept].mean())
        covariance = float(np.cov(losses, t)[0, 1])
        return {
            "loss_trace_covariance": covariance,
            "trace_variance": variance,
            "fluctuation": fluctuation,
        }


def measure_gradients(samples: PerSample, sizes: list[int], num_subsets: int, seed: int) -> Gradients:
    """Measure gradient norms and the mean gradients of random subsets in one pass over the samples."""
    S, space = samples.num_samples, samples.space
    bits = torch.finfo(space.dtype).bits // 8
    most = max(2, SUBSET_BYTES // max(len(sizes) * space.size * bits, 1))
    R, source = min(num_subsets, most), np.random.default_rng([seed, 2])
    chosen = np.zeros((len(sizes), R, S))
    for i, k in enumerate(sizes):
        for r in range(R):
            chosen[i, r, source.choice(S, k, replace=False)] = 1 / k
    C = torch.as_tensor(np.concatenate([chosen.reshape(-1, S), np.full((1, S), 1 / S)]))
    C = C.to(space.device, space.dtype)
    sums = torch.zeros(len(C), space.size, dtype=space.dtype, device=space.device)
    norms = []
    for rows, g in samples.gradient_parts():
        sums += C[:, rows] @ g
        norms.append(g.double().norm(dim=1).cpu())
    squares = torch.stack([row.double().square().sum() for row in sums]).cpu().numpy()
    return Gradients(
        norms=torch.cat(norms).numpy(),
        mean_square=float(squares[-1]),
        sizes=np.array(sizes),
        squares=squares[:-1].reshape(len(sizes), R),
    )


def measure_hessians(samples: PerSample, num_probes: int, seed: int) -> Hessians:
    """Measure traces and Frobenius norms in one pass over the samples; all samples share the probes."""
    V, exact = probe_columns(samples.space, num_probes, seed=seed)
    traces, squares, total = [], [], torch.zeros_like(V)
    for _, products in samples.product_parts(V):
        traces.append((products * V).double().sum(1).cpu())
        squares.append(products.double().square().sum(1).cpu())
        total += products.sum(0)
    mean = (total / samples.num_samples).double().square().sum(0).cpu().numpy()
    return Hessians(torch.cat(traces).numpy(), torch.cat(squares).numpy(), mean, exact)


class ThreeTermLaw(NamedTuple):
    """The three terms at one radius, with standard errors."""

    terms: ThreeTerms
    errors: ThreeTerms
    total_error: (
        float  # standard error of the sum; the three terms share probes, so their errors are not independent
    )


def law(s: float, losses: np.ndarray, g: Gradients, H: Hessians) -> ThreeTermLaw:
    """Compute the three terms at radius s, with jackknife errors over the probes."""
    variance, every = float(losses.var(ddof=1)), np.arange(H.traces.shape[1])

    def terms(kept: np.ndarray) -> ThreeTerms:
        own = H.moments(losses, kept)
        return three_terms(s, loss_variance=variance, gradient_covariance=g.unbiased, **own)

    if H.exact:
        return ThreeTermLaw(terms(every), ThreeTerms(0.0, 0.0, 0.0), 0.0)
    left = np.array([[*found, found.total] for found in (terms(np.delete(every, j)) for j in every)])
    share = (len(every) - 1) / len(every)
    errors = np.sqrt(share * ((left - left.mean(0)) ** 2).sum(0)).tolist()
    return ThreeTermLaw(terms(every), ThreeTerms(*errors[:3]), errors[3])


def root_mean_square(problem: Problem, *blocks: str) -> float:
    """Root mean square of the parameters in `blocks`: the unit of the radii."""
    space = problem.space(*blocks)
    theta = space.gather({name: p.detach() for name, p in problem.named_parameters()})
    return float(theta.double().square().mean().sqrt())


# ----------------------------------------------------------------------------------------------------- points

ORDERS = 64  # random orders of the samples at every point


@dataclass(frozen=True)
class PairedLosses(Result):
    """Losses at pairs of points w* ± δ, δ ~ N(0, s² I). Terms that are linear in δ cancel within a pair."""

    s: float
    variance: np.ndarray  # (J,) Var_x l_x, divisor S − 1, the mean of a pair
    simulated: np.ndarray  # (J,) mean of k(k + 1)(L_{k+1} − L_k)² over k ≤ S/2, orders and a pair
    rise: np.ndarray  # (J,) mean loss minus the mean loss at w*, averaged over a pair
    distance: np.ndarray  # (J,) ‖δ‖
    largest: np.ndarray  # (J,) max of |l_{k+1} − L_k| over k, orders and a pair

    @property
    def mean(self) -> float:
        """E_δ Var_x l_x."""
        return float(self.variance.mean())

    @property
    def stderr(self) -> float:
        """Standard error of `mean` over pairs; zero at s = 0, because nothing is random."""
        return error_of(self.variance)

    @property
    def simulated_stderr(self) -> float:
        """Standard error of the mean of `simulated`."""
        return error_of(self.simulated)


@dataclass(frozen=True)
class SpectralNorms(Result):
    """Spectral norms of some samples' Hessians by power iteration, which gives lower bounds."""

    samples: np.ndarray  # (M,) indices of the samples
    here: np.ndarray  # (M,) at w*: ‖H v‖ of the last unit vector
    gap: np.ndarray  # (M,) relative increase in the last iteration
    radii: np.ndarray  # (Q,) distances from w* of the other points
    there: np.ndarray  # (Q, M) norms at those points
    ball: float  # √(2L/M)

    @property
    def at_minimum(self) -> float:
        """M = max ‖H_i(w*)‖ over the measured samples."""
        return float(self.here.max())

    @property
    def nearby(self) -> float:
        """The same maximum over all points."""
        return float(max(self.here.max(), self.there.max(initial=0.0)))


def simulate(problem: Problem, blocks: tuple[str, ...], s: float, num_pairs: int, seed: int) -> PairedLosses:
    """Compute the losses of all samples at `num_pairs` pairs of points; if s = 0, all points are w*."""
    space = problem.space(*blocks)
    samples, where = per_sample(problem, *blocks), {"dtype": space.dtype, "device": space.device}
    with samples.frozen():
        base = samples.losses()
        rows = []
        for j in range(num_pairs):
            delta = s * probes(space.size, 1, seed=seed, first=j, kind="gaussian", **where)[:, 0]
            pair = losses_at(samples, delta) if s > 0 else [base, base]
            rows.append((*_increments(pair, [seed, j, 3]), np.mean(pair) - base.mean(), float(delta.norm())))
    variance, simulated, largest, rise, distance = (np.array(column) for column in zip(*rows, strict=True))
    return PairedLosses(s, variance, simulated, rise, distance, largest)


def _increments(pair: list[np.ndarray], seed: list[int]) -> tuple[float, float, float]:
    """Variance, scaled mean square and largest increment over random orders of the losses at two points."""
    source = np.random.default_rng(seed)
    orders = np.stack([source.permutation(values) for values in pair for _ in range(ORDERS)])
    steps = np.abs(increments(orders))
    variance = np.mean([values.var(ddof=1) for values in pair])
    largest = (steps * np.arange(2, orders.shape[1] + 1)).max()
    return float(variance), float(scaled_squares(steps).mean()), float(largest)


class PowerIteration(NamedTuple):
    """Settings of the power iteration for spectral norms."""

    num_samples: int
    num_steps: int
    seed: int


def measure_norms(
    problem: Problem,
    blocks: tuple[str, ...],
    losses: np.ndarray,
    sizes: np.ndarray,
    radii: list[float],
    power: PowerIteration,
) -> SpectralNorms:
    """Run power iteration on the samples with the largest Frobenius norms `sizes`, at w* and at random
    points.

    The points lie on spheres of the given radii and of √(2L/M), the radius of the ball in the rigorous bound.
    """
    chosen = np.sort(np.argsort(sizes)[::-1][: power.num_samples])
    part = subset(problem, per_sample(problem).sequences[chosen])
    space = problem.space(*blocks)
    samples = per_sample(part, *blocks)
    norms_at_minimum, gap = _power(samples, power)
    ball = float(np.sqrt(2 * losses.max() / max(norms_at_minimum.max(), 1e-300)))
    spheres, there = [*radii, ball], []
    where = {"dtype": space.dtype, "device": space.device}
    for q, radius in enumerate(spheres):
        z = probes(space.size, 1, seed=power.seed, first=q, kind="gaussian", **where)[:, 0]
        shifted = part.at(offset(samples, radius * z / z.norm()))
        there.append(_power(per_sample(shifted, *blocks), power)[0])
    return SpectralNorms(chosen, norms_at_minimum, gap, np.array(spheres), np.stack(there), ball)


def _power(samples: PerSample, power: PowerIteration) -> tuple[np.ndarray, np.ndarray]:
    """‖H_x v‖ after `num_steps` iterations, and the relative increase in the last one."""
    S, n = samples.num_samples, samples.space.size
    source = generator(power.seed, 4)
    V = torch.randn(S, n, 1, generator=source).to(samples.space.device, samples.space.dtype)
    norms = []
    with samples.frozen():
        for _ in range(power.num_steps):
            V = samples.products(V / V.norm(dim=1, keepdim=True))
            norms.append(V.double().norm(dim=1)[:, 0].cpu().numpy())
    return norms[-1], 1 - norms[-2] / np.maximum(norms[-1], 1e-300)


def losses_at(samples: PerSample, delta: Tensor) -> list[np.ndarray]:
    """Loss of every sample at w* + δ and at w* − δ."""
    with samples.frozen():
        return [samples.losses(offset(samples, sign * delta)) for sign in (1, -1)]


def offset(samples: PerSample, delta: Tensor) -> dict[str, Tensor]:
    """Parameters at w* + δ, where δ is a vector over the samples' blocks."""
    minimum, changes = dict(samples.problem.named_parameters()), samples.space.scatter(delta)
    return {name: minimum[name].detach() + change for name, change in changes.items()}


def subset(problem: Problem, sequences: np.ndarray) -> Problem:
    """Restrict a problem to sequences by number over all batches; those of a batch stay together."""
    data = list(_chosen(problem, sequences))
    return Problem(problem.model, data, problem.loss, params=problem.choice.params)


def _chosen(problem: Problem, sequences: Any) -> Iterator[Batch]:
    first = 0
    for batch in problem.batches:
        inside = (sequences >= first) & (sequences < first + batch.num_sequences)
        rows = torch.as_tensor(sequences[inside] - first)
        if len(rows):
            yield batch.map(lambda t, rows=rows: t[rows.to(t.device)])
        first += batch.num_sequences


def error_of(values: np.ndarray) -> float:
    """Standard error of the mean; zero for a single value, which is not random."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


# --------------------------------------------------------------------------------------------------- subspace


@dataclass(frozen=True)
class EigenSubspace(Result):
    """Loss, gradient and Hessian of every sample in the subspace (D), and losses at points of it."""

    eigenvalues: np.ndarray  # (D,) of the mean Hessian, largest first
    residuals: np.ndarray  # (D,) of the eigenpairs
    sigma: float
    losses: np.ndarray  # (S,) at w*
    gradients: np.ndarray  # (S, D) Uᵀ g_x
    hessians: np.ndarray  # (S, D, D) Uᵀ H_x U
    direct: np.ndarray  # (J, 2, S) losses at w* ± U z

    def closed_form(self) -> np.ndarray:
        """Δ₂ for k = 1, …, S − 1, with the samples in their given order."""
        a, c, B = (_steps(x) for x in (self.losses, self.gradients, self.hessians))
        return np.asarray(quadratic_mean_square(a, c, B, self.sigma))

    def simulated(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean of (L_{k+1} − L_k)² over the points, and its standard error."""
        squares = (increments(self.direct) ** 2).mean(1)  # (J, S − 1)
        return squares.mean(0), squares.std(0, ddof=1) / np.sqrt(len(squares))

    def bound(self) -> np.ndarray:
        """The published bound for these samples; two gradients differ by at most 2 max ‖c_x‖."""
        S, D = self.gradients.shape
        gradient = 2 * float(np.linalg.norm(self.gradients, axis=1).max())
        hessian = float(np.linalg.norm(self.hessians, 2, axis=(1, 2)).max())
        k = np.arange(1, S).astype(float)
        top = float(np.abs(self.losses).max())
        return np.asarray(quadratic_bound(top, gradient, hessian, self.sigma, D, k))


class SubspaceSettings(NamedTuple):
    """Settings for the subspace and for the number of points in it."""

    dimension: int
    max_products: int
    rise: float
    num_pairs: int
    seed: int


def measure_subspace(problem: Problem, blocks: tuple[str, ...], effort: SubspaceSettings) -> EigenSubspace:
    """Measure the top eigenvectors of the mean Hessian, the samples' coefficients in their span, and losses
    around w*.

    The closed form holds in any subspace. Eigenvectors that have not converged give another subspace, but the
    check stays valid. σ is chosen such that ½ σ² ‖Uᵀ H_x U‖ = rise for the sharpest sample.
    """
    H = Hessian(problem, *blocks)
    D = min(effort.dimension, H.shape[0])
    pairs = eigsh(H, D, which="LA", max_products=effort.max_products, seed=effort.seed)
    U = pairs.vectors
    assert U is not None
    samples = per_sample(problem, *blocks)
    parts = [
        torch.einsum("nd,snk->sdk", U, products).double().cpu() for _, products in samples.product_parts(U)
    ]
    B = torch.cat(parts).numpy()
    sigma = float(np.sqrt(2 * effort.rise / max(np.linalg.norm(B, 2, axis=(1, 2)).max(), 1e-12)))
    source, direct = generator(effort.seed, 5), []
    with samples.frozen():
        for _ in range(effort.num_pairs):
            z = sigma * torch.randn(D, generator=source, dtype=torch.float64)
            direct.append(losses_at(samples, U @ z.to(U)))
    return EigenSubspace(
        eigenvalues=pairs.values,
        residuals=pairs.residuals,
        sigma=sigma,
        losses=samples.losses(),
        gradients=samples.gradient_products(U),
        hessians=(B + B.transpose(0, 2, 1)) / 2,
        direct=np.array(direct),
    )


def _steps(values: np.ndarray) -> np.ndarray:
    """Increments of running means along the first axis."""
    return np.moveaxis(increments(np.moveaxis(values, 0, -1)), -1, 0)

"""Direct simulation: the samples' losses at points drawn around w*, and their Hessians' norms there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.core.result import Result
from curvescope.core.seeds import generator, probes
from curvescope.data.batches import Batch
from curvescope.operators.samples.per_sample import PerSample, per_sample
from curvescope.problem import Problem
from curvescope.studies.landscape.growth import increments, scaled_squares

ORDERS = 64  # of the samples, at every point


@dataclass(frozen=True)
class Direct(Result):
    """Losses at pairs of points w* ± δ, δ ~ N(0, s² I). What is linear in δ cancels in a pair."""

    s: float
    variance: np.ndarray  # (J,) Var_x l_x, divisor S − 1, the mean of a pair
    simulated: np.ndarray  # (J,) mean of k(k + 1)(L_{k+1} − L_k)² over k ≤ S/2, orders and a pair
    rise: np.ndarray  # (J,) mean loss above that at w*, the mean of a pair
    distance: np.ndarray  # (J,) ‖δ‖
    largest: np.ndarray  # (J,) max of |l_{k+1} − L_k| over k, orders and a pair

    @property
    def mean(self) -> float:
        """E_δ Var_x l_x."""
        return float(self.variance.mean())

    @property
    def stderr(self) -> float:
        """Of it, over pairs; zero at s = 0, where there is nothing to draw."""
        return error_of(self.variance)

    @property
    def simulated_stderr(self) -> float:
        """Of the mean of `simulated`."""
        return error_of(self.simulated)


@dataclass(frozen=True)
class Norms(Result):
    """Spectral norms of some samples' Hessians by power iteration: values from below."""

    samples: np.ndarray  # (M,) which
    here: np.ndarray  # (M,) at w*: ‖H v‖ of the last unit vector
    gap: np.ndarray  # (M,) how much the last iteration added, relative
    radii: np.ndarray  # (Q,) of the points where they were measured too
    there: np.ndarray  # (Q, M)
    ball: float  # √(2L/M)

    @property
    def at_minimum(self) -> float:
        """M = max ‖H_i(w*)‖ of what was found."""
        return float(self.here.max())

    @property
    def nearby(self) -> float:
        """The same over all points."""
        return float(max(self.here.max(), self.there.max(initial=0.0)))


def simulate(problem: Problem, blocks: tuple[str, ...], s: float, num_pairs: int, seed: int) -> Direct:
    """Losses of all samples at `num_pairs` pairs of points; where s = 0 they are all w*."""
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
    return Direct(s, variance, simulated, rise, distance, largest)


def _increments(pair: list[np.ndarray], seed: list[int]) -> tuple[float, float, float]:
    """Of the losses at two points: variance, scaled mean square and largest increment over random orders."""
    source = np.random.default_rng(seed)
    orders = np.stack([source.permutation(values) for values in pair for _ in range(ORDERS)])
    steps = np.abs(increments(orders))
    variance = np.mean([values.var(ddof=1) for values in pair])
    largest = (steps * np.arange(2, orders.shape[1] + 1)).max()
    return float(variance), float(scaled_squares(steps).mean()), float(largest)


class Power(NamedTuple):
    """How spectral norms are measured."""

    num_samples: int
    num_steps: int
    seed: int


def measure_norms(
    problem: Problem,
    blocks: tuple[str, ...],
    losses: np.ndarray,
    sizes: np.ndarray,
    radii: list[float],
    power: Power,
) -> Norms:
    """Power iteration on the samples with the largest Frobenius norms `sizes`, at w* and at random points.

    The points lie on spheres of the given radii and of √(2L/M), which the rigorous bound asks for.
    """
    chosen = np.sort(np.argsort(sizes)[::-1][: power.num_samples])
    part = subset(problem, per_sample(problem).sequences[chosen])
    space = problem.space(*blocks)
    samples = per_sample(part, *blocks)
    found, gap = _power(samples, power)
    ball = float(np.sqrt(2 * losses.max() / max(found.max(), 1e-300)))
    spheres, there = [*radii, ball], []
    where = {"dtype": space.dtype, "device": space.device}
    for q, radius in enumerate(spheres):
        z = probes(space.size, 1, seed=power.seed, first=q, kind="gaussian", **where)[:, 0]
        moved = part.at(offset(samples, radius * z / z.norm()))
        there.append(_power(per_sample(moved, *blocks), power)[0])
    return Norms(chosen, found, gap, np.array(spheres), np.stack(there), ball)


def _power(samples: PerSample, power: Power) -> tuple[np.ndarray, np.ndarray]:
    """‖H_x v‖ after some iterations, and what the last one added, relative."""
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
    """Every sample's loss at w* + δ and at w* − δ."""
    with samples.frozen():
        return [samples.losses(offset(samples, sign * delta)) for sign in (1, -1)]


def offset(samples: PerSample, delta: Tensor) -> dict[str, Tensor]:
    """The parameters at w* + δ, δ a vector over the samples' blocks."""
    here, moved = dict(samples.problem.named_parameters()), samples.space.scatter(delta)
    return {name: here[name].detach() + change for name, change in moved.items()}


def subset(problem: Problem, sequences: np.ndarray) -> Problem:
    """The problem of some sequences, counted over all batches; those of one batch stay together."""
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
    """Standard error of a mean; zero of a single value, which was not drawn."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0

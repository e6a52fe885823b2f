"""What the law with a probe needs of single samples: gradients' covariance, traces and spread of Hessians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from curvescope.closed_form.landscape import ThreeTerms, three_terms
from curvescope.core.result import Result
from curvescope.operators.samples.per_sample import PerSample, probe_columns
from curvescope.problem import Problem

SUBSET_BYTES = 2**28  # of the mean gradients of subsets that are held at once


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

        Var t is the mean covariance of two different probes' forms: with one probe its own noise would count.
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
    """One pass over the samples' gradients; of every subset its sum is kept."""
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
    """One pass over the samples' products with probes that all share."""
    V, exact = probe_columns(samples.space, num_probes, seed=seed)
    traces, squares, total = [], [], torch.zeros_like(V)
    for _, found in samples.product_parts(V):
        traces.append((found * V).double().sum(1).cpu())
        squares.append(found.double().square().sum(1).cpu())
        total += found.sum(0)
    mean = (total / samples.num_samples).double().square().sum(0).cpu().numpy()
    return Hessians(torch.cat(traces).numpy(), torch.cat(squares).numpy(), mean, exact)


class Law(NamedTuple):
    """The three terms at one radius, with standard errors."""

    terms: ThreeTerms
    errors: ThreeTerms
    total_error: float  # of their sum: the probes of the three are the same


def law(s: float, losses: np.ndarray, g: Gradients, H: Hessians) -> Law:
    """The terms at radius s; errors by leaving out one probe at a time."""
    variance, every = float(losses.var(ddof=1)), np.arange(H.traces.shape[1])

    def terms(kept: np.ndarray) -> ThreeTerms:
        own = H.moments(losses, kept)
        return three_terms(s, loss_variance=variance, gradient_covariance=g.unbiased, **own)

    if H.exact:
        return Law(terms(every), ThreeTerms(0.0, 0.0, 0.0), 0.0)
    left = np.array([[*found, found.total] for found in (terms(np.delete(every, j)) for j in every)])
    share = (len(every) - 1) / len(every)
    errors = np.sqrt(share * ((left - left.mean(0)) ** 2).sum(0)).tolist()
    return Law(terms(every), ThreeTerms(*errors[:3]), errors[3])


def root_mean_square(problem: Problem, *blocks: str) -> float:
    """Of the parameters that are moved: the unit of the radii."""
    space = problem.space(*blocks)
    theta = space.gather({name: p.detach() for name, p in problem.named_parameters()})
    return float(theta.double().square().mean().sqrt())

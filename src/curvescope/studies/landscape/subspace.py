"""The eigen-subspace criterion Δ₂ of arXiv 2604.14870: closed form, direct simulation and bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from curvescope.algorithms import eigsh
from curvescope.closed_form.landscape import quadratic_bound, quadratic_mean_square
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.operators import Hessian
from curvescope.operators.samples.per_sample import per_sample
from curvescope.problem import Problem
from curvescope.studies.landscape.growth import increments
from curvescope.studies.landscape.points import losses_at


@dataclass(frozen=True)
class Subspace(Result):
    """Every sample's loss, gradient and Hessian in the D-dimensional subspace, and losses at points of it."""

    eigenvalues: np.ndarray  # (D,) of the mean Hessian, from the largest
    residuals: np.ndarray  # (D,) of the eigenpairs
    sigma: float
    losses: np.ndarray  # (S,) at w*
    gradients: np.ndarray  # (S, D) Uᵀ g_x
    hessians: np.ndarray  # (S, D, D) Uᵀ H_x U
    direct: np.ndarray  # (J, 2, S) losses at w* ± U z

    def closed_form(self) -> np.ndarray:
        """Δ₂ for k = 1, …, S − 1, samples in their own order."""
        a, c, B = (_steps(x) for x in (self.losses, self.gradients, self.hessians))
        return np.asarray(quadratic_mean_square(a, c, B, self.sigma))

    def simulated(self) -> tuple[np.ndarray, np.ndarray]:
        """The mean of (L_{k+1} − L_k)² over the points, and its standard error."""
        squares = (increments(self.direct) ** 2).mean(1)  # (J, S − 1)
        return squares.mean(0), squares.std(0, ddof=1) / np.sqrt(len(squares))

    def bound(self) -> np.ndarray:
        """The published bound with the largest of these samples; gradients differ by up to 2 max ‖c_x‖."""
        S, D = self.gradients.shape
        gradient = 2 * float(np.linalg.norm(self.gradients, axis=1).max())
        hessian = float(np.linalg.norm(self.hessians, 2, axis=(1, 2)).max())
        k = np.arange(1, S).astype(float)
        top = float(np.abs(self.losses).max())
        return np.asarray(quadratic_bound(top, gradient, hessian, self.sigma, D, k))


class Effort(NamedTuple):
    """How the subspace is found, and how many points of it are looked at."""

    dimension: int
    max_products: int
    rise: float
    num_pairs: int
    seed: int


def measure_subspace(problem: Problem, blocks: tuple[str, ...], effort: Effort) -> Subspace:
    """Top eigenvectors of the mean Hessian, the samples' coefficients in them, and losses around w*.

    The closed form holds in any subspace, so eigenvectors that have not converged change what it is of, and
    nothing else. σ is such that ½ σ² ‖Uᵀ H_x U‖ = rise for the sharpest sample.
    """
    H = Hessian(problem, *blocks)
    D = min(effort.dimension, H.shape[0])
    pairs = eigsh(H, D, which="LA", max_products=effort.max_products, seed=effort.seed)
    U = pairs.vectors
    assert U is not None
    samples = per_sample(problem, *blocks)
    parts = [torch.einsum("nd,snk->sdk", U, found).double().cpu() for _, found in samples.product_parts(U)]
    B = torch.cat(parts).numpy()
    sigma = float(np.sqrt(2 * effort.rise / max(np.linalg.norm(B, 2, axis=(1, 2)).max(), 1e-12)))
    source, direct = generator(effort.seed, 5), []
    with samples.frozen():
        for _ in range(effort.num_pairs):
            z = sigma * torch.randn(D, generator=source, dtype=torch.float64)
            direct.append(losses_at(samples, U @ z.to(U)))
    return Subspace(
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

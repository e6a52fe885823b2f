"""The loss on a plane through θ, and its quadratic prediction from derivatives at θ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.progress import track
from curvescope.core.result import Tabular
from curvescope.engines import EngineName
from curvescope.models.parameter_selection import Params
from curvescope.operators.curvature import Hessian
from curvescope.operators.taylor.directions import (
    DirectionInput,
    as_direction,
    check_problem,
    displaced,
    dot,
    filter_normalized,
)
from curvescope.operators.taylor.expansion import VERDICTS, Agreement, Expansion, noise, rounding_of
from curvescope.operators.taylor.line import check_options, finite_loss
from curvescope.problem import Problem
from curvescope.viz import slices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Normalize = Literal["orthonormal", "filters", "none"]
WORDS = {
    "orthonormal": "orthonormal: v without its part along u, both of length one",
    "filters": "filters with the lengths of θ's filters (Li et al. 2018), not orthogonalized",
    "none": "not normalized",
}
PARALLEL = 1e-6  # two directions are the same if the relative part of v outside u is below this


@dataclass(frozen=True)
class LossPlane(Tabular):
    """Losses at θ + a u + b v for the normalized u and v, and the quadratic prediction."""

    names: list[str]  # names of u and v
    normalize: str  # normalization of u and v
    a: np.ndarray  # (A,)
    b: np.ndarray  # (B,)
    loss: np.ndarray  # (A, B)
    here: float  # L(θ)
    slope: np.ndarray  # (2,) gᵀu, gᵀv
    curvature: np.ndarray  # (2, 2)
    lengths: np.ndarray  # (2,) ‖u‖, ‖v‖
    cosine: float  # cosine between u and v before normalization
    agreement: Agreement
    num_losses: int

    @property
    def quadratic(self) -> np.ndarray:
        """L + gᵀδ + ½ δᵀHδ with δ = a u + b v: (A, B)."""
        return self.quadratic_at(self.a, self.b)

    def quadratic_at(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Evaluate the quadratic on another grid, a (A,) and b (B,): (A, B)."""
        x, y = a[:, None], b[None]
        (uu, uv), (_, vv) = self.curvature
        linear = x * self.slope[0] + y * self.slope[1]
        return self.here + linear + (x * x * uu + 2 * x * y * uv + y * y * vv) / 2

    @property
    def terms(self) -> np.ndarray:
        """|gᵀδ| + ½ |δᵀHδ|, the scale of errors, (A, B); on a ray from θ the same as for a line."""
        a, b = self.a[:, None], self.b[None]
        linear = a * self.slope[0] + b * self.slope[1]
        return np.abs(linear) + np.abs(self.quadratic - self.here - linear)

    @property
    def verdicts(self) -> np.ndarray:
        """(A, B) at every point: 1 the quadratic holds, −1 it fails, 0 hidden by rounding."""
        return self.agreement.verdicts(self.loss - self.quadratic, self.terms, self.loss, self.here)

    def table(self) -> Any:
        """One row per point."""
        a, b = np.meshgrid(self.a, self.b, indexing="ij")
        return {
            "a": a.ravel(),
            "b": b.ravel(),
            "loss": self.loss.ravel(),
            "quadratic": self.quadratic.ravel(),
            "quadratic_error": (self.loss - self.quadratic).ravel(),
            "allowed": self.agreement.tolerance * self.terms.ravel(),
            "quadratic_holds": [VERDICTS[v] for v in self.verdicts.ravel().tolist()],
        }

    def plot(self, ax: Axes | None = None, names: Sequence[str] | None = None) -> Axes:
        """Plot the loss as colors, with contour lines of the loss and, dashed, of the quadratic."""
        a, b = (np.linspace(x.min(), x.max(), 121) for x in (self.a, self.b))
        fine = (a, b, self.quadratic_at(a, b))
        return slices.plane(ax, self.a, self.b, self.loss, fine, self.verdicts, names=names or self.names)


def loss_plane(
    problem: Problem,
    u: DirectionInput,
    v: DirectionInput,
    *blocks: Params,
    span: tuple[float, float] | None = None,
    num_points: int = 21,
    normalize: Normalize = "orthonormal",
    tolerance: float = 0.1,
    engine: EngineName = "auto",
    seed: int = 0,
) -> LossPlane:
    """The loss on the plane θ + a u + b v, with the quadratic L + gᵀδ + ½ δᵀHδ of the same points.

    The quadratic holds at a point if its error is at most `tolerance` (|gᵀδ| + ½ |δᵀHδ|); on a curve where
    both vanish, it holds only if it is exact.

    Args:
        u: First direction: a vector over the blocks, tensors by the names of parameters, "gradient" for −∇L,
            or "random".
        v: Second direction. Two random directions are different.
        blocks: Blocks that change; by default all trained parameters.
        span: Ends of the range of a and of b. By default, the terms of the expansion along u or v add up to
            |L(θ)| at the ends; (−1, 1) for filters.
        num_points: Number of points along each axis; its square is the number of forward passes.
        normalize: "orthonormal"; "filters" rescales every filter to the length of θ's filter (Li et al. 2018,
            arXiv 1712.09913, section 4); "none" takes u and v as they are.
        seed: Seed of random directions.
    """
    check_problem(problem)
    check_options(tolerance, num_points, span)
    if normalize not in get_args(Normalize):
        raise UsageError(f"expected normalize of {', '.join(get_args(Normalize))}, got {normalize!r}")
    first_direction = as_direction(problem, u, *blocks, seed=seed)
    second_direction = as_direction(problem, v, *blocks, seed=seed + 1)
    loss_at_theta, vectors = finite_loss(problem), [first_direction.vector, second_direction.vector]
    cosine = dot(*vectors) / math.sqrt(dot(vectors[0], vectors[0]) * dot(vectors[1], vectors[1]))
    used = _normalized(problem, vectors, blocks, normalize)
    U, g = torch.stack(used, dim=1), problem.gradient(*blocks)
    HU = Hessian(problem, *blocks, engine=engine) @ U
    slope = np.array([dot(g, x) for x in used])
    K = np.array([[dot(x, HU[:, j]) for j in (0, 1)] for x in used])
    K = (K + K.T) / 2
    space = problem.space(*blocks)
    trees = [space.scatter(x) for x in used]
    along = [Expansion(loss_at_theta, float(slope[i]), float(K[i, i]), math.nan) for i in (0, 1)]
    a, b = (_axis(e, loss_at_theta, span, num_points, normalize) for e in along)
    points = [(x, y) for x in a.tolist() for y in b.tolist()]
    losses = [
        loss_at_theta if x == y == 0 else displaced(problem, trees, [x, y]).loss_value()
        for x, y in track(points, "plane")
    ]
    return LossPlane(
        names=[first_direction.name, second_direction.name],
        normalize=WORDS[normalize],
        a=a,
        b=b,
        loss=np.array(losses).reshape(len(a), len(b)),
        here=loss_at_theta,
        slope=slope,
        curvature=K,
        lengths=np.array([math.sqrt(dot(x, x)) for x in used]),
        cosine=cosine,
        agreement=Agreement(float(tolerance), _rounding(problem, trees, along[0])),
        num_losses=len(losses),
    )


def _normalized(
    problem: Problem, vectors: list[Tensor], blocks: tuple[Any, ...], normalize: Normalize
) -> list[Tensor]:
    if normalize == "none":
        return vectors
    if normalize == "filters":
        return [filter_normalized(problem, x, *blocks) for x in vectors]
    u, v = (x.double() / math.sqrt(dot(x, x)) for x in vectors)
    remainder = v - (u @ v) * u
    remainder = remainder - (u @ remainder) * u
    if float(remainder.norm()) < PARALLEL:
        raise UsageError("expected two directions that span a plane, got two parallel ones")
    return [x.to(vectors[0].dtype) for x in (u, remainder / remainder.norm())]


def _axis(
    expansion: Expansion,
    loss_at_theta: float,
    span: tuple[float, float] | None,
    num_points: int,
    normalize: Normalize,
) -> np.ndarray:
    reach = 1.0 if normalize == "filters" else expansion.reach(abs(loss_at_theta) or 1.0)
    low, high = span or (-reach, reach)
    values = np.linspace(low, high, num_points)
    values[np.abs(values) < 1e-12 * (high - low)] = 0.0
    return values


def _rounding(problem: Problem, trees: list[dict[str, Tensor]], expansion: Expansion) -> float:
    """Measure the rounding of the loss along u."""
    loss_at_theta, eps = expansion.loss, rounding_of(problem.dtype)
    if not loss_at_theta:
        return 0.0
    reach = expansion.reach(math.sqrt(eps) * abs(loss_at_theta))
    return noise(lambda t: displaced(problem, trees[:1], [t]).loss_value(), reach, loss_at_theta, eps)

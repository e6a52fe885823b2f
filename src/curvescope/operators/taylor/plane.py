"""The loss on a plane through θ, beside the quadratic that derivatives at θ predict."""

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
    Given,
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
    "none": "as they were given",
}
PARALLEL = 1e-6  # what is left of v beside u, relative, below which they are one direction


@dataclass(frozen=True)
class LossPlane(Tabular):
    """Losses at θ + a u + b v for the u and v that were used, and the quadratic."""

    names: list[str]  # of u and v
    normalize: str  # what was done to them
    a: np.ndarray  # (A,)
    b: np.ndarray  # (B,)
    loss: np.ndarray  # (A, B)
    here: float  # L(θ)
    slope: np.ndarray  # (2,) gᵀu, gᵀv
    curvature: np.ndarray  # (2, 2)
    lengths: np.ndarray  # (2,) ‖u‖, ‖v‖
    cosine: float  # of the angle between u and v as they were given
    agreement: Agreement
    num_losses: int

    @property
    def quadratic(self) -> np.ndarray:
        """(A, B): L + gᵀδ + ½ δᵀHδ, δ = a u + b v."""
        return self.quadratic_at(self.a, self.b)

    def quadratic_at(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The same on another grid, a (A,) and b (B,): (A, B)."""
        x, y = a[:, None], b[None]
        (uu, uv), (_, vv) = self.curvature
        first = x * self.slope[0] + y * self.slope[1]
        return self.here + first + (x * x * uu + 2 * x * y * uv + y * y * vv) / 2

    @property
    def terms(self) -> np.ndarray:
        """(A, B): |gᵀδ| + ½ |δᵀHδ|, what an error is compared with; on a ray from θ that of a line."""
        a, b = self.a[:, None], self.b[None]
        first = a * self.slope[0] + b * self.slope[1]
        return np.abs(first) + np.abs(self.quadratic - self.here - first)

    @property
    def verdicts(self) -> np.ndarray:
        """(A, B): 1 where the quadratic holds, −1 where it fails, 0 where rounding hides it."""
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
        """The loss as colors, lines of equal height of the loss and, dashed, of the quadratic."""
        a, b = (np.linspace(x.min(), x.max(), 121) for x in (self.a, self.b))
        fine = (a, b, self.quadratic_at(a, b))
        return slices.plane(ax, self.a, self.b, self.loss, fine, self.verdicts, names=names or self.names)


def loss_plane(
    problem: Problem,
    u: Given,
    v: Given,
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
    both vanish it holds only where it is exact.

    Args:
        u: Directions, each a vector over the blocks, tensors by the names of parameters, "gradient" for −∇L
            or "random".
        v: The other one; the random numbers of two are different.
        blocks: What may move; by default all that varies.
        span: Ends of the range of a and of b. By default, for each of them, as far as the terms of the
            expansion along u or v add up to |L(θ)|, on both sides; (−1, 1) for filters.
        num_points: Along each axis; their square is the number of forward passes.
        normalize: "orthonormal"; "filters" rescales every filter to the length of θ's filter (Li et al. 2018,
            arXiv 1712.09913, section 4); "none" takes u and v as they are.
        seed: Of random directions.
    """
    check_problem(problem)
    check_options(tolerance, num_points, span)
    if normalize not in get_args(Normalize):
        raise UsageError(f"expected normalize of {', '.join(get_args(Normalize))}, got {normalize!r}")
    first = as_direction(problem, u, *blocks, seed=seed)
    second = as_direction(problem, v, *blocks, seed=seed + 1)
    here, given = finite_loss(problem), [first.vector, second.vector]
    cosine = dot(*given) / math.sqrt(dot(given[0], given[0]) * dot(given[1], given[1]))
    used = _used(problem, given, blocks, normalize)
    U, g = torch.stack(used, dim=1), problem.gradient(*blocks)
    HU = Hessian(problem, *blocks, engine=engine) @ U
    slope = np.array([dot(g, x) for x in used])
    K = np.array([[dot(x, HU[:, j]) for j in (0, 1)] for x in used])
    K = (K + K.T) / 2
    space = problem.space(*blocks)
    trees = [space.scatter(x) for x in used]
    along = [Expansion(here, float(slope[i]), float(K[i, i]), math.nan) for i in (0, 1)]
    a, b = (_axis(e, here, span, num_points, normalize) for e in along)
    points = [(x, y) for x in a.tolist() for y in b.tolist()]
    losses = [
        here if x == y == 0 else displaced(problem, trees, [x, y]).loss_value()
        for x, y in track(points, "plane")
    ]
    return LossPlane(
        names=[first.name, second.name],
        normalize=WORDS[normalize],
        a=a,
        b=b,
        loss=np.array(losses).reshape(len(a), len(b)),
        here=here,
        slope=slope,
        curvature=K,
        lengths=np.array([math.sqrt(dot(x, x)) for x in used]),
        cosine=cosine,
        agreement=Agreement(float(tolerance), _rounding(problem, trees, along[0])),
        num_losses=len(losses),
    )


def _used(
    problem: Problem, given: list[Tensor], blocks: tuple[Any, ...], normalize: Normalize
) -> list[Tensor]:
    if normalize == "none":
        return given
    if normalize == "filters":
        return [filter_normalized(problem, x, *blocks) for x in given]
    u, v = (x.double() / math.sqrt(dot(x, x)) for x in given)
    rest = v - (u @ v) * u
    rest = rest - (u @ rest) * u
    if float(rest.norm()) < PARALLEL:
        raise UsageError("expected two directions that span a plane, got the same one twice")
    return [x.to(given[0].dtype) for x in (u, rest / rest.norm())]


def _axis(
    expansion: Expansion,
    here: float,
    span: tuple[float, float] | None,
    num_points: int,
    normalize: Normalize,
) -> np.ndarray:
    reach = 1.0 if normalize == "filters" else expansion.reach(abs(here) or 1.0)
    low, high = span or (-reach, reach)
    values = np.linspace(low, high, num_points)
    values[np.abs(values) < 1e-12 * (high - low)] = 0.0
    return values


def _rounding(problem: Problem, trees: list[dict[str, Tensor]], expansion: Expansion) -> float:
    """Measured along u."""
    here, eps = expansion.loss, rounding_of(problem.dtype)
    if not here:
        return 0.0
    reach = expansion.reach(math.sqrt(eps) * abs(here))
    return noise(lambda t: displaced(problem, trees[:1], [t]).loss_value(), reach, here, eps)

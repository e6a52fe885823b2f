"""Newton's method in a trust region: conjugate gradients on exact products.

Steihaug (1983); Nocedal & Wright (2006), algorithms 4.1 and 7.2; with Gauss-Newton products Martens (2010).
"""

from __future__ import annotations

import math
from typing import Any, final, get_args

import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import norms
from curvescope.algorithms.systems.trust_region import TrustStep, trust_step
from curvescope.core.errors import UsageError
from curvescope.kernels.function_mode import PlainAttention
from curvescope.optim.base import CurvatureOptimizer, Params, check_settings
from curvescope.optim.objective import (
    Closure,
    Curvature,
    StepCurvature,
    StepObjective,
    flatten,
    parts_of,
    unflatten,
)

LOW, HIGH, SHRINK, GROW = 0.25, 0.75, 0.25, 2.0  # constants of Nocedal & Wright's algorithm 4.1
ACCEPT = 1e-4  # smallest share of the predicted decrease for which a step is accepted
ROUNDINGS = 10.0  # a predicted decrease below so many roundings of the loss is meaningless
REGION = "region"


@final
class NewtonCG(CurvatureOptimizer):
    """θ ← θ + lr · d, d = argmin of gᵀd + ½ dᵀBd over ‖d‖ ≤ Δ, B the Hessian or the GGN.

    The closure is called a second time, without a graph, at the new point: with the random numbers of the
    first call, so that both have the same dropout mask; batch norm counts only one of them. With ρ the
    decrease of the loss over the predicted one, the step is rejected if ρ ≤ 1e-4. Δ becomes ‖d‖/4 if ρ < 1/4,
    and 2Δ if ρ > 3/4 and d reached the boundary. Negative curvature is followed to the boundary.
    `opt.accepted` and `opt.ratio` describe the last step. Several rejected steps in a row mean that `radius`
    is far too large, or that the closure returns a different loss when it is called again.

    Cost of a step: 2 losses, 1 gradient, k ≤ max_products products; 8 vectors. All parameters share one
    region, so there is one parameter group, as in torch.optim.LBFGS.

    Args:
        params: Parameters, or one group of them.
        lr: Share of the step to take, 1 by default; schedulers may lower it.
        radius: Initial Δ, a bound on the norm of the first step; a fine-tuned model moves by less than 1, a
            random one by more.
        max_radius: Upper bound of Δ.
        curvature: "hessian", exact, or "ggn", whose closure returns (loss, outputs) or a problem.
        max_products: Most conjugate-gradient iterations per step; None is n.
        tolerance: Tolerance of ‖g + Bd‖/‖g‖; None is min(½, √‖g‖), which gives superlinear convergence.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        *,
        radius: float = 1.0,
        max_radius: float = 100.0,
        curvature: Curvature = "hessian",
        max_products: int | None = 20,
        tolerance: float | None = None,
    ):
        check_settings(above={"radius": radius, "max_radius": max_radius}, at_least={"lr": lr})
        if curvature not in get_args(Curvature):
            raise UsageError(f"expected curvature='hessian' or 'ggn', got {curvature!r}")
        if max_products is not None and max_products < 1:
            raise UsageError(f"expected max_products of at least 1, got {max_products!r}")
        settings = {
            "lr": lr, "radius": radius, "max_radius": max_radius, "curvature": curvature,
            "max_products": max_products, "tolerance": tolerance,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    state_names = frozenset[str]()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only group: all parameters share one trust region and one step."""
        if self.param_groups:
            raise UsageError("NewtonCG has one trust region for all parameters, so one parameter group")
        super().add_param_group(param_group)

    @property
    def radius(self) -> float:
        """Current Δ."""
        return float(self.shared_state(REGION).get("radius", self.shared_setting("radius")))

    @property
    def ratio(self) -> float | None:
        """ρ of the last step, −inf if the loss was not finite; None before the first."""
        return self.shared_state(REGION).get("ratio")

    @property
    def accepted(self) -> bool | None:
        """Return True if the last step was taken; None before the first."""
        return None if self.ratio is None else self.ratio > ACCEPT

    def _move(self, objective: StepObjective, closure: Closure) -> None:
        g = flatten(objective.gradient(curved=True))
        size = float(norms(g))
        tolerance = self.shared_setting("tolerance")
        trust = trust_step(
            StepCurvature(objective, self.shared_setting("curvature")),
            g,
            self.radius,
            tolerance=min(0.5, math.sqrt(size)) if tolerance is None else tolerance,
            num_products=self.shared_setting("max_products"),
        )
        if size == 0:
            return
        before = [p.clone() for p in objective.parameters]
        rate = float(self.shared_setting("lr"))
        for p, d in zip(objective.parameters, unflatten(trust.step, before), strict=True):
            p.add_(d, alpha=rate)
        ratio = self._ratio(float(objective.loss), self._loss(closure), predicted_change(trust, rate))
        if not ratio > ACCEPT:
            for p, old in zip(objective.parameters, before, strict=True):
                p.copy_(old)
        self._resize(ratio, trust)

    def _loss(self, closure: Closure) -> float:
        self.count("losses")
        with torch.no_grad(), PlainAttention():
            return float(parts_of(closure()).loss)

    def _ratio(self, before: float, after: float, change: float) -> float:
        """Return the decrease of the loss over the predicted one; 1 if rounding hides both."""
        if not math.isfinite(after):
            return -math.inf
        blur = ROUNDINGS * torch.finfo(self.param_groups[0]["params"][0].dtype).eps * max(abs(before), 1e-30)
        if abs(change) <= blur and abs(before - after) <= blur:
            return 1.0
        return (before - after) / -change if change < 0 else -math.inf

    def _resize(self, ratio: float, trust: TrustStep) -> None:
        radius = self.radius
        if ratio < LOW:
            radius = SHRINK * float(trust.step.norm())
        elif ratio > HIGH and trust.at_boundary:
            radius = min(GROW * radius, float(self.shared_setting("max_radius")))
        self.update_shared_state(REGION, radius=radius, ratio=ratio, end=trust.end)


def predicted_change(trust: TrustStep, rate: float | Tensor) -> float:
    """q(rate · d) = rate gᵀd + ½ rate² dᵀBd."""
    along = trust.change - trust.curvature / 2
    return float(rate * along + rate**2 * trust.curvature / 2)

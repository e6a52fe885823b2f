"""Gradient descent with a learning rate set by the curvature: η = c / λ_max.

On a quadratic the error along an eigenvector of λ shrinks by 1 − cλ/λ_max in every step, for any scale of the
loss; it is stable for c < 2. Networks trained at a fixed η find λ_max ≈ 2/η by themselves (Cohen et al.,
2021); here λ_max is measured, and η follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.optim.base import CurvatureOptimizer, Params, check_settings
from curvescope.optim.curvature_tracking import check_counts, fresh_vector, pursue
from curvescope.optim.objective import Closure, StepCurvature, StepObjective, flatten, unflatten

SHARPNESS, TOP = "sharpness", "top"


@final
class SharpnessGD(CurvatureOptimizer):
    """θ ← θ − (lr / |λ|) g, λ the eigenvalue of the Hessian of largest magnitude.

    λ comes from a few products with the batch's Hessian, in the span of the last direction, the gradient and
    a random vector (`optim.curvature_tracking`). It is at most the true |λ|; `opt.sharpness` is the current
    value.

    Cost of a step: 1 loss, 1 gradient, and at every `every`-th step `num_products` products, `first_products`
    at the first; if |λ| falls below 0.7 of the last, `first_products` more. Memory: two vectors per product
    during a measurement, and one that is stored. Groups may have their own lr.

    Args:
        params: Parameters or groups.
        lr: c, of which 2 is the bound on a quadratic.
        every: Steps between measurements of λ.
        num_products: Products per λ, at least 2.
        first_products: Products for the first λ, which has no known direction.
        seed: Seed of the random vectors.
    """

    state_names = frozenset({TOP})

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        *,
        every: int = 1,
        num_products: int = 3,
        first_products: int = 10,
        seed: int = 0,
    ):
        check_settings(at_least={"lr": lr})
        check_counts(every, num_products, first_products)
        settings = {
            "lr": lr, "every": every, "num_products": num_products,
            "first_products": first_products, "seed": seed,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    @property
    def sharpness(self) -> float | None:
        """Last measured |λ|."""
        return self.shared_state(SHARPNESS).get("value")

    def _move(self, objective: StepObjective, closure: Closure) -> None:
        curved = self.steps % self.shared_setting("every") == 0 or self.sharpness is None
        g = objective.gradient(curved=curved)
        if curved:
            self._measure(objective, flatten(g))
        assert self.sharpness is not None
        groups = self.groups_of(objective.parameters)
        for p, group, slope in zip(objective.parameters, groups, g, strict=True):
            p.sub_(slope * (float(group["lr"]) / self.sharpness))

    def _measure(self, objective: StepObjective, g: Tensor) -> None:
        parameters, last = objective.parameters, self.sharpness
        value, top = pursue(
            StepCurvature(objective),
            None if last is None else self._known(parameters),
            fresh_vector(g, seed=self.shared_setting("seed"), draw=self.steps),
            last=last or 0.0,
            num_products=self.shared_setting("num_products"),
            first_products=self.shared_setting("first_products"),
        )
        if not value:
            raise CurvescopeError(
                "the curvature of the loss is zero, so no learning rate can be derived",
                hint="use torch.optim.SGD",
            )
        for p, part in zip(parameters, unflatten(top, parameters), strict=True):
            self.state[p][TOP] = part.clone()
        self.update_shared_state(SHARPNESS, value=value)

    def _known(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Return the last direction, zero for new parameters; None if it is zero everywhere."""
        direction = flatten([self.state[p].get(TOP, torch.zeros_like(p)) for p in parameters])
        return direction if bool(direction.any()) else None

"""Gradient descent at a rate that the curvature sets: η = c / λ_max.

On a quadratic the error along an eigenvector of λ shrinks by 1 − cλ/λ_max in every step, for any scale of the
loss; it is stable for c < 2. Networks trained at a fixed η find λ_max ≈ 2/η by themselves (Cohen et al.,
2021); here λ_max is measured, and η follows it.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.seeds import probes
from curvescope.optim.base import CurvatureOptimizer, Params, check_settings
from curvescope.optim.following import follow
from curvescope.optim.objective import Closure, Objective, StepCurvature, flatten, unflatten

SHARPNESS, TOP = "sharpness", "top"


@final
class SharpnessGD(CurvatureOptimizer):
    """θ ← θ − (lr / |λ|) g, λ the eigenvalue of the Hessian of largest magnitude.

    λ comes from a few Lanczos steps on the batch's loss, from a random vector at first and then from the
    eigenvector found last. It is a Ritz value, at most the true |λ|; `opt.sharpness` is the one of now.

    Cost of a step: 1 loss, 1 gradient, and at every `every`-th step `num_products` products, `first_products`
    at the first; as many vectors, and one that is kept. Groups may have an lr each.

    Args:
        params: Parameters or groups.
        lr: c, of which 2 is the bound on a quadratic.
        every: Steps from one λ to the next.
        num_products: For one λ.
        first_products: For the first, which begins at random.
        seed: Of the random vector.
    """

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
        if min(every, num_products, first_products) < 1:
            raise UsageError("expected every, num_products and first_products of at least 1")
        settings = {
            "lr": lr, "every": every, "num_products": num_products,
            "first_products": first_products, "seed": seed,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    @property
    def sharpness(self) -> float | None:
        """|λ| as it was last measured."""
        return self.whole(SHARPNESS).get("value")

    def _move(self, objective: Objective, closure: Closure) -> None:
        curved = self.steps % self.one("every") == 0 or self.sharpness is None
        g = objective.gradient(curved=curved)
        if curved:
            self._measure(objective)
        assert self.sharpness is not None
        for p, group, slope in zip(objective.parameters, self.trained_groups(), g, strict=True):
            p.sub_(slope * (float(group["lr"]) / self.sharpness))

    def _measure(self, objective: Objective) -> None:
        parameters = objective.parameters
        op = StepCurvature(objective)
        begun = self.sharpness is not None and all(TOP in self.state[p] for p in parameters)
        start = flatten([self.state[p][TOP] for p in parameters]) if begun else self._random(op)
        value, top = follow(op, start, self.one("num_products" if begun else "first_products"))
        if not value:
            raise CurvescopeError(
                "the loss has no curvature here, which a rate could be taken from", hint="use torch.optim.SGD"
            )
        for p, part in zip(parameters, unflatten(top, parameters), strict=True):
            self.state[p][TOP] = part.clone()
        self.put(SHARPNESS, value=abs(value))

    def _random(self, op: StepCurvature) -> Tensor:
        drawn = probes(op.shape[0], 1, seed=self.one("seed"), kind="gaussian", dtype=op.dtype)
        return drawn[:, 0].to(op.device)

"""Gradient descent with a learning rate for every block, from the curvature of that block.

With λ_b the largest curvature of the block H_bb, η_b = lr / λ_b. If H is block-diagonal every block converges
as if it were alone. In general, and for a positive semi-definite H, D^(−½) H D^(−½) with D = diag(λ_b) has
eigenvalues of at most the number of blocks B (‖Σ_b x_b‖² ≤ B Σ ‖x_b‖²), so that descent on a quadratic is
stable for lr < 2/B, and for lr < 2 where blocks do not interact.
"""

from __future__ import annotations

from typing import final

from torch import Tensor

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.seeds import probes
from curvescope.optim.base import CurvatureOptimizer, Params, check_settings
from curvescope.optim.following import follow
from curvescope.optim.objective import Closure, Objective, StepCurvature, unflatten

TOP, CURVATURE, MOMENTUM = "top", "curvature", "momentum"


@final
class BlockSGD(CurvatureOptimizer):
    """θ_b ← θ_b − (lr / |λ_b|) m_b, m_b = momentum · m_b + g_b; a block is one parameter tensor.

    λ_b, the eigenvalue of the block's Hessian of largest magnitude, is followed as in `SharpnessGD`. It
    counts as at least `floor` times the largest of all blocks, so that rates lie within 1/floor of each
    other.

    Cost of a step: 1 loss, 1 gradient, and at every `every`-th step `num_products` products for each block,
    each with the derivatives of that block alone; two vectors that are kept, one more with momentum.

    Args:
        params: Parameters or groups; groups may have an lr and a momentum each.
        lr: c of η_b = c/λ_b.
        momentum: Of gradients, as in torch.optim.SGD.
        every: Steps from one measurement to the next.
        num_products: For one λ_b.
        first_products: For the first, which begins at random.
        floor: The least λ_b over the largest.
        seed: Of the random vectors.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 0.1,
        *,
        momentum: float = 0.0,
        every: int = 10,
        num_products: int = 2,
        first_products: int = 5,
        floor: float = 1e-2,
        seed: int = 0,
    ):
        check_settings(above={"floor": floor}, at_least={"lr": lr, "momentum": momentum})
        if min(every, num_products, first_products) < 1:
            raise UsageError("expected every, num_products and first_products of at least 1")
        settings = {
            "lr": lr, "momentum": momentum, "every": every, "num_products": num_products,
            "first_products": first_products, "floor": floor, "seed": seed,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    def curvatures(self) -> list[float]:
        """|λ_b| of every block that is trained, as it was last measured; none before the first step."""
        states = [self.state[p] for p in self.trained() if p in self.state]
        return [state[CURVATURE] for state in states if CURVATURE in state]

    def _move(self, objective: Objective, closure: Closure) -> None:
        parameters = objective.parameters
        known = len(self.curvatures()) == len(parameters)
        curved = self.steps % self.one("every") == 0 or not known
        gradient = objective.gradient(curved=curved)
        if curved:
            for i, p in enumerate(parameters):
                self._measure(objective, i, p)
        largest = max(self.curvatures())
        if not self.one("floor") * largest > 0:
            raise CurvescopeError(
                "no block has curvature here, which a rate could be taken from", hint="use torch.optim.SGD"
            )
        for p, group, g in zip(parameters, self.trained_groups(), gradient, strict=True):
            state, beta = self.state[p], float(group["momentum"])
            if beta:
                g = state[MOMENTUM] = g + beta * state[MOMENTUM] if MOMENTUM in state else g.clone()
            p.sub_(g * (float(group["lr"]) / max(state[CURVATURE], self.one("floor") * largest)))

    def _measure(self, objective: Objective, i: int, p: Tensor) -> None:
        op, state = StepCurvature(objective, block=i), self.state[p]
        begun = TOP in state
        start = state[TOP].reshape(-1) if begun else self._random(op, i)
        value, top = follow(op, start, self.one("num_products" if begun else "first_products"))
        state[CURVATURE], state[TOP] = abs(value), unflatten(top, [p])[0].clone()

    def _random(self, op: StepCurvature, i: int) -> Tensor:
        options = {"seed": self.one("seed"), "first": i, "dtype": op.dtype}
        return probes(op.shape[0], 1, kind="gaussian", **options)[:, 0].to(op.device)

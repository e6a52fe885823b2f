"""Gradient descent with a learning rate for every block, from the curvature of that block.

With λ_b the largest curvature of the block H_bb, η_b = lr / λ_b. If H is block-diagonal every block converges
as if it were alone. In general, and for a positive semi-definite H, D^(−½) H D^(−½) with D = diag(λ_b) has
eigenvalues of at most the number of blocks B (‖Σ_b x_b‖² ≤ B Σ ‖x_b‖²), so that descent on a quadratic is
stable for lr < 2/B, and for lr < 2 where blocks do not interact.

All blocks can be measured together. For unit vectors v_b and random signs s_b, with s ⊙ v the vector of all
s_b v_b,

    s_b (H (s ⊙ v))_b = H_bb v_b + Σ_{c≠b} s_b s_c H_bc v_c,

whose mean over signs is H_bb v_b. One product serves every block, for a noise from those beside the diagonal.
"""

from __future__ import annotations

from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from curvescope.algorithms.vectors import check_finite
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.seeds import probes
from curvescope.optim.base import CurvatureOptimizer, Params, check_settings
from curvescope.optim.following import follow
from curvescope.optim.objective import Closure, Objective, StepCurvature, unflatten

TOP, CURVATURE, MOMENTUM = "top", "curvature", "momentum"
Measure = Literal["apart", "together"]
KEPT = 0.5  # of λ_b v_b, as a product joins it


@final
class BlockSGD(CurvatureOptimizer):
    """θ_b ← θ_b − (lr / |λ_b|) m_b, m_b = momentum · m_b + g_b; a block is one parameter tensor.

    λ_b is the eigenvalue of the block's Hessian of largest magnitude. `measure="apart"` follows each as in
    `SharpnessGD`. "together" keeps λ_b v_b as a running mean of products with random signs (above), each
    turned to v_b: power iterations of all blocks at once. They are exact in the end where blocks do not
    interact; where they do, noise makes |λ_b| too large rather than too small. |λ_b| counts as at least
    `floor` times the largest of all blocks, so that rates lie within 1/floor of each other.

    Cost of a step: 1 loss, 1 gradient, and at every `every`-th step `num_products` products: for each block,
    with the derivatives of that block alone ("apart"), or of the whole Hessian, however many blocks there are
    ("together"). One vector is kept, one more with momentum.

    Args:
        params: Parameters or groups; groups may have an lr and a momentum each.
        lr: c of η_b = c/λ_b.
        momentum: Of gradients, as in torch.optim.SGD.
        every: Steps from one measurement to the next.
        num_products: For one λ_b.
        first_products: For the first, which begins at random.
        floor: The least λ_b over the largest.
        measure: Blocks "apart" or "together".
        seed: Of the random vectors and signs.
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
        measure: Measure = "apart",
        seed: int = 0,
    ):
        check_settings(above={"floor": floor}, at_least={"lr": lr, "momentum": momentum})
        if min(every, num_products, first_products) < 1:
            raise UsageError("expected every, num_products and first_products of at least 1")
        if measure not in get_args(Measure):
            raise UsageError(f"expected measure='apart' or 'together', got {measure!r}")
        settings = {
            "lr": lr, "momentum": momentum, "every": every, "num_products": num_products,
            "first_products": first_products, "floor": floor, "measure": measure, "seed": seed,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a state that was saved without `measure`, too."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("measure", "apart")

    def curvatures(self) -> list[float]:
        """|λ_b| of every block that is trained, as it was last measured; none before the first step."""
        states = [self.state[p] for p in self.trained() if p in self.state]
        return [state[CURVATURE] for state in states if CURVATURE in state]

    def _move(self, objective: Objective, closure: Closure) -> None:
        parameters = objective.parameters
        known = len(self.curvatures()) == len(parameters)
        curved = self.steps % self.one("every") == 0 or not known
        gradient = objective.gradient(curved=curved)
        if curved and self.one("measure") == "together":
            for _ in range(self.one("num_products" if known else "first_products")):
                self._measure_together(objective)
        elif curved:
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

    def _measure_together(self, objective: Objective) -> None:
        """One product with random signs, for every block."""
        parameters = objective.parameters
        for i, p in enumerate(parameters):
            if TOP not in self.state[p]:
                start = self._random(StepCurvature(objective, block=i), i).view_as(p)
                self.state[p][TOP] = start / start.norm()
        tops = [self.state[p][TOP] for p in parameters]
        column = len(parameters) + self.work["products"]  # behind those of the random vectors
        drawn = probes(len(parameters), 1, seed=self.one("seed"), first=column)[:, 0]
        images = signed_product(objective, tops, drawn.to(tops[0]))
        check_finite(float(sum(image.sum() for image in images)))
        for p, v, image in zip(parameters, tops, images, strict=True):
            state, turned = self.state[p], torch.where((image * v).sum() < 0, -image, image)
            known = CURVATURE in state
            mean = KEPT * state[CURVATURE] * v + (1 - KEPT) * turned if known else turned
            state[CURVATURE] = float(mean.norm())
            if state[CURVATURE]:
                state[TOP] = mean / mean.norm()

    def _random(self, op: StepCurvature, i: int) -> Tensor:
        options = {"seed": self.one("seed"), "first": i, "dtype": op.dtype}
        return probes(op.shape[0], 1, kind="gaussian", **options)[:, 0].to(op.device)


def signed_product(objective: Objective, vectors: list[Tensor], signs: Tensor) -> list[Tensor]:
    """s_b (H (s ⊙ v))_b for every block b, by one product of the whole Hessian."""
    images = objective.product([s * v for s, v in zip(signs, vectors, strict=True)])
    return [s * image for s, image in zip(signs, images, strict=True)]

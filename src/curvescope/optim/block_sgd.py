"""Gradient descent with a learning rate for every block, from the curvature of that block.

With λ_b the largest curvature of the block H_bb, η_b = lr / λ_b. If H is block-diagonal every block converges
as if it were alone. In general, and for a positive semi-definite H, D^(−½) H D^(−½) with D = diag(λ_b) has
eigenvalues of at most the number of blocks B (‖Σ_b x_b‖² ≤ B Σ ‖x_b‖²), so that descent on a quadratic is
stable for lr < 2/B, and for lr < 2 if blocks do not interact.

All blocks can be measured together. For unit vectors v_b and random signs s_b, with s ⊙ v the vector of all
s_b v_b,

    s_b (H (s ⊙ v))_b = H_bb v_b + Σ_{c≠b} s_b s_c H_bc v_c,

whose mean over signs is H_bb v_b. One product serves every block, with noise from the off-diagonal blocks.
The direction of largest curvature may be orthogonal to all H_bbᵏ v_b. So the last product of a measurement
uses other vectors f_b, and a block with |f_bᵀ H_bb f_b| > |v_bᵀ H_bb v_b| continues from f_b.
"""

from __future__ import annotations

from typing import Any, Literal, final, get_args

from torch import Tensor

from curvescope.algorithms.vectors import check_finite
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.seeds import probes
from curvescope.optim.base import CurvatureOptimizer, Params, check_settings
from curvescope.optim.curvature_tracking import MIN_PRODUCTS, check_counts, fresh_vector, pursue
from curvescope.optim.objective import Closure, StepCurvature, StepObjective

TOP, CURVATURE, MOMENTUM = "top", "curvature", "momentum"
Measure = Literal["apart", "together"]
DECAY = 0.5  # decay of λ_b v_b when a product is added


@final
class BlockSGD(CurvatureOptimizer):
    """θ_b ← θ_b − (lr / |λ_b|) m_b, m_b = momentum · m_b + g_b; a block is one parameter tensor.

    λ_b is the eigenvalue of the block's Hessian of largest magnitude. `measure="apart"` follows each as in
    `SharpnessGD`. "together" keeps λ_b v_b as a running mean of products with random signs (above), each with
    the sign that aligns it with v_b: power iterations of all blocks at once. They converge to the exact value
    if blocks do not interact; otherwise noise makes |λ_b| too large rather than too small. |λ_b| is at least
    `floor` times the largest of all blocks, so that rates differ by at most a factor 1/floor.

    Cost of a step: 1 loss, 1 gradient, and at every `every`-th step `num_products` products: per block, with
    the derivatives of that block only ("apart"; `first_products` more if its |λ_b| falls below 0.7 of the
    last), or of the full Hessian for all blocks together ("together"). It stores one vector, and one more
    with momentum.

    Args:
        params: Parameters or groups; groups may have an lr and a momentum each.
        lr: c of η_b = c/λ_b.
        momentum: Momentum of gradients, as in torch.optim.SGD.
        every: Steps between measurements.
        num_products: Products per λ_b, at least 2.
        first_products: Products for the first λ_b, which has no known direction.
        floor: Smallest λ_b relative to the largest.
        measure: Blocks "apart" or "together".
        seed: Seed of the random vectors and signs.
    """

    state_names = frozenset({TOP, CURVATURE, MOMENTUM})
    added = frozenset({"measure"})

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
        if measure not in get_args(Measure):
            raise UsageError(f"expected measure='apart' or 'together', got {measure!r}")
        check_counts(every, num_products, first_products)
        settings = {
            "lr": lr, "momentum": momentum, "every": every, "num_products": num_products,
            "first_products": first_products, "floor": floor, "measure": measure, "seed": seed,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, also one that was saved without `measure`."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("measure", "apart")

    def curvatures(self) -> list[float]:
        """Return the last measured |λ_b| of every trained block; empty before the first step."""
        states = [self.state[p] for p in self.trained() if p in self.state]
        return [state[CURVATURE] for state in states if CURVATURE in state]

    def _move(self, objective: StepObjective, closure: Closure) -> None:
        parameters = objective.parameters
        known = all(CURVATURE in self.state[p] for p in parameters)
        curved = self.steps % self.shared_setting("every") == 0 or not known
        gradient = objective.gradient(curved=curved)
        if curved and self.shared_setting("measure") == "together":
            self._measure_together(objective, gradient)
        elif curved:
            for i, g in enumerate(gradient):
                self._measure(objective, i, g)
        largest = max(self.state[p][CURVATURE] for p in parameters)
        if not self.shared_setting("floor") * largest > 0:
            raise _flat_error()
        for p, group, g in zip(parameters, self.groups_of(parameters), gradient, strict=True):
            state = self.state[p]
            if beta := float(group["momentum"]):
                g = state[MOMENTUM] = g + beta * state[MOMENTUM] if MOMENTUM in state else g.clone()
            p.sub_(g * (float(group["lr"]) / max(state[CURVATURE], self.shared_setting("floor") * largest)))

    def _measure(self, objective: StepObjective, i: int, g: Tensor) -> None:
        p = objective.parameters[i]
        state = self.state[p]
        state[CURVATURE], top = pursue(
            StepCurvature(objective, block=i),
            state[TOP].reshape(-1) if TOP in state else None,
            self._fresh(g, self.steps * len(objective.parameters) + i),
            last=state.get(CURVATURE, 0.0),
            num_products=self.shared_setting("num_products"),
            first_products=self.shared_setting("first_products"),
        )
        state[TOP] = top.view_as(p).clone()

    def _measure_together(self, objective: StepObjective, gradient: list[Tensor]) -> None:
        """Measure all blocks together: products along v_b, the last one along f_b."""
        parameters, first_draw = objective.parameters, self.steps * len(gradient)
        vectors = [self._fresh(g, first_draw + i).view_as(g) for i, g in enumerate(gradient)]
        fresh = [f / f.norm() for f in vectors]
        begun = all(TOP in self.state[p] for p in parameters)
        for p, f in zip(parameters, fresh, strict=True):
            self.state[p].setdefault(TOP, f)
        along = []
        for _ in range(
            max(self.shared_setting("num_products"), MIN_PRODUCTS) - 1
            if begun
            else self.shared_setting("first_products")
        ):
            along = self._power(objective)
        if begun:
            self._follow_fresh_direction(objective, fresh, along)

    def _power(self, objective: StepObjective) -> list[float]:
        """|v_bᵀ H_bb v_b| with noise, and update the running mean λ_b v_b."""
        tops = [self.state[p][TOP] for p in objective.parameters]
        images, along = self._images(objective, tops), []
        for p, v, image in zip(objective.parameters, tops, images, strict=True):
            state, bent = self.state[p], float((image * v).sum())
            along.append(abs(bent))
            mean = -image if bent < 0 else image
            if CURVATURE in state:
                mean = DECAY * state[CURVATURE] * v + (1 - DECAY) * mean
            self._keep(p, mean)
        return along

    def _follow_fresh_direction(
        self, objective: StepObjective, fresh: list[Tensor], along: list[float]
    ) -> None:
        """Continue from H_bb f_b in blocks with more curvature along f_b than along v_b."""
        images = self._images(objective, fresh)
        for p, f, image, bent in zip(objective.parameters, fresh, images, along, strict=True):
            if abs(float((image * f).sum())) > bent:
                self._keep(p, image)
        if not any(along) and not any(bool(image.any()) for image in images):
            raise _flat_error()

    def _images(self, objective: StepObjective, vectors: list[Tensor]) -> list[Tensor]:
        draw = -1 - self.work["products"]  # different from the draws of random vectors
        signs = probes(len(vectors), 1, seed=self.shared_setting("seed"), first=draw)[:, 0]
        images = signed_product(objective, vectors, signs.to(vectors[0]))
        check_finite(float(sum(image.sum() for image in images)))
        return images

    def _keep(self, p: Tensor, image: Tensor) -> None:
        """Store λ_b v_b for a block."""
        size = float(image.norm())
        self.state[p][CURVATURE] = size
        if size:
            self.state[p][TOP] = image / size

    def _fresh(self, g: Tensor, draw: int) -> Tensor:
        return fresh_vector(g.reshape(-1), seed=self.shared_setting("seed"), draw=draw)


def _flat_error() -> CurvescopeError:
    return CurvescopeError(
        "all block curvatures are zero, so no learning rate can be derived", hint="use torch.optim.SGD"
    )


def signed_product(objective: StepObjective, vectors: list[Tensor], signs: Tensor) -> list[Tensor]:
    """s_b (H (s ⊙ v))_b for every block b, by one product of the whole Hessian."""
    images = objective.product([s * v for s, v in zip(signs, vectors, strict=True)])
    return [s * image for s, image in zip(signs, images, strict=True)]

"""Adam with the Hessian's diagonal instead of the squared gradient: after AdaHessian (Yao et al., 2021)."""

from __future__ import annotations

from typing import final

from curvescope.core.errors import UsageError
from curvescope.optim.base import CurvatureOptimizer, Params, check_betas, check_settings, diagonal_of
from curvescope.optim.objective import Closure, StepObjective

MEAN, SQUARE, MEASURED = "mean", "square", "measured"


@final
class HutchinsonAdam(CurvatureOptimizer):
    """θ ← θ − lr · m̂ / (v̂^(power/2) + eps), m a running mean of g and v one of D², D = z ⊙ (H z).

    Hats are divided by 1 − βᵗ, as in Adam. With several probes D is their mean. The mean of D² over random
    signs z is the squared norm of a row of H, Σ_j H_ij², and not H_ii² unless H is diagonal.

    It differs from the published algorithm in the averages of D: AdaHessian takes means of |D| within
    convolution kernels and, for matrices, over blocks of neighbors; here every entry has its own value.
    Weight decay is decoupled, as in AdamW.

    Cost of a step: 1 loss, 1 gradient, and at every `every`-th step `num_probes` products; it stores two
    vectors. Groups may have their own settings, except `every`, `num_probes` and `seed`.

    Args:
        params: Parameters or groups.
        lr: 0.15 in the paper, which suits random weights but harms trained ones: the loss of the bundled
            tiny-gpt goes from 3.7 to 24 in one step of 0.15, and to 3.4 in ten of 0.005.
        betas: Decay of the means of g and of D².
        eps: Added to the root.
        weight_decay: Decoupled weight decay.
        power: 1 in the paper; 0 is gradient descent with momentum.
        every: Steps between estimates of D.
        num_probes: Vectors z per D.
        seed: Seed of the signs.
    """

    state_names = frozenset({MEAN, SQUARE, MEASURED, "step"})

    def __init__(
        self,
        params: Params,
        lr: float = 0.015,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        power: float = 1.0,
        every: int = 1,
        num_probes: int = 1,
        seed: int = 0,
    ):
        check_settings(at_least={"lr": lr, "eps": eps, "weight_decay": weight_decay, "power": power})
        check_betas(betas)
        if min(every, num_probes) < 1:
            raise UsageError("expected every and num_probes of at least 1")
        settings = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "power": power,
            "every": every, "num_probes": num_probes, "seed": seed,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    def _move(self, objective: StepObjective, closure: Closure) -> None:
        parameters, groups = objective.parameters, self.groups_of(objective.parameters)
        curved = self.steps % self.shared_setting("every") == 0 or any(
            SQUARE not in self.state[p] for p in parameters
        )
        gradient = objective.gradient(curved=curved)
        if curved:
            options = {
                "num_probes": self.shared_setting("num_probes"),
                "seed": self.shared_setting("seed"),
                "step": self.steps,
            }
            diagonal = diagonal_of(objective, "hutchinson", **options)
            for p, group, D in zip(parameters, groups, diagonal, strict=True):
                state, beta = self.state[p], group["betas"][1]
                old = state[SQUARE] if SQUARE in state else D.new_zeros(D.shape)
                state[SQUARE] = beta * old + (1 - beta) * D.square()
                state[MEASURED] = state.get(MEASURED, 0) + 1
        for p, group, g in zip(parameters, groups, gradient, strict=True):
            state, (beta, other) = self.state[p], group["betas"]
            state["step"] = state.get("step", 0) + 1
            state[MEAN] = beta * state[MEAN] + (1 - beta) * g if MEAN in state else (1 - beta) * g
            mean = state[MEAN] / (1 - beta ** state["step"])
            square = state[SQUARE] / (1 - other ** state[MEASURED])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(mean / (square ** (group["power"] / 2) + group["eps"]) * group["lr"])

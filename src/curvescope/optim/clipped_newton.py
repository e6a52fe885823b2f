"""Diagonal Newton steps, clipped per entry: after Sophia (Liu et al., 2024)."""

from __future__ import annotations

from typing import final, get_args

from curvescope.core.errors import UsageError
from curvescope.optim.base import (
    CurvatureOptimizer,
    Estimate,
    Params,
    check_betas,
    check_settings,
    diagonal_of,
)
from curvescope.optim.objective import Closure, StepObjective

MEAN, DIAGONAL = "mean", "diagonal"


@final
class ClippedNewton(CurvatureOptimizer):
    """θ ← θ − lr · clip(m / max(scale · h, eps), ±1), m a running mean of g and h one of a diagonal of
    curvature.

    No entry moves by more than lr; an entry with h ≤ 0 moves by lr against the sign of m.

    It is algorithm 3 of the paper, with h of `estimate`: "hutchinson" is Sophia-H and "bartlett" Sophia-G,
    for which the closure returns a `cs.Problem`; "ggn" estimates what "bartlett" does, from products and for
    every convex loss. It differs from the paper in two ways: the running mean h starts at the first estimate
    instead of zero, and the estimate uses the batch of the step. The mean of g starts at zero, as in the
    paper.

    Cost of a step: 1 loss, 1 gradient, and at every `every`-th step `num_probes` products ("bartlett": as
    many gradients); it stores two vectors. Groups may have their own settings, except `estimate`, `every`,
    `num_probes` and `seed`.

    Args:
        params: Parameters or groups.
        lr: Largest change of an entry in a step.
        betas: Decay of the means of g and of the diagonal.
        scale: γ; the smaller, the more entries are clipped. 0.01 for Sophia-H, 0.05 for Sophia-G in the
            paper.
        eps: Smallest curvature.
        weight_decay: Decoupled weight decay, as in AdamW.
        estimate: Estimate of the diagonal: "hutchinson", "ggn" or "bartlett".
        every: Steps between estimates.
        num_probes: Draws per estimate.
        seed: Seed of the draws.
    """

    state_names = frozenset({MEAN, DIAGONAL})

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.96, 0.99),
        scale: float = 0.01,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        estimate: Estimate = "hutchinson",
        every: int = 10,
        num_probes: int = 1,
        seed: int = 0,
    ):
        check_settings(above={"scale": scale, "eps": eps}, at_least={"lr": lr, "weight_decay": weight_decay})
        check_betas(betas)
        if min(every, num_probes) < 1:
            raise UsageError("expected every and num_probes of at least 1")
        if estimate not in get_args(Estimate):
            raise UsageError(f"expected estimate='hutchinson', 'ggn' or 'bartlett', got {estimate!r}")
        settings = {
            "lr": lr, "betas": betas, "scale": scale, "eps": eps, "weight_decay": weight_decay,
            "estimate": estimate, "every": every, "num_probes": num_probes, "seed": seed,
        }  # fmt: skip
        super().__init__(params, settings)  # pyright: ignore[reportArgumentType]

    def _move(self, objective: StepObjective, closure: Closure) -> None:
        parameters, groups = objective.parameters, self.groups_of(objective.parameters)
        curved = self.steps % self.shared_setting("every") == 0 or any(
            DIAGONAL not in self.state[p] for p in parameters
        )
        gradient = objective.gradient(curved=curved)
        if curved:
            options = {
                "num_probes": self.shared_setting("num_probes"),
                "seed": self.shared_setting("seed"),
                "step": self.steps,
            }
            estimate = diagonal_of(objective, self.shared_setting("estimate"), **options)
            for p, group, h in zip(parameters, groups, estimate, strict=True):
                state, beta = self.state[p], group["betas"][1]
                state[DIAGONAL] = beta * state[DIAGONAL] + (1 - beta) * h if DIAGONAL in state else h
        for p, group, g in zip(parameters, groups, gradient, strict=True):
            state, beta = self.state[p], group["betas"][0]
            state[MEAN] = beta * state[MEAN] + (1 - beta) * g if MEAN in state else (1 - beta) * g
            least = (group["scale"] * state[DIAGONAL]).clamp_min(group["eps"])
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_((state[MEAN] / least).clamp(-1, 1) * group["lr"])

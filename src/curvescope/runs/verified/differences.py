"""Finite differences along a direction: of gradients, and of outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.models.running.held import RefuseHeld
from curvescope.problem import Problem, differentiating
from curvescope.runs.verified.plain import loss_curvature
from curvescope.runs.verified.rounding import norm


def slope(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> Tensor:
    """(∇L(θ + hv) − ∇L(θ − hv)) / 2h in float64."""
    own = space.in_blocks()
    names = [block.name for block in own]
    up, down = (end.gradient(*names).double() for end in _ends(problem, space, v, h))
    return own.convert((up - down) / (2 * h), space)


def outer_form(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> float:
    """(1/N) Σ ⟨Jv, M Jv⟩ with Jv = (z(θ + hv) − z(θ − hv)) / 2h and M of the outputs between the two."""
    ends, total = _ends(problem, space, v, h), 0.0
    for batch in problem.placed_batches("verification"):
        z = []
        for end in ends:
            with (
                differentiating(),
                torch.no_grad(),
                RefuseHeld(dict(end.model.named_parameters()), end.point),
            ):
                z.append(end.outputs(batch))
        up, down = z
        moved = (up - down) / (2 * h)
        bent = loss_curvature(problem, batch, (up + down) / 2, moved)
        total += float((moved.double() * bent.double()).sum())
    return total / problem.num_terms


def _ends(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> list[Problem]:
    tree, own = space.scatter(v), dict(problem.named_parameters())
    return [
        problem.at({name: (own[name] + sign * h * t).detach() for name, t in tree.items()})
        for sign in (1, -1)
    ]


def typical(problem: Problem, space: ParamSpace) -> float:
    """The root mean square of the parameters of a space; 1 where all are zero."""
    theta = space.gather({name: problem.get_parameter(name).detach() for name in space.parameter_names})
    return norm(theta) / max(problem.model.size_of(*space), 1) ** 0.5 or 1.0

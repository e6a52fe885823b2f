"""Descent on a quadratic with a fixed preconditioner, and the learning rate up to which it is stable.

A step of an optimizer with a fixed preconditioner P on ½ θᵀ H θ, in coordinates where S = P^(−½) H P^(−½):

    heavy ball   θ' = θ − η m',               m' = β m + g S θ        η λ_max(S) < 2 (1 + β) / g
    Nesterov     θ' = θ − η S θ − η β m',     m' = β m + S θ          η λ_max(S) < 2 (1 + β) / (1 + 2 β)
    decoupled    θ' = (I − η W) θ − η m',     m' = β m + g S θ        the first, with S + (1 + β)/g · W

where g = 1 for sums of gradients, and 1 − β for running means; W is a diagonal weight decay. A mode zᵗ x of
the first and the last has z² − z b + c = 0 with b = xᵀ((1 + β) I − η W − η g S) x and c = β (1 − η xᵀ W x)
for a unit vector x, so that |z| < 1 for all modes if |b| < 1 + c for all x, and the bound is where z = −1.
Directions of negative curvature grow at any η.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from curvescope.core.operator import LinearOperator


@dataclass(frozen=True)
class Descent:
    """An optimizer as the recurrence above."""

    name: str
    inverse_root: LinearOperator | None  # P^(−½), or None for the identity
    learning_rate: float | None = None  # η: the largest one, where parameters have several
    momentum: float = 0.0  # β
    nesterov: bool = False
    gain: float = 1.0  # g
    coupled: Tensor | None = None  # (n,) weight decay that is part of the gradient: added to H
    decoupled: Tensor | None = None  # (n,) weight decay beside it, over the largest learning rate
    assumed: list[str] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """c of η λ_max < c."""
        if self.nesterov:
            return 2 * (1 + self.momentum) / (1 + 2 * self.momentum)
        return 2 * (1 + self.momentum) / self.gain

    @property
    def formula(self) -> str:
        """The bound in words."""
        if self.momentum == 0 and self.gain == 1:
            return "2 / λ_max"
        if self.nesterov:
            return "2 (1 + β) / ((1 + 2 β) λ_max)"
        if self.gain == 1:
            return "2 (1 + β) / λ_max"
        mean = self.gain == 1 - self.momentum
        return "2 (1 + β) / ((1 − β) λ_max)" if mean else "2 (1 + β) / ((1 − dampening) λ_max)"

"""Question 6. The gradient first: its own orders and heterogeneity beside the Hessian's.

It is measured by the sweeps of question 4.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from curvescope.papers.ormaniec2025.reviewers.answers import (
    Answer,
    answer,
    holds_where,
    more_than,
    same_orders,
)
from curvescope.papers.ormaniec2025.reviewers.measure import PARTS, Sweep
from curvescope.papers.ormaniec2025.reviewers.slopes import Mean, exponents, mean_of

QUESTION = "The gradient first: its own orders and heterogeneity"
HIGH = 1e-2  # scales up to which exponents are fitted
AT = 0.1  # the scale at which blocks are compared
ROLES = ("W_Q", "W_K", "W_V", "W_O")
GRADIENT = {"softmax": {"W_Q": 3, "W_K": 3, "W_V": 1, "W_O": 1}, "linear attention": dict.fromkeys(ROLES, 3)}


def order(one: Sweep, part: str, role: str) -> np.ndarray:
    """Exponent for small σ, (seeds,)."""
    return exponents(one.sigma, one.curve(part, f"L0.{role}"), high=HIGH)


def apart(one: Sweep, part: str) -> np.ndarray:
    """‖block of W_V‖ over ‖block of W_Q‖ at σ = 0.1, in decades: (seeds,)."""
    place = int(np.abs(np.log(one.sigma / AT)).argmin())
    return np.log10(one.curve(part, "L0.W_V")[:, place] / one.curve(part, "L0.W_Q")[:, place])


def answers(found: Mapping[str, Sweep]) -> list[Answer]:
    """Exponents with and without softmax, the square, and the distance between W_V and W_Q."""
    rows = []
    for case, powers in GRADIENT.items():
        one = found[f"regime.{case}"]
        slopes = {role: (order(one, "gradient", role), float(power)) for role, power in powers.items()}
        worst, words, verdict = same_orders(slopes)
        said = ", ".join(f"{role} {power}" for role, power in powers.items())
        exact = ", ".join(f"{role} {values.mean():.2f}" for role, (values, _) in slopes.items())
        rows.append(answer(6, f"{case}: orders of the gradient's blocks", said, worst, verdict,
                           measured=f"{exact} ({words})"))  # fmt: skip
    return [*rows, *_twice(found["regime.softmax"]), _wider(found["regime.softmax"])]


def _twice(one: Sweep) -> list[Answer]:
    """Whether a block of H_o, and of H, grows with twice the exponent of its gradient."""
    rows = []
    for part in ("H_o", "H"):
        rest = {role: mean_of(order(one, part, role) - 2 * order(one, "gradient", role)) for role in ROLES}
        words = ", ".join(f"{role} {mean.value:+.2f}" for role, mean in rest.items())
        worst = max(rest.values(), key=lambda mean: abs(mean.value))
        claim = f"exponents of {part} are twice the gradient's"
        rows.append(answer(6, claim, "difference 0", worst, holds_where(rest, 0), measured=words))
    return rows


def _wider(one: Sweep) -> Answer:
    """Decades between W_V and W_Q, of H against the gradient."""
    found = {part: mean_of(apart(one, part)) for part in PARTS if part != "H_f"}
    more: Mean = mean_of(apart(one, "H") - apart(one, "gradient"))
    words = ", ".join(f"{part} {mean}" for part, mean in found.items())
    claim = f"the Hessian is more heterogeneous than the gradient (‖W_V‖/‖W_Q‖ at σ = {AT:g})"
    return answer(6, claim, "more decades", more, more_than(more, 0), measured=f"decades: {words}")

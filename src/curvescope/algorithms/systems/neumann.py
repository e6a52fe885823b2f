"""Neumann's series, A⁻¹ b = s Σ_j (I − s A)ʲ b, on several right-hand sides in lock step.

Its partial sums are the steps of Richardson's iteration x + s M (b − A x), with a preconditioner M or none.
They converge where all eigenvalues of s M A lie between 0 and 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvescope.algorithms.sums import column_dots
from curvescope.algorithms.systems.iterations import Multiply, Stop, descend
from curvescope.core.progress import track

GROWN = 1e3  # times its start: a residual that large diverges


def neumann_series(
    product: Multiply,
    B: Tensor,
    target: Tensor,
    limit: int,
    precondition: Multiply | None = None,
    *,
    scale: Callable[[], float],
) -> tuple[Tensor, Stop, int]:
    """Terms of the series until ‖r‖ ≤ target (k,): x, why it stopped, products used.

    Args:
        scale: s, asked for when the first product is known.
    """
    X, R, used = torch.zeros_like(B), B.clone(), 0
    rest = column_dots(R, R).sqrt()
    first = rest
    for _ in track(range(limit), "Neumann series"):
        grown = ~(rest <= GROWN * first)
        active = (rest > target) & ~grown
        if bool(grown.any()) or not bool(active.any()):
            break
        Z = R.clone() if precondition is None else precondition(R)
        AZ = product(Z)
        used += 1
        step = torch.where(active, scale(), torch.zeros_like(rest))
        rest = torch.where(active, descend(X, R, Z, AZ, step).sqrt(), rest)
    diverged = bool((~(rest <= first)).any())
    reason = "the series diverges: eigenvalues of scale times the operator are not all between 0 and 2"
    return X, Stop(reason if diverged else ""), used

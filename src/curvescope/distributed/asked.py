"""What ranks ask for, in a few words and one number, so that they notice if it is not the same product.

The words are of the operator and of the shapes, and have to be equal. Vectors that every rank has computed
for itself may differ by rounding, so of these one number is compared: s = ⟨r, V⟩ / ‖V‖ for fixed random signs
r, which is of size 1 and differs by about ‖V − V′‖ / ‖V‖.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvescope.core.seeds import generator

SIGNS = 2**12


class Asked(NamedTuple):
    """A product that is asked for; the others ask for the same."""

    words: str
    vectors: float  # s


def asked(op: Any, V: Tensor, *spaces: Any) -> Asked:
    """What an operator is asked for: its product with V between these spaces."""
    shift = getattr(op, "shift", None)
    words = (
        type(op).__name__,
        tuple(V.shape),
        str(V.dtype),
        tuple(tuple(block.name for block in space) for space in spaces),
        None if shift is None else (shift.uniform, {k: _plain(w) for k, w in shift.weights.items()}),
        op.problem.loss.name,
        {name: _plain(value) for name, value in op.problem.loss.options.items()},
        getattr(op, "source", None),
        getattr(op, "seed", None),
    )
    return Asked(repr(words), seen(V))


def seen(V: Tensor) -> float:
    """⟨r, V⟩ / ‖V‖ for signs r that repeat along V; 2 where V is not finite, 0 where it is zero."""
    flat = V.reshape(-1)
    signs = _signs(V.device, V.dtype)
    whole = flat.numel() // SIGNS * SIGNS
    total = (flat[:whole].view(-1, SIGNS) @ signs).sum(dtype=torch.float64)
    total = total + (flat[whole:] @ signs[: flat.numel() - whole]).double()
    size = torch.linalg.vector_norm(flat, dtype=torch.float64)
    found = float(total / size) if float(size) else 0.0
    return found if math.isfinite(found) else 2.0


def _plain(weight: Any) -> Any:
    return float(weight.double().sum()) if isinstance(weight, Tensor) else weight


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    return (2 * torch.randint(2, (SIGNS,), generator=generator(0)) - 1).to(device, dtype)

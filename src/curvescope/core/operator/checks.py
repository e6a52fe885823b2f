"""Checks of operators and of the numbers they are multiplied with: each raises one sentence."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from curvescope.core.operator.base import LinearOperator


def check_square_symmetric(A: LinearOperator, what: str) -> None:
    """Raise unless A is square and declared symmetric."""
    if A.shape[0] != A.shape[1] or not A.symmetric:
        raise UsageError(
            f"{what} needs a symmetric operator, got {A!r} with symmetric={A.symmetric}",
            hint="a block with the same rows and columns, op.block(name), is symmetric",
        )


def number(factor: Any) -> float:
    """A finite real number."""
    found = math.nan
    if not isinstance(factor, complex | str) and not (isinstance(factor, Tensor) and factor.is_complex()):
        with suppress(TypeError, ValueError, RuntimeError):
            found = float(factor)
    if not math.isfinite(found):
        got = f"a tensor of {tuple(factor.shape)}" if isinstance(factor, Tensor) else repr(factor)
        raise UsageError(
            f"expected a finite real number to multiply an operator with, got {got}",
            hint="A @ B multiplies operators, Diagonal(d) @ A scales rows",
        )
    return found


def check_alike(A: LinearOperator, B: LinearOperator, verb: str) -> None:
    """Raise unless both have one dtype and one kind of device."""
    if A.dtype != B.dtype or A.device.type != B.device.type:
        raise ShapeError(
            f"cannot {verb} operators of {A.dtype} on {A.device} and of {B.dtype} on {B.device}",
            hint="make both with the same dtype and device",
        )

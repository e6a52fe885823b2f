"""Checks at the public edge of the algorithms: each raises one sentence before any work is done."""

from __future__ import annotations

import math
import operator as numbers
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from curvescope.algorithms.recording import recorded
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import LinearOperator, check_square_symmetric
from curvescope.core.ranks.spread import Pieces, over
from curvescope.core.threads import same_threads

P = ParamSpec("P")
T = TypeVar("T")
GIB = 2**30
_frozen: ContextVar[LinearOperator | None] = ContextVar("curvescope_frozen", default=None)
DEFAULT_TOL = {torch.float64: 1e-8, torch.float32: 1e-4}


def of_one_matrix(algorithm: Callable[Concatenate[LinearOperator, P], T]) -> Callable[Concatenate[Any, P], T]:
    """An algorithm whose products are of one matrix: an error if it changes before the end.

    One that another calls with its own operator is a part of it, and the matrix is looked at for both.
    """

    @wraps(algorithm)
    def run(op: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(op, LinearOperator) or op is _frozen.get():
            return algorithm(op, *args, **kwargs)  # which says what it needs
        spread = None if op.pieces is None else op.pieces[0].spread
        threads = nullcontext() if spread is None else same_threads(partial(spread.least, device=op.device))
        with op.frozen(), threads, over(spread), recorded(op) as own:
            token = _frozen.set(own)
            try:
                return algorithm(own, *args, **kwargs)
            finally:
                _frozen.reset(token)

    return run


def check_operator(op: LinearOperator, what: str) -> None:
    """Raise unless `op` is an operator with rows, columns and a dtype the algorithms work in."""
    if not isinstance(op, LinearOperator):
        raise UsageError(
            f"{what} needs a LinearOperator, got {type(op).__name__}", hint="Matrix(tensor) makes one"
        )
    if 0 in op.shape:
        raise ShapeError(f"{what} needs an operator with at least one row and one column, got {op.shape}")
    if op.dtype not in DEFAULT_TOL:
        raise UsageError(f"{what} needs a float32 or float64 operator, got {op.dtype}")


def check_symmetric(op: LinearOperator, what: str) -> None:
    """`check_operator`, and raise unless it is declared symmetric."""
    check_operator(op, what)
    check_square_symmetric(op, what)


def check_square(op: LinearOperator, what: str) -> None:
    """`check_operator`, and raise unless it has as many rows as columns."""
    check_operator(op, what)
    if op.shape[0] != op.shape[1]:
        raise ShapeError(f"{what} needs a square operator, got {op!r}")


def check_count(name: str, value: int, *, at_least: int, at_most: int | None = None) -> int:
    """`value` as an int, or raise unless it is a whole number in range."""
    span = f"of at least {at_least}" if at_most is None else f"between {at_least} and {at_most}"
    try:
        count = numbers.index(value)
    except TypeError:
        raise UsageError(f"expected a whole number {name} {span}, got {value!r}") from None
    if isinstance(value, bool) or count < at_least or (at_most is not None and count > at_most):
        raise UsageError(f"expected {name} {span}, got {value!r}")
    return count


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise unless `value` is one of the words in `allowed`."""
    if value not in allowed:
        raise UsageError(f"expected {name} to be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_number(
    name: str, value: float, *, above: float | None = None, at_least: float | None = None
) -> float:
    """`value` as a float, or raise unless it is finite and in range."""
    bound = f"above {above}" if above is not None else f"of at least {at_least}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"expected a number {bound} for {name}, got {value!r:.60}") from None
    too_low = (above is not None and number <= above) or (at_least is not None and number < at_least)
    if not math.isfinite(number) or too_low:
        raise UsageError(f"expected a finite {name} {bound}, got {value!r}")
    return number


def relative_tolerance(tol: float | None, dtype: torch.dtype) -> float:
    """The tolerance asked for, or 1e-8 in float64 and 1e-4 in float32: near the root of a rounding."""
    return DEFAULT_TOL[dtype] if tol is None else check_number("tol", tol, above=0.0)


WHOLE = ""
"""The name of the block that is the whole vector."""


def whole_slice(op: LinearOperator) -> dict[str, slice]:
    """The whole vector as one block: what is here of it."""
    return {WHOLE: slice(0, op.local_shape[1])}


def block_pieces(op: LinearOperator, name: str) -> Pieces | None:
    """Which entries of a block are here; None where all are."""
    if op.pieces is None:
        return None
    return op.pieces[1] if name == WHOLE else op.pieces[1].of(name)


def block_sizes(op: LinearOperator, slices: Mapping[str, slice]) -> dict[str, int]:
    """Entries of each block, on all ranks together."""
    pieces = {name: block_pieces(op, name) for name in slices}
    return {
        name: rows.stop - rows.start if (here := pieces[name]) is None else here.length
        for name, rows in slices.items()
    }


def check_slices(
    op: LinearOperator, slices: Mapping[str, slice] | None
) -> tuple[LinearOperator, dict[str, slice]]:
    """Blocks of the vector by name, in order, with plain bounds, and the operator that they are slices of.

    By default these are the blocks of `op.space`, and the operator has them one after the other. If vectors
    are spread over ranks, a rank may have nothing of a block, and only blocks can be asked for.
    """
    op = op.in_blocks() if slices is None else op
    if op.pieces is not None:
        own = op.space.slices  # pyright: ignore[reportAttributeAccessIssue]
        found = dict(own if slices is None else slices)
        if list(found) != [WHOLE] and any(own.get(name) != rows for name, rows in found.items()):
            raise UsageError(
                "expected the operator's own blocks where vectors are spread over ranks, got slices"
            )
        return op, found
    if slices is None:
        space = getattr(op, "space", None)
        if space is None:
            raise UsageError(
                f"{op!r} has no space of named blocks", hint="pass slices={'name': slice(start, stop), …}"
            )
        slices = space.slices
    if not slices:
        raise UsageError("expected at least one block in slices, got none")
    n, found = op.shape[1], {}
    for name, part in slices.items():
        step_one = isinstance(part, slice) and part.step in (None, 1)
        start = part.start or 0 if step_one else -1
        stop = n if step_one and part.stop is None else part.stop if step_one else -1
        if not 0 <= start < stop <= n:
            raise ShapeError(
                f"expected block {name!r} as slice(start, stop) with 0 ≤ start < stop ≤ {n}, got {part!r}"
            )
        found[str(name)] = slice(start, stop)
    return op, found

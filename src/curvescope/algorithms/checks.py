"""Checks of the arguments of algorithms, made before any work."""

from __future__ import annotations

import math
import operator as numbers
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from curvescope.algorithms.recorded_products import recorded
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import LinearOperator, check_square_symmetric
from curvescope.core.ranks.shard_layout import VectorShard, sharded_over
from curvescope.core.threads import equal_threads

P = ParamSpec("P")
T = TypeVar("T")
GIB = 2**30
_frozen: ContextVar[LinearOperator | None] = ContextVar("curvescope_frozen", default=None)
DEFAULT_TOL = {torch.float64: 1e-8, torch.float32: 1e-4}


def fixed_operator(
    algorithm: Callable[Concatenate[LinearOperator, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """Decorate an algorithm so that it raises if its operator changes before the end.

    An algorithm called by another one on the same operator shares the check.
    """

    @wraps(algorithm)
    def run(op: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(op, LinearOperator) or op is _frozen.get():
            return algorithm(op, *args, **kwargs)  # raises its own error for the wrong type
        group = None if op.shards is None else op.shards[0].spread
        threads = nullcontext() if group is None else equal_threads(partial(group.min, device=op.device))
        with op.frozen(), threads, sharded_over(group), recorded(op) as fixed:
            token = _frozen.set(fixed)
            try:
                return algorithm(fixed, *args, **kwargs)
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
    """Call `check_operator`, and raise unless the operator is declared symmetric."""
    check_operator(op, what)
    check_square_symmetric(op, what)


def check_square(op: LinearOperator, what: str) -> None:
    """Call `check_operator`, and raise unless the operator is square."""
    check_operator(op, what)
    if op.shape[0] != op.shape[1]:
        raise ShapeError(f"{what} needs a square operator, got {op!r}")


def check_count(name: str, value: int, *, at_least: int, at_most: int | None = None) -> int:
    """Return `value` as an int; raise unless it is a whole number in range."""
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
    """Return `value` as a float; raise unless it is finite and in range."""
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
    """Return `tol`; by default 1e-8 in float64 and 1e-4 in float32, about the root of the precision."""
    return DEFAULT_TOL[dtype] if tol is None else check_number("tol", tol, above=0.0)


FULL_VECTOR = ""
"""Name of the block that is the full vector."""


def whole_slice(op: LinearOperator) -> dict[str, slice]:
    """Return the full vector as one block: this rank's entries."""
    return {FULL_VECTOR: slice(0, op.local_shape[1])}


def block_shard(op: LinearOperator, name: str) -> VectorShard | None:
    """Return the entries of a block that this rank holds; None if it holds all."""
    if op.shards is None:
        return None
    return op.shards[1] if name == FULL_VECTOR else op.shards[1].block(name)


def block_sizes(op: LinearOperator, slices: Mapping[str, slice]) -> dict[str, int]:
    """Return the number of entries of each block, over all ranks."""
    shards = {name: block_shard(op, name) for name in slices}
    return {
        name: rows.stop - rows.start if (shard := shards[name]) is None else shard.length
        for name, rows in slices.items()
    }


def check_slices(
    op: LinearOperator, slices: Mapping[str, slice] | None
) -> tuple[LinearOperator, dict[str, slice]]:
    """Return the operator, and its blocks by name in order, as slices with plain bounds.

    By default these are the blocks of `op.space`, and the returned operator has them one after the other. If
    vectors are sharded, a rank may have no entries of a block, and only these blocks are allowed.
    """
    op = op.in_blocks() if slices is None else op
    if op.shards is not None:
        space_slices = op.space.slices  # pyright: ignore[reportAttributeAccessIssue]
        checked = dict(space_slices if slices is None else slices)
        if list(checked) != [FULL_VECTOR] and any(
            space_slices.get(name) != rows for name, rows in checked.items()
        ):
            raise UsageError("expected the operator's own blocks because its vectors are sharded, got slices")
        return op, checked
    if slices is None:
        space = getattr(op, "space", None)
        if space is None:
            raise UsageError(
                f"{op!r} has no space of named blocks", hint="pass slices={'name': slice(start, stop), …}"
            )
        slices = space.slices
    if not slices:
        raise UsageError("expected at least one block in slices, got none")
    n, checked = op.shape[1], {}
    for name, part in slices.items():
        is_contiguous = isinstance(part, slice) and part.step in (None, 1)
        start = part.start or 0 if is_contiguous else -1
        stop = n if is_contiguous and part.stop is None else part.stop if is_contiguous else -1
        if not 0 <= start < stop <= n:
            raise ShapeError(
                f"expected block {name!r} as slice(start, stop) with 0 ≤ start < stop ≤ {n}, got {part!r}"
            )
        checked[str(name)] = slice(start, stop)
    return op, checked

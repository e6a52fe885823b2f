"""The first product of each kind of operator, told to whoever wants to look at the operator before it.

The one who looks says which operators are of one kind, by a function of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class _Looking(NamedTuple):
    """Hook, the function that tells kinds of operators apart, and the kinds that the hook has seen."""

    look: Callable[[Any], None]
    kind: Callable[[Any], Hashable]
    seen: set[Hashable]


_looking: ContextVar[_Looking | None] = ContextVar("curvescope_looking", default=None)


@contextmanager
def looking(look: Callable[[Any], None] | None, kind: Callable[[Any], Hashable] = type) -> Iterator[None]:
    """Inside, `look` is called with an operator when the first product of its kind is asked for."""
    token = _looking.set(None if look is None else _Looking(look, kind, set()))
    try:
        yield
    finally:
        _looking.reset(token)


def met(op: Any) -> None:
    """Show an operator of which a product is asked for; products that are taken to look at it are not."""
    watch = _looking.get()
    if watch is None or (kind := watch.kind(op)) in watch.seen:
        return
    with looking(None):
        watch.look(op)
    watch.seen.add(kind)

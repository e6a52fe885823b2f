"""Hook that runs before the first product of each kind of operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class _Observer(NamedTuple):
    """Hook, function from an operator to its kind, and kinds for which the hook already ran."""

    hook: Callable[[Any], None]
    kind: Callable[[Any], Hashable]
    seen: set[Hashable]


_observer: ContextVar[_Observer | None] = ContextVar("curvescope_first_product", default=None)


@contextmanager
def on_first_product(
    hook: Callable[[Any], None] | None, kind: Callable[[Any], Hashable] = type
) -> Iterator[None]:
    """Inside, `hook(op)` runs before the first product of each kind of operator."""
    token = _observer.set(None if hook is None else _Observer(hook, kind, set()))
    try:
        yield
    finally:
        _observer.reset(token)


def notify_first_product(op: Any) -> None:
    """Run the hook if this is the first product of the operator's kind; products inside a hook run none."""
    observer = _observer.get()
    if observer is None or (kind := observer.kind(op)) in observer.seen:
        return
    with on_first_product(None):
        observer.hook(op)
    observer.seen.add(kind)

"""Tasks: small data with a documented construction and a seed, made by `task(name, …)`.

Targets align with a model's outputs: nothing is shifted later, and −100 does not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from curvescope.core.errors import UsageError, near_misses
from curvescope.data.task_names import TASKS
from curvescope.data.tasks.checks import check_counts

if TYPE_CHECKING:
    from curvescope.data.batches import Batches

__all__ = ["TASKS", "task", "task_options"]


def task(name: str, **options: Any) -> Batches:
    """The task `name`, as re-readable batches; the same options give the same data.

    `task_options(name)` lists the options; every task has `batch_size`, which cuts the data and does
    not change it, and `seed`.
    """
    make = _maker(name)
    known = task_options(name)
    for option in options:
        if option not in known:
            raise UsageError(
                f"the task {name!r} has no option {option!r}", hint=f"its options are {', '.join(known)}"
            )
    if options.get("batch_size") is not None:
        check_counts(batch_size=options["batch_size"])
    for option in ("seed", "sample_seed"):
        if not isinstance(options.get(option, 0), int) and options[option] is not known[option]:
            raise UsageError(f"expected {option} to be an integer, got {options[option]!r}")
    return make(**options)


def task_options(name: str) -> dict[str, Any]:
    """The options of a task, with their defaults."""
    return {key: found.default for key, found in inspect.signature(_maker(name)).parameters.items()}


def _maker(name: str) -> Callable[..., Batches]:
    if name not in TASKS:
        raise UsageError(
            f"expected the name of a task, got {name!r}", hint=near_misses(str(name), list(TASKS))
        )
    return getattr(import_module(TASKS[name].module), TASKS[name].function)

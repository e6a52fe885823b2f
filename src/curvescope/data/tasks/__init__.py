"""Tasks: small data with a documented construction and a seed, made by `task_data(name, …)`.

Targets align with a model's outputs: nothing is shifted later, and −100 does not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from curvescope.core.config import typed_value
from curvescope.core.errors import UsageError, near_misses
from curvescope.data.task_names import TASKS
from curvescope.data.tasks.checks import check_counts

if TYPE_CHECKING:
    from curvescope.data.batches import Batches

__all__ = ["TASKS", "task_data", "task_from_text", "task_options"]

SEQ_LEN = "seq_len"  # an option of every task in POSITIONS, when it is given as text
POSITIONS: dict[str, tuple[str, Callable[[int], int]]] = {
    "addition": ("digits", lambda T: T // 3 - 1),
    "copy": ("length", lambda T: T // 2),
    "gaussian_regression": ("length", lambda T: T),
    "induction": ("length", lambda T: T),
    "markov": ("length", lambda T: T),
    "sorting": ("length", lambda T: (T + 1) // 2),
}
"""Option that sets a task's number of positions, and its largest value for at most T positions."""
LETTERS: dict[str, tuple[str, Callable[[int], int]]] = {
    "copy": ("vocab", lambda V: V - 1),
    "induction": ("vocab", lambda V: V),
    "markov": ("vocab", lambda V: V),
    "modular_addition": ("p", lambda V: V - 1),
    "sorting": ("vocab", lambda V: V),
}
"""Option that sets a task's number of ids, and its largest value for a vocabulary of V."""


def task_data(name: str, **options: Any) -> Batches:
    """Make the data of the task `name`; the same options give the same data.

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


def task_from_text(
    text: str,
    *,
    batch_size: int | None = None,
    n_ctx: int | None = None,
    vocab_size: int | None = None,
    seq_len: int | None = None,
) -> Batches:
    """Make a task from text on the command line: `markov`, `markov?length=6&seed=1`.

    Every task with a length also takes `seq_len`, the number of its positions. Options that are not given are
    lowered to fit the model, and never raised above the task's defaults.

    Args:
        n_ctx: Largest number of positions of the model.
        vocab_size: Number of ids of the model.
        seq_len: Number of positions if the text does not set it; at most `n_ctx`.
    """
    name, _, options_text = text.partition("?")
    defaults, given = task_options(name), dict[str, Any]()
    for pair in filter(None, options_text.replace("&", ",").split(",")):
        option, equals, value = (part.strip() for part in pair.partition("="))
        allowed = [*defaults, *([SEQ_LEN] if name in POSITIONS else [])]
        if not equals or option not in allowed:
            raise UsageError(
                f"expected options of the task {name!r} as NAME=VALUE, got {pair!r}",
                hint=f"its options are {', '.join(allowed)}",
            )
        given[option] = typed_value(value)
    if seq_len is not None and n_ctx is not None:
        seq_len = min(seq_len, n_ctx)
    if (positions := given.pop(SEQ_LEN, seq_len)) is not None and name in POSITIONS:
        check_counts(seq_len=positions)
        option_name, largest = POSITIONS[name]
        given.setdefault(option_name, largest(positions))
    for table, limit in ((POSITIONS, n_ctx), (LETTERS, vocab_size)):
        if name in table and limit is not None:
            option_name, largest = table[name]
            if 1 <= largest(limit) < defaults[option_name]:
                given.setdefault(option_name, largest(limit))
    return task_data(name, **{"batch_size": batch_size, **given})


def task_options(name: str) -> dict[str, Any]:
    """Return the options of a task with their defaults."""
    return {key: parameter.default for key, parameter in inspect.signature(_maker(name)).parameters.items()}


def _maker(name: str) -> Callable[..., Batches]:
    if name not in TASKS:
        raise UsageError(
            f"expected the name of a task, got {name!r}", hint=near_misses(str(name), list(TASKS))
        )
    return getattr(import_module(TASKS[name].module), TASKS[name].function)

"""The command line that this process was called with.

What typer refuses of a command line, as an error of ours: what was expected, what came, what to do.

typer raises the exceptions of click, its own copy of them in some versions: they are known by what they hold.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, cast

import typer

from curvescope.core.errors import UsageError, near_misses

_words: ContextVar[tuple[str, ...]] = ContextVar("curvescope_words", default=())


def remember(words: Sequence[str]) -> None:
    """Note what was typed behind `curvescope`."""
    _words.set(tuple(words))


def wants_traceback() -> bool:
    """Return True if --debug was typed."""
    return "--debug" in _words.get()


def value_behind(option: str) -> str | None:
    """Return the value after an option, `--tokens 5` or `--tokens=5`; None without the option."""
    words = _words.get()
    found = [after for word, after in pairwise(words) if word == option]
    found += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return found[-1] if found else None


def go_on() -> str:
    """Return the command that resumes a stopped run, which is the same command."""
    return f"to go on: {shlex.join(['curvescope', *_words.get()])}"


REFUSED = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""The class of all of them, which typer does not name itself."""
KINDS = {"integer": "an integer", "float": "a number", "number": "a number"}


def in_our_words(error: Any) -> UsageError:
    """The sentence and the hint for an error of the class REFUSED."""
    context = error.ctx
    more = f"{'curvescope' if context is None else context.command_path} --help"
    if hasattr(error, "possibilities"):
        names = [] if context is None else [name for one in context.command.params for name in one.opts]
        options = [name for name in names if name.startswith("-")]
        known = near_misses(error.option_name, [*options, "--help"])
        return UsageError(f"no such option {error.option_name}", hint=f"{known}; {more}")
    if hasattr(error, "option_name"):
        return UsageError(f"expected a value after {error.option_name}, got none", hint=more)
    if hasattr(error, "param_type") and error.param is not None:
        return UsageError(f"expected {str(error.param.name).upper()}, got nothing", hint=more)
    if isinstance(error, typer.BadParameter) and error.param is not None:
        return UsageError(_bad_value(error), hint=more)
    if extra := re.search(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", error.message):
        return UsageError(f"expected no more words, got {extra[1]}", hint=more)
    return UsageError(error.format_message(), hint=more)


def _bad_value(error: Any) -> str:
    """Return the error for an option or argument whose value is not a number."""
    names = error.param.opts
    came = next((value for name in names if (value := value_behind(name)) is not None), None)
    kind = re.search(r"valid (integer|float|number)", error.message)
    if came is None or kind is None:
        return error.format_message()
    return f"expected {KINDS[kind[1]]} for {names[0]}, got {came!r}"

"""The arguments of this process, and errors of typer translated into UsageError.

typer raises the exceptions of click, in some versions its own copies of them. This module recognizes them by
their attributes.
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


def store_arguments(words: Sequence[str]) -> None:
    """Store the words that were typed after `curvescope`."""
    _words.set(tuple(words))


def wants_traceback() -> bool:
    """Return True if --debug was typed."""
    return "--debug" in _words.get()


def value_after(option: str) -> str | None:
    """Return the value after an option, `--tokens 5` or `--tokens=5`; None without the option."""
    words = _words.get()
    values = [value for word, value in pairwise(words) if word == option]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return values[-1] if values else None


def resume_hint() -> str:
    """Return the command that resumes a stopped run, which is the same command."""
    return f"to resume: {shlex.join(['curvescope', *_words.get()])}"


CLICK_ERROR = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""Base class of click's usage errors, which typer does not export."""
KINDS = {"integer": "an integer", "float": "a number", "number": "a number"}


def translate_error(error: Any) -> UsageError:
    """Translate an error of the class CLICK_ERROR into a UsageError with a hint."""
    context = error.ctx
    more = f"{'curvescope' if context is None else context.command_path} --help"
    if hasattr(error, "possibilities"):
        names = [] if context is None else [name for option in context.command.params for name in option.opts]
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
        return UsageError(f"expected no further arguments, got {extra[1]}", hint=more)
    return UsageError(error.format_message(), hint=more)


def _bad_value(error: Any) -> str:
    """Return the error for an option or argument whose value is not a number."""
    names = error.param.opts
    typed = next((value for name in names if (value := value_after(name)) is not None), None)
    kind = re.search(r"valid (integer|float|number)", error.message)
    if typed is None or kind is None:
        return error.format_message()
    return f"expected {KINDS[kind[1]]} for {names[0]}, got {typed!r}"

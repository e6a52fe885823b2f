"""The command line that this process was called with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import pairwise

_words: ContextVar[tuple[str, ...]] = ContextVar("curvescope_words", default=())


def remember(words: Sequence[str]) -> None:
    """Note what was typed behind `curvescope`."""
    _words.set(tuple(words))


def wants_traceback() -> bool:
    """Whether --debug was typed."""
    return "--debug" in _words.get()


def value_behind(option: str) -> str | None:
    """What was typed behind an option, `--tokens 5` or `--tokens=5`; None where it was not."""
    words = _words.get()
    found = [after for word, after in pairwise(words) if word == option]
    found += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    return found[-1] if found else None


def go_on() -> str:
    """What goes on with a run that was stopped: the same command."""
    return f"to go on: {shlex.join(['curvescope', *_words.get()])}"

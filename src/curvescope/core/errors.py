"""Errors that say what was expected, what came, and how to fix it; and warnings at the user's own line."""

from __future__ import annotations

import re
import sys
import warnings


class CurvescopeError(Exception):
    """Base of errors that a user can fix.

    The message is one sentence; `hint` says what to try. The command line prints both without a traceback
    and exits with `exit_code`.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message if hint is None else f"{message} ({hint})")
        self.message = message
        self.hint = hint


class UsageError(CurvescopeError, ValueError):
    """The call itself is wrong: a bad name, value, shape or combination."""

    exit_code = 2


class ShapeError(UsageError):
    """A tensor has the wrong shape, dtype or device."""


class ModuleError(CurvescopeError, RuntimeError):
    """The user's module raised an error that it also raises without curvescope."""


class MissingExtra(CurvescopeError, ImportError):
    """A required optional package is not installed."""


def warn(message: str) -> None:
    """Warn and point to the user's line that called this package, through any number of calls."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "curvescope":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def near_misses(name: str, known: list[str], count: int = 3) -> str | None:
    """Return a hint with the known names closest to `name`, or with all known names if none is close.

    Initials (`ce` for cross_entropy), parts of a word (`probes` for num_probes) and typos count as close.
    """
    from difflib import get_close_matches

    folded: dict[str, list[str]] = {}
    for word in known:
        folded.setdefault(word.casefold(), []).append(word)
    wanted = name.casefold()
    abbreviated = [key for key in folded if wanted in _abbreviations(key)]
    close = abbreviated or get_close_matches(wanted, folded, n=count, cutoff=0.6)
    suggestions = [word for key in close for word in folded[key]][:count]
    if suggestions:
        return "did you mean " + " or ".join(repr(word) for word in suggestions) + "?"
    return f"known: {', '.join(known[:8])}{', …' if len(known) > 8 else ''}" if known else None


def _abbreviations(word: str) -> set[str]:
    """Initials of the parts of a word, and its longer parts: `ce`, `cross`, `entropy`."""
    parts = [part for part in re.split(r"[_\-. ]", word) if part]
    initials = {"".join(part[0] for part in parts)} if len(parts) > 1 else set()
    return initials | {part for part in parts if len(part) > 2}

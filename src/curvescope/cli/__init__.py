"""The command line: parse, call one function, print. Results go to stdout, the rest to stderr."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from curvescope.cli.app import app
from curvescope.cli.commands.ranks import complain, over_ranks
from curvescope.cli.typed.line import REFUSED, go_on, in_our_words, remember
from curvescope.core.errors import CurvescopeError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an error is one sentence and an exit code, unless --debug is given."""
    words = sys.argv[1:] if arguments is None else arguments
    _share_processor()
    debug = "--debug" in words
    remember(words)
    words = ["--debug", *(word for word in words if word != "--debug")] if debug else words
    try:
        with _sigterm_stops(), over_ranks(words):
            sys.exit(_called(words))
    except CurvescopeError as error:
        if debug:
            raise
        complain(error.message, error.hint)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        complain("stopped", go_on())
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        complain(f"{type(error).__name__}: {error}".splitlines()[0], "add --debug for the traceback")
        sys.exit(1)


@contextmanager
def _sigterm_stops() -> Iterator[None]:
    """Inside, SIGTERM, which a time limit sends, does what Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _called(words: list[str]) -> int:
    """The exit code of the command; what typer refuses is raised in our words."""
    try:
        return app(words, prog_name="curvescope", standalone_mode=False) or 0
    except REFUSED as error:
        if not words:  # its words are the help
            typer.echo(str(error), err=True)
            return 2
        raise in_our_words(error) from error


def _share_processor() -> None:
    """Let threads that wait for each other sleep: on a busy machine they would take others' time, and ours.

    OpenMP reads this once, when torch is loaded; what a person has set stays.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

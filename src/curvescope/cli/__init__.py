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
from curvescope.cli.arguments.command_line import CLICK_ERROR, resume_hint, store_arguments, translate_error
from curvescope.cli.multi_rank import on_all_ranks, print_error
from curvescope.core.errors import CurvescopeError

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Without --debug an error is printed as one sentence, with an exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    _let_waiting_threads_sleep()
    debug = "--debug" in words
    store_arguments(words)
    words = ["--debug", *(word for word in words if word != "--debug")] if debug else words
    try:
        with _sigterm_stops(), on_all_ranks(words):
            sys.exit(_call_app(words))
    except CurvescopeError as error:
        if debug:
            raise
        print_error(error.message, error.hint)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print_error("stopped", resume_hint())
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        print_error(f"{type(error).__name__}: {error}".splitlines()[0], "add --debug for the traceback")
        sys.exit(1)


@contextmanager
def _sigterm_stops() -> Iterator[None]:
    """Treat SIGTERM, which a time limit sends, like Ctrl-C in this block."""
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


def _call_app(words: list[str]) -> int:
    """Return the exit code of the command. Raise UsageError if typer rejects the arguments."""
    try:
        return app(words, prog_name="curvescope", standalone_mode=False) or 0
    except CLICK_ERROR as error:
        if not words:  # the message of this error is the help
            typer.echo(str(error), err=True)
            return 2
        raise translate_error(error) from error


def _let_waiting_threads_sleep() -> None:
    """Let waiting OpenMP threads sleep, because spinning threads slow down a busy machine.

    OpenMP reads this variable once, when torch is loaded. A value that the user has set stays.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

"""The command line on several ranks, as torchrun or srun start it: only rank 0 prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from curvescope.cli.arguments.command_line import wants_traceback
from curvescope.core.errors import UsageError
from curvescope.core.ranks.rank_environment import launch_of

MULTI_RANK_COMMANDS = ("run", "diagnose", "compare")
"""Commands that can divide their work over ranks."""

DIVISIONS = ("auto", "data", "probes", "pieces", "shards")


@contextmanager
def on_all_ranks(words: Sequence[str]) -> Iterator[None]:
    """Connect all ranks in this block. In a single process this does nothing."""
    launch = launch_of(os.environ)
    if launch is None:
        yield
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # silences messages about connections that close
    stderr = sys.stderr
    if launch.rank:
        _silence_output()
    if not any(word in MULTI_RANK_COMMANDS for word in words[:2]):
        raise UsageError(
            f"this command is for one process, and {launch.by} started {launch.ranks}",
            hint=f"on several ranks: curvescope {', '.join(MULTI_RANK_COMMANDS)}",
        )
    from curvescope.distributed.launch import describe, started

    if not {"-q", "--quiet"} & set(words):
        typer.echo(describe(launch), err=True)
    with started(launch, lambda message, hint: print_error(message, hint, stderr), debug=wants_traceback()):
        yield


def prints_output() -> bool:
    """Return True if this process prints for the user: rank 0, or the only process."""
    launch = launch_of(os.environ)
    return launch is None or launch.rank == 0


@contextmanager
def divided_over_ranks(parallel: str) -> Iterator[None]:
    """Divide the work of a study over the ranks in this block."""
    if parallel not in DIVISIONS:
        raise UsageError(f"expected --parallel {', '.join(DIVISIONS)}, got {parallel!r}")
    if launch_of(os.environ) is None:
        yield
        return
    from curvescope.distributed.division import divided

    with divided(parallel):  # pyright: ignore[reportArgumentType]
        yield


def print_error(message: str, hint: str | None, to: object = None) -> None:
    """Print an error and its hint to stderr."""
    file = sys.stderr if to is None else to
    typer.echo(f"error: {message}", file=file)  # pyright: ignore[reportArgumentType]
    if hint:
        typer.echo(f"hint: {hint}", file=file)  # pyright: ignore[reportArgumentType]


def _silence_output() -> None:
    """Discard stdout, and without --debug also stderr, of this rank."""
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout = nowhere
    if not wants_traceback():
        sys.stderr = nowhere

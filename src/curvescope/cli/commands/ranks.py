"""The command line on several ranks, as torchrun or srun start it: one of them speaks, all of them work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from curvescope.cli.typed.line import wants_traceback
from curvescope.core.errors import UsageError
from curvescope.core.ranks.rank_environment import launch_of

SHARED = ("run", "diagnose", "compare")
"""Commands of which all ranks do a part."""

WAYS = ("auto", "data", "probes", "pieces", "shards")


@contextmanager
def over_ranks(words: Sequence[str]) -> Iterator[None]:
    """Inside, a command works on all ranks there are; in a single process nothing is done."""
    launch = launch_of(os.environ)
    if launch is None:
        yield
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of connections that close
    voice = sys.stderr
    if launch.rank:
        _silence()
    if not any(word in SHARED for word in words[:2]):
        raise UsageError(
            f"this command is for one process, and {launch.by} started {launch.ranks}",
            hint=f"on several ranks: curvescope {', '.join(SHARED)}",
        )
    from curvescope.distributed.launch import describe, started

    if not {"-q", "--quiet"} & set(words):
        typer.echo(describe(launch), err=True)
    with started(launch, lambda message, hint: complain(message, hint, voice), debug=wants_traceback()):
        yield


def speaks() -> bool:
    """Return True if this process prints what a person reads: rank 0, or the only one."""
    launch = launch_of(os.environ)
    return launch is None or launch.rank == 0


@contextmanager
def shared_out(parallel: str) -> Iterator[None]:
    """Inside, the ranks there are divide what a study does."""
    if parallel not in WAYS:
        raise UsageError(f"expected --parallel {', '.join(WAYS)}, got {parallel!r}")
    if launch_of(os.environ) is None:
        yield
        return
    from curvescope.distributed.division import divided

    with divided(parallel):  # pyright: ignore[reportArgumentType]
        yield


def complain(message: str, hint: str | None, to: object = None) -> None:
    """One sentence, and what to do, on stderr."""
    file = sys.stderr if to is None else to
    typer.echo(f"error: {message}", file=file)  # pyright: ignore[reportArgumentType]
    if hint:
        typer.echo(f"hint: {hint}", file=file)  # pyright: ignore[reportArgumentType]


def _silence() -> None:
    """Silence all ranks but rank 0; errors of the others go to their usual place."""
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stdout = nowhere
    if not wants_traceback():
        sys.stderr = nowhere

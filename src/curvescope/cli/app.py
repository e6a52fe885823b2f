"""The application: its own options, and its commands in the order of the help."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any, final

import typer
from typer.core import TyperCommand, TyperGroup

from curvescope import __version__
from curvescope.cli.commands import names, pages, studies
from curvescope.cli.typed.options import EVERYWHERE, Settable
from curvescope.core.errors import UsageError, near_misses
from curvescope.studies import STUDIES


@final
class Commands(TyperGroup):
    """Commands by name; one that is not there gets a hint, the name of a study too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names."""
        word = args[0]
        if word in STUDIES and word not in self.commands:
            raise UsageError(f"{word} is a study, not a command", hint=f"curvescope run {word}")
        if not word.startswith("-") and word not in self.commands:
            raise UsageError(f"No such command {word!r}", hint=near_misses(word, list(self.commands)))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="curvescope",
    help="A microscope for the curvature and geometry of Transformers.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="\b\nExamples:\n  curvescope report\n  curvescope diagnose tiny-gpt\n  curvescope run spectrum",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"curvescope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A microscope for the curvature and geometry of Transformers."""


Function = Callable[..., None]


def _add(function: Function, name: str | None = None, *, cls: type[TyperCommand] | None = None) -> None:
    """A command; its help is the docstring, with a line for every example."""
    app.command(name, cls=cls, help=laid_out(str(function.__doc__)), epilog=EVERYWHERE)(function)


def laid_out(words: str) -> str:
    """A docstring whose last paragraph is `Examples: a; b`, a line for each; \\b keeps them as they are."""
    text, _, examples = cleandoc(words).partition("Examples: ")
    lines = "".join(f"\n  {example}" for example in " ".join(examples.split()).split("; "))
    return f"{text}\b\nExamples:{lines}"


_add(names.list_names, "list")
_add(names.info, cls=Settable)
_add(pages.report)
_add(studies.diagnose, cls=Settable)
_add(studies.run, cls=Settable)
_add(studies.compare, cls=Settable)
_add(pages.runs)
_add(pages.watch)
_add(pages.reproduce, cls=Settable)
_add(studies.bench, cls=Settable)
_add(names.doctor)

"""The application: its own options, and its commands in the order of the help."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any, final

import typer
from typer.core import TyperCommand, TyperGroup

from curvescope import __version__
from curvescope.cli.arguments.options import COMMON_OPTIONS_HELP, Settable
from curvescope.cli.commands import inspection, outputs, studies
from curvescope.core.errors import UsageError, near_misses
from curvescope.studies import STUDIES


@final
class Commands(TyperGroup):
    """Commands by name. An unknown command raises an error that suggests similar ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command named by the first word."""
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


def _version(is_requested: bool) -> None:
    if is_requested:
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
    """Register a command. Its help is the docstring, with one line per example."""
    app.command(name, cls=cls, help=help_text(str(function.__doc__)), epilog=COMMON_OPTIONS_HELP)(function)


def help_text(docstring: str) -> str:
    """Return the docstring, its last paragraph `Examples: a; b` with one line per example.

    The control character \\b keeps typer from wrapping these lines.
    """
    text, _, examples = cleandoc(docstring).partition("Examples: ")
    lines = "".join(f"\n  {example}" for example in " ".join(examples.split()).split("; "))
    return f"{text}\b\nExamples:{lines}"


_add(inspection.list_names, "list")
_add(inspection.info, cls=Settable)
_add(outputs.report)
_add(studies.diagnose, cls=Settable)
_add(studies.run, cls=Settable)
_add(studies.compare, cls=Settable)
_add(outputs.runs)
_add(outputs.watch)
_add(outputs.reproduce, cls=Settable)
_add(studies.bench, cls=Settable)
_add(inspection.doctor)

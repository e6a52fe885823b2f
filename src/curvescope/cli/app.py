"""The application: its own options, and its commands in the order of the help."""

from __future__ import annotations

from typing import Annotated, Any, final

import typer
from typer.core import TyperGroup

from curvescope import __version__
from curvescope.cli.commands import names, pages, papers, studies
from curvescope.cli.typed.options import EVERYWHERE
from curvescope.cli.typed.settable import Settable
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
    epilog="Examples: curvescope report; curvescope diagnose tiny-gpt; curvescope run spectrum",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"curvescope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which this is, and end.")
    ] = False,
) -> None:
    """A microscope for the curvature and geometry of Transformers."""


app.command("list", epilog=EVERYWHERE)(names.list_names)
app.command(epilog=EVERYWHERE)(names.info)
app.command(epilog=EVERYWHERE)(pages.report)
app.command(cls=Settable, epilog=EVERYWHERE)(studies.diagnose)
app.command(cls=Settable, epilog=EVERYWHERE)(studies.run)
app.command(cls=Settable, epilog=EVERYWHERE)(studies.compare)
app.command(epilog=EVERYWHERE)(pages.runs)
app.command(epilog=EVERYWHERE)(pages.watch)
app.command(cls=Settable, epilog=EVERYWHERE)(papers.reproduce)
app.command(cls=Settable, epilog=EVERYWHERE)(studies.bench)
app.command(epilog=EVERYWHERE)(names.doctor)

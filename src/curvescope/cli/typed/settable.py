"""A setting that was written as an option, `--num-probes 4`: how it is written, `--set num_probes=4`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, final

from typer.core import TyperCommand

from curvescope.core.config import Config, Setting
from curvescope.core.errors import UsageError

SIGN = "true or false"  # the kind of a setting that may stand without a value, as an option does


@final
class Settable(TyperCommand):
    """A command whose settings are given with --set; one that is written as an option is explained."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words as options and arguments."""
        known = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        explain(str(self.name), args, known)
        return super().parse_args(ctx, args)


def explain(command: str, words: Sequence[str], known: set[str]) -> None:
    """Raise where a word is no option of the command, but a setting of what it is asked to run."""
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option in {*known, "--", "--help"}:
            continue
        name = option.removeprefix("--").replace("-", "_")
        found = next((s for kind in _kinds(command, words) for s in kind.settings() if s.name == name), None)
        if found is not None:
            typed = value if equals else _value(found, words[number + 1 :])
            raise UsageError(
                f"{name} is a setting, not an option: expected --set {name}=…, got {option}",
                hint=f"--set {shlex.quote(f'{name}={typed}')}",
            )


def _value(setting: Setting, rest: Sequence[str]) -> str:
    """What was typed behind the option; in capitals what should have been."""
    if rest and (not rest[0].startswith("-") or re.match(r"-[\d.]", rest[0])):
        return rest[0]
    return "true" if setting.kind == SIGN else "VALUE"


def _kinds(command: str, words: Sequence[str]) -> Iterator[type[Config]]:
    """The configurations of the study or of the paper's figures that are named among the words."""
    from curvescope.papers import PAPERS, figures_of, find_figure
    from curvescope.studies import STUDIES, find

    if command in ("diagnose", "compare"):
        yield find(command).Config
    for word in words:
        if command == "reproduce" and word in PAPERS:
            yield from (find_figure(word, figure).Config for figure in figures_of(word, more=True))
        elif command != "reproduce" and word in STUDIES:
            yield find(word).Config

"""Options and arguments that several commands have: one spelling, one meaning, one word of help."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from glob import glob
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, final

import typer
from typer.core import TyperCommand

from curvescope.core.config import Config, Setting
from curvescope.core.errors import UsageError
from curvescope.data.corpora import CORPORA
from curvescope.data.task_names import TASKS
from curvescope.models.zoo import BUNDLED, REVISIONS
from curvescope.papers import PAPERS
from curvescope.studies import STUDIES


def studies(incomplete: str = "") -> list[str]:
    """Studies that `run` takes."""
    return _begun(STUDIES, incomplete)


def papers(incomplete: str = "") -> list[str]:
    """Papers that `reproduce` takes."""
    return _begun(PAPERS, incomplete)


def models(incomplete: str = "") -> list[str]:
    """Bundled models, then files and folders."""
    return [*_begun(BUNDLED, incomplete), *_files(incomplete)]


def revisions(incomplete: str = "") -> list[str]:
    """Checkpoints of bundled models."""
    return _begun(REVISIONS, incomplete)


def sides(incomplete: str = "") -> list[str]:
    """Complete a side of `compare`: bundled models, their checkpoints as NAME@REVISION, files and folders."""
    pairs = [f"{model}@{revision}" for model in BUNDLED for revision in REVISIONS]
    return [*_begun([*BUNDLED, *pairs], incomplete), *_files(incomplete)]


def sections(incomplete: str = "") -> list[str]:
    """Sections and studies of `report`; of a list the last one is completed."""
    from curvescope.report.study_selection import names

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _begun(names(), last)]


def data(incomplete: str = "") -> list[str]:
    """Corpora and tasks, then files and folders."""
    return [*_begun([*CORPORA, *(f"task:{name}" for name in TASKS)], incomplete), *_files(incomplete)]


def dtypes(incomplete: str = "") -> list[str]:
    """Precisions."""
    return _begun(("float32", "float64", "bfloat16", "float16"), incomplete)


def devices(incomplete: str = "") -> list[str]:
    """Kinds of devices."""
    return _begun(("auto", "cpu", "cuda", "mps"), incomplete)


def profiles(incomplete: str = "") -> list[str]:
    """Complete a profile, quick or full."""
    return _begun(("quick", "full"), incomplete)


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str) -> list[str]:
    return sorted(glob(f"{incomplete}*")) if incomplete else []


EVERYWHERE = "Every command takes --debug (the traceback of an error) and --help."
MODEL = "Bundled name (tiny-gpt), folder, hub id, checkpoint, or TOML file."
Out = Annotated[Path, typer.Option("--out", help="Folder for run folders.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Force = Annotated[bool, typer.Option("--force", help="Compute anew what is finished.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Of the data sample and the probes.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="float32 or float64; bfloat16 and float16 keep weights so, and widen them.",
        autocompletion=dtypes,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu, cuda, …; auto (the default): CUDA if there is one.",
        autocompletion=devices,
    ),
]  # fmt: skip
Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="Corpus (sample, python-stdlib), file, folder, images:FOLDER, task:NAME?OPTION=VALUE.",
        autocompletion=data,
    ),
]  # fmt: skip
Tokens = Annotated[int | None, typer.Option("--tokens", help="Counted targets of a text.")]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", help="A tokenizer.json, or a folder that has one; default the model's own."),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", help="Checkpoint of a bundled model, or revision of a hub id.",
        autocompletion=revisions,
    ),
]  # fmt: skip
Blocks = Annotated[list[str] | None, typer.Option("--blocks", help="Globs such as 'L0.*'; repeatable.")]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoints", help="Folders or revisions, or a folder of them: a,b; repeatable.",
        autocompletion=revisions,
    ),
]  # fmt: skip
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting, NAME=VALUE, a list as 0,1; repeatable.")
]
Settings = Annotated[
    bool, typer.Option("--settings", help="List the settings with defaults and meaning, and end.")
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile", help="quick (a minute or so) or full (the study's or the paper's own settings).",
        autocompletion=profiles,
    ),
]  # fmt: skip
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="How long it may take: 90s, 3min, 1h; what is not set is chosen."),
]
Parallel = Annotated[
    str,
    typer.Option(
        "--parallel", help="On several ranks (torchrun) divide data, probes or pieces, auto by size; or the "
        "model, shards: torchrun --nproc-per-node 4 -m curvescope run spectrum MODEL --parallel shards.",
    ),
]  # fmt: skip


SIGN = "true or false"  # the kind of a setting that may stand without a value, as an option does


Tables = Annotated[bool, typer.Option("--tables", help="Print the tables too.")]

SETTINGS = {
    "data": Data,
    "tokens": Tokens,
    "tokenizer": Tokenizer,
    "revision": Revision,
    "dtype": Dtype,
    "device": Device,
    "blocks": Blocks,
    "checkpoints": Checkpoints,
    "seed": Seed,
}
"""Options that are settings of studies; one that is not given is None."""
WISHES: dict[str, tuple[Any, Any]] = {
    "profile": (Profile, None),
    "budget": (Budget, None),
    "parallel": (Parallel, "auto"),
    "force": (Force, False),
    "tables": (Tables, False),
    "json": (AsJson, False),
    "out": (Out, Path("runs")),
    "quiet": (Quiet, False),
}
"""Options that say how a study is run, with their defaults."""


def declares(settings: str, wishes: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes options of `SETTINGS` and `WISHES`, which are declared there alone.

    The command gets the settings as the dictionary `given`, and where there are wishes these as `wish`, a
    dictionary of arguments of `study_run.Wish`.
    """
    kinds = {name: (SETTINGS[name], None) for name in settings.split()}
    kinds |= {name: WISHES[name] for name in wishes.split()}

    def declared(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**values: Any) -> None:
            from curvescope.cli.typed.settings_parsing import split

            given = {name: values.pop(name) for name in settings.split()}
            if "checkpoints" in given:
                given["checkpoints"] = split(given["checkpoints"])
            wish = {"as_json" if name == "json" else name: values.pop(name) for name in wishes.split()}
            command(**values, given=given, **({"wish": wish} if wishes else {}))

        own = signature(command, eval_str=True).parameters.values()
        parameters = [each for each in own if each.name not in ("given", "wish")]
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in kinds.items()
        ]
        vars(called)["__signature__"] = Signature(parameters)
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return declared


@final
class Settable(TyperCommand):
    """A command whose settings are given with --set; one that is written as an option is explained."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The words as options and arguments."""
        known = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        args = with_own_options(str(self.name), args)
        explain(str(self.name), args, known)
        return super().parse_args(ctx, args)


def with_own_options(command: str, words: Sequence[str]) -> list[str]:
    """The words, with options that the named study alone has as --set.

    `--query TEXT --query OTHER` becomes `--set 'query=["TEXT", "OTHER"]'`.
    """
    own = {f"--{s.name}": s.name for kind in _kinds(command, words) for s in kind.settings() if s.option}
    rest, values, pending = list[str](), dict[str, list[str]](), list(words)
    while pending:
        option, equals, value = pending.pop(0).partition("=")
        if option in own and (equals or pending):
            values.setdefault(own[option], []).append(value if equals else pending.pop(0))
        else:
            rest.append(f"{option}{equals}{value}")
    pairs = [f"{name}={json.dumps(given, ensure_ascii=False)}" for name, given in values.items()]
    return [*(word for pair in pairs for word in ("--set", pair)), *rest]


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
    """Return the value after the option; in capitals the kind of value that is missing."""
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

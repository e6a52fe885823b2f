"""Options and arguments that several commands share, and their completion in the shell."""

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


def complete_studies(incomplete: str = "") -> list[str]:
    """Complete the name of a study."""
    return _starting_with(STUDIES, incomplete)


def complete_papers(incomplete: str = "") -> list[str]:
    """Complete the name of a paper."""
    return _starting_with(PAPERS, incomplete)


def complete_models(incomplete: str = "") -> list[str]:
    """Complete a model: bundled names, then files and folders."""
    return [*_starting_with(BUNDLED, incomplete), *_files(incomplete)]


def complete_revisions(incomplete: str = "") -> list[str]:
    """Complete a checkpoint of a bundled model."""
    return _starting_with(REVISIONS, incomplete)


def complete_sides(incomplete: str = "") -> list[str]:
    """Complete a side of `compare`: bundled models, their checkpoints as NAME@REVISION, files and folders."""
    pairs = [f"{model}@{revision}" for model in BUNDLED for revision in REVISIONS]
    return [*_starting_with([*BUNDLED, *pairs], incomplete), *_files(incomplete)]


def complete_sections(incomplete: str = "") -> list[str]:
    """Complete a section or study of `report`, the last one if a list is typed."""
    from curvescope.report.study_selection import names

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting_with(names(), last)]


def complete_data(incomplete: str = "") -> list[str]:
    """Complete a data set: corpora and tasks, then files and folders."""
    return [*_starting_with([*CORPORA, *(f"task:{name}" for name in TASKS)], incomplete), *_files(incomplete)]


def complete_dtypes(incomplete: str = "") -> list[str]:
    """Complete a dtype."""
    return _starting_with(("float32", "float64", "bfloat16", "float16"), incomplete)


def complete_devices(incomplete: str = "") -> list[str]:
    """Complete a kind of device."""
    return _starting_with(("auto", "cpu", "cuda", "mps"), incomplete)


def complete_profiles(incomplete: str = "") -> list[str]:
    """Complete a profile, quick or full."""
    return _starting_with(("quick", "full"), incomplete)


def _starting_with(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str) -> list[str]:
    return sorted(glob(f"{incomplete}*")) if incomplete else []


COMMON_OPTIONS_HELP = "Every command takes --debug (show the traceback of an error) and --help."
MODEL = "Model: bundled name (tiny-gpt), folder, hub id, checkpoint, or TOML file."
Out = Annotated[Path, typer.Option("--out", help="Folder in which run folders are created.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Hide the progress on stderr.")]
Force = Annotated[bool, typer.Option("--force", help="Compute again even if finished.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the data sample and the probes.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Data type: float32, float64; bfloat16 and float16 only store the weights.",
        autocompletion=complete_dtypes,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="Device: cpu, cuda, …; auto (the default) takes CUDA if available.",
        autocompletion=complete_devices,
    ),
]  # fmt: skip
Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="Corpus (sample, python-stdlib), file, folder, images:FOLDER, task:NAME?OPTION=VALUE.",
        autocompletion=complete_data,
    ),
]  # fmt: skip
Tokens = Annotated[int | None, typer.Option("--tokens", help="Number of target tokens of a text.")]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", help="File tokenizer.json or its folder. Default: the model's own."),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", help="Checkpoint of a bundled model, or revision of a hub id.",
        autocompletion=complete_revisions,
    ),
]  # fmt: skip
Blocks = Annotated[
    list[str] | None, typer.Option("--blocks", help="Select blocks by a glob such as 'L0.*'; repeatable.")
]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoints", help="Checkpoints a,b: folders, revisions, or a folder of them; repeatable.",
        autocompletion=complete_revisions,
    ),
]  # fmt: skip
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Set any setting: NAME=VALUE, a list as 0,1; repeatable.")
]
Settings = Annotated[
    bool, typer.Option("--settings", help="List the settings with defaults and meaning, and exit.")
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile", help="Profile: quick (about a minute) or full (the study's or paper's own settings).",
        autocompletion=complete_profiles,
    ),
]  # fmt: skip
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Time limit: 90s, 3min, 1h; chooses the settings that you leave out."),
]
Parallel = Annotated[
    str,
    typer.Option(
        "--parallel", help="Divide over torchrun's ranks: data, probes, pieces, shards (the model), or auto "
        "(by size): torchrun --nproc-per-node 4 -m curvescope run spectrum MODEL --parallel shards.",
    ),
]  # fmt: skip


BOOLEAN_KIND = "true or false"  # `Setting.kind` of a setting whose option needs no value


Tables = Annotated[bool, typer.Option("--tables", help="Also print the tables.")]

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
"""Options that are settings of studies. The value is None if the user leaves the option out."""
RUN_OPTIONS: dict[str, tuple[Any, Any]] = {
    "profile": (Profile, None),
    "budget": (Budget, None),
    "parallel": (Parallel, "auto"),
    "force": (Force, False),
    "tables": (Tables, False),
    "json": (AsJson, False),
    "out": (Out, Path("runs")),
    "quiet": (Quiet, False),
}
"""Options of a run besides the study's settings, with their defaults."""


def declares(settings: str, run_options: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes options of `SETTINGS` and `RUN_OPTIONS`.

    The command receives the settings as the dictionary `given`. It receives the options of the run as the
    dictionary `run_options`, the arguments of `study_run.RunOptions`.
    """
    kinds = {name: (SETTINGS[name], None) for name in settings.split()}
    kinds |= {name: RUN_OPTIONS[name] for name in run_options.split()}

    def declared(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**values: Any) -> None:
            from curvescope.cli.arguments.settings_parsing import split

            given = {name: values.pop(name) for name in settings.split()}
            if "checkpoints" in given:
                given["checkpoints"] = split(given["checkpoints"])
            if run_options:
                values["run_options"] = {
                    "as_json" if name == "json" else name: values.pop(name) for name in run_options.split()
                }
            command(**values, given=given)

        own = signature(command, eval_str=True).parameters.values()
        parameters = [parameter for parameter in own if parameter.name not in ("given", "run_options")]
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in kinds.items()
        ]
        vars(called)["__signature__"] = Signature(parameters)
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return declared


@final
class Settable(TyperCommand):
    """A command with --set. Its parser explains settings that the user types as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words into options and arguments."""
        known = {name for option in self.params for name in (*option.opts, *option.secondary_opts)}
        args = study_options_as_settings(str(self.name), args)
        refuse_settings_as_options(str(self.name), args, known)
        return super().parse_args(ctx, args)


def study_options_as_settings(command: str, words: Sequence[str]) -> list[str]:
    """Rewrite options that only the named study has as --set.

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
    pairs = [f"{name}={json.dumps(texts, ensure_ascii=False)}" for name, texts in values.items()]
    return [*(word for pair in pairs for word in ("--set", pair)), *rest]


def refuse_settings_as_options(command: str, words: Sequence[str], known: set[str]) -> None:
    """Raise UsageError if a word is not an option of the command, but a setting of the study to run."""
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option in {*known, "--", "--help"}:
            continue
        name = option.removeprefix("--").replace("-", "_")
        setting = next(
            (s for kind in _kinds(command, words) for s in kind.settings() if s.name == name), None
        )
        if setting is not None:
            typed = value if equals else _value(setting, words[number + 1 :])
            raise UsageError(
                f"{name} is a setting, not an option: expected --set {name}=…, got {option}",
                hint=f"--set {shlex.quote(f'{name}={typed}')}",
            )


def _value(setting: Setting, rest: Sequence[str]) -> str:
    """Return the value after the option, or VALUE if there is none."""
    if rest and (not rest[0].startswith("-") or re.match(r"-[\d.]", rest[0])):
        return rest[0]
    return "true" if setting.kind == BOOLEAN_KIND else "VALUE"


def _kinds(command: str, words: Sequence[str]) -> Iterator[type[Config]]:
    """Yield the configurations of the study, or of the paper's figures, that the words name."""
    from curvescope.papers import PAPERS, figures_of, find_figure
    from curvescope.studies import STUDIES, find

    if command in ("diagnose", "compare"):
        yield find(command).Config
    for word in words:
        if command == "reproduce" and word in PAPERS:
            yield from (find_figure(word, figure).Config for figure in figures_of(word, more=True))
        elif command != "reproduce" and word in STUDIES:
            yield find(word).Config

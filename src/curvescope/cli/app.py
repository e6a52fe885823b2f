"""Commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvescope import __version__
from curvescope.cli.options import Settable
from curvescope.core.config import Value

app = typer.Typer(
    name="curvescope",
    help="A microscope for the curvature and geometry of Transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[
    str, typer.Argument(help="Bundled name (tiny-gpt), folder saved by curvescope, or TOML file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Out = Annotated[Path, typer.Option(help="Folder for run folders.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Alone = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; print the folder alone.")]


def _studies() -> list[str]:
    from curvescope.studies import STUDIES

    return list(STUDIES)


def _papers() -> list[str]:
    from curvescope.papers import PAPERS

    return list(PAPERS)


def _models() -> list[str]:
    from curvescope.models.zoo.names import BUNDLED

    return list(BUNDLED)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"curvescope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """A microscope for the curvature and geometry of Transformers."""


@app.command("list")
def list_names(json: AsJson = False) -> None:
    """What can be named: studies, papers, models, corpora, tasks, losses.

    Example: curvescope list
    """
    from curvescope.cli import catalogue

    catalogue.show(as_json=json)


@app.command()
def info(
    model: Model,
    json: AsJson = False,
    revision: Annotated[str | None, typer.Option(help="Checkpoint: initial, early, middle, final.")] = None,
    heads: Annotated[bool, typer.Option(help="List the blocks of single heads too.")] = False,
    blocks: Annotated[
        list[str] | None, typer.Option(help="List only blocks that match, e.g. 'L0.*'; repeatable.")
    ] = None,
) -> None:
    """What a model is made of: roles, blocks, parameters, what was switched, what to know about it.

    Examples: curvescope info tiny-gpt --revision early; curvescope info tiny-gpt --blocks 'L0.h*.W_Q'
    """
    from curvescope.cli import model_info

    model_info.show(model, revision=revision, heads=heads, blocks=blocks or (), as_json=json)


@app.command(cls=Settable)
def run(
    study: Annotated[
        str, typer.Argument(help="Name of a study: see `curvescope list`.", autocompletion=_studies)
    ],
    model: Annotated[
        str | None, typer.Argument(help="As for `info`; default tiny-gpt.", autocompletion=_models)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Corpus (sample, python-stdlib), file, folder, or task:NAME.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Counted targets of a text.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json, or a folder that has one; default the model's own.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Checkpoint of a bundled model.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    blocks: Annotated[list[str] | None, typer.Option(help="Globs such as 'L0.*'; repeatable.")] = None,
    experiments: Annotated[
        list[str] | None, typer.Option(help="Of a study that has several: a,b; repeatable.")
    ] = None,
    checkpoints: Annotated[
        list[str] | None, typer.Option(help="Folders or revisions, or a folder of them: a,b; repeatable.")
    ] = None,
    query: Annotated[
        list[str] | None, typer.Option(help="A text that `influence` asks about; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the data sample and the probes.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="Any setting, NAME=VALUE, a list as 0,1; repeatable.")
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List the study's settings with defaults and meaning.")
    ] = False,
    profile: Annotated[
        str | None, typer.Option(help="quick (a minute) or full (the study's own settings).")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="How long it may take: 90s, 3min, 1h; what is not set is chosen.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compute anew what is finished.")] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Print the tables too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    out: Out = Path("runs"),
    quiet: Alone = False,
) -> None:
    """Run a study and save its numbers, tables and figures in a run folder.

    A run that was stopped goes on where it was when the same command is given again; one that is finished is
    shown. `curvescope run STUDY --settings` lists what can be set.

    Examples: curvescope run spectrum; curvescope run spectrum tiny-gpt --data notes.txt --set num_probes=8
    """
    from curvescope.cli import study_run
    from curvescope.cli.asking import split

    if settings:
        study_run.show_settings(study)
        return
    given: dict[str, Value] = {
        "model": model,
        "data": data,
        "tokens": tokens,
        "tokenizer": tokenizer,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "blocks": blocks,
        "experiments": split(experiments),
        "checkpoints": split(checkpoints),
        "query": query,
        "seed": seed,
    }
    wish = study_run.Wish(
        out, quiet, alone=quiet, force=force, tables=tables, as_json=json, profile=profile, budget=budget
    )
    study_run.show(study, config, set or [], given, wish)


@app.command(cls=Settable)
def diagnose(
    model: Annotated[str, typer.Argument(help="As for `info`.", autocompletion=_models)] = "tiny-gpt",
    data: Annotated[str | None, typer.Option(help="Corpus, file, folder, or task:NAME; as in `run`.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate that is meant.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd (the default), adam or adamw.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    state: Annotated[str | None, typer.Option(help="File of Adam's state_dict.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Counted targets of a text.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="As in `run`.")] = None,
    revision: Annotated[str | None, typer.Option(help="Checkpoint of a bundled model.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the data sample and the probes.")] = None,
    set: Annotated[list[str] | None, typer.Option(help="Any setting, NAME=VALUE; repeatable.")] = None,
    budget: Annotated[str | None, typer.Option(help="How long it may take, as in `run`.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Compute anew what is finished.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print findings as a list of objects.")] = False,
    out: Out = Path("runs"),
    quiet: Quiet = False,
) -> None:
    """What is wrong with a model, if anything: findings, worst first, with numbers, errors and evidence.

    The same as `run diagnose`, which prints tables too; the exit code is 0 whatever is found.

    Examples: curvescope diagnose tiny-gpt; curvescope diagnose MODEL --data notes.txt --lr 0.001 --json
    """
    from curvescope.cli import diagnosis, study_run

    given: dict[str, Value] = {
        "model": model,
        "data": data,
        "lr": lr,
        "optimizer": optimizer,
        "momentum": momentum,
        "optimizer_state": state,
        "tokens": tokens,
        "tokenizer": tokenizer,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "seed": seed,
    }
    wish = study_run.Wish(out, quiet, force=force, as_json=json, budget=budget)
    diagnosis.show(set or [], given, wish)


@app.command()
def runs(
    out: Out = Path("runs"),
    remove: Annotated[list[Path] | None, typer.Option(help="Remove this run folder; repeatable.")] = None,
    others: Annotated[list[Path] | None, typer.Argument(help="With --remove: further folders.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before removing.")] = False,
    json: AsJson = False,
) -> None:
    """The run folders that are there: study, model, data, settings, date, size, finished or not.

    Examples: curvescope runs; curvescope runs --remove runs/spectrum/20260101-120000-0123abcd
    """
    from curvescope.cli import runs_list
    from curvescope.core.errors import UsageError

    if others and not remove:
        raise UsageError(
            f"expected --remove before {others[0]}", hint=f"curvescope runs --remove {others[0]}"
        )
    if remove:
        runs_list.remove([*remove, *(others or [])], sure=yes)
    else:
        runs_list.show(out, as_json=json)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a cs.CurvatureMonitor: its out=.")],
    once: Annotated[bool, typer.Option("--once", help="Print what is there and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the last row as an object and end.")] = False,
) -> None:
    """The curvature of a training run while it goes on: λ_max, η·λ_max against its threshold, sharp blocks.

    On a terminal it is shown live until the run is finished, and Ctrl-C leaves; in a pipe every measurement
    is a line.

    Examples: curvescope watch runs/mine; curvescope watch runs/mine --once; curvescope watch runs/mine > log
    """
    from curvescope.cli import watch_run

    watch_run.show(run, once=once, as_json=json)


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs, or folders of runs; without one, spectrum is run on tiny-gpt."),
    ] = None,
    page: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    out: Out = Path("runs"),
    quiet: Quiet = False,
) -> None:
    """One self-contained HTML page from run folders; a run that is not finished is left out.

    Examples: curvescope report; curvescope report runs; curvescope report runs/spectrum/* --page spectra.html
    """
    from curvescope.cli import study_run

    study_run.report(runs or [], page=page, out=out, quiet=quiet)


@app.command(cls=Settable)
def reproduce(
    paper: Annotated[
        str, typer.Argument(help="Name of a paper: see `curvescope list`.", autocompletion=_papers)
    ],
    model: Annotated[
        str | None, typer.Argument(help="For a paper that is measured on any model: the same as in `run`.")
    ] = None,
    figure: Annotated[
        list[str] | None, typer.Option(help="One of its figures; repeatable. All by default.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="quick (minutes, the default) or full (the paper's own repeats).")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="The paper's own random numbers, where they can be had.")
    ] = False,
    experiment: Annotated[
        list[str] | None, typer.Option(help="Glob over the experiments of a figure; repeatable.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (the default), cuda, …")] = None,
    set: Annotated[
        list[str] | None, typer.Option(help="Any setting of a figure, KEY=VALUE; repeatable.")
    ] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List the settings of the figures with defaults and meaning.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; default reproductions/PAPER.")
    ] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Draw stored results again; compute nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure a paper's figures again: pictures, tables and arrays, published next to measured.

    A run that was stopped goes on where it was when the same command is given again. `curvescope reproduce
    PAPER --settings` lists what can be set.

    Examples: curvescope reproduce ormaniec2025 --figure heatmap; curvescope reproduce ormaniec2025 --draw;
    curvescope reproduce molina2023 tiny-gpt
    """
    from curvescope.cli import reproduce as command

    if settings:
        command.show_settings(paper, figure or [])
        return
    command.check_model(paper, figure or [], model, draw=draw)

    given: dict[str, Value] = {
        "profile": profile,
        "replay": replay or None,
        "device": device,
        "experiments": experiment,
        "model": model,
    }
    command.show(paper, figure or [], set or [], given, out=out, draw=draw, quiet=quiet)


@app.command(cls=Settable)
def bench(
    what: Annotated[str, typer.Argument(help="hvp: products of our engines and of other libraries.")],
    model: Annotated[str, typer.Option(help="gpt2, llama or neox, with random weights.")] = "gpt2",
    size: Annotated[str, typer.Option(help="small (a million parameters) or 124M.")] = "small",
    batch_size: Annotated[int, typer.Option(help="Sequences.")] = 8,
    seq_len: Annotated[int, typer.Option(help="Tokens of each.")] = 128,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    tf32: Annotated[bool, typer.Option("--tf32", help="Matrix products in TF32.")] = False,
    set: Annotated[list[str] | None, typer.Option(help="Any setting, KEY=VALUE; repeatable.")] = None,
    out: Out = Path("runs"),
    quiet: Quiet = False,
) -> None:
    """What a Hessian or Gauss-Newton product costs here: time in gradients, memory, distance to float64.

    Examples: curvescope bench hvp; curvescope bench hvp --size 124M --seq-len 1024 --device cuda --tf32
    """
    from curvescope.cli import study_run
    from curvescope.core.errors import UsageError

    if what != "hvp":
        raise UsageError(f"expected hvp, got {what!r}", hint="curvescope bench hvp")
    given: dict[str, Value] = {
        "model": model,
        "size": size,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "device": device,
        "tf32": tf32,
    }
    wish = study_run.Wish(out, quiet, tables=True)
    study_run.show("hvp", None, set or [], given, wish)


@app.command()
def doctor(json: AsJson = False) -> None:
    """What is installed, which engines and devices work, whether test models are found.

    Example: curvescope doctor
    """
    from curvescope.cli import checkup

    if not checkup.show(as_json=json):
        raise typer.Exit(1)

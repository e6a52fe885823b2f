"""Commands that run one study: any, the diagnosis, the comparison, the benchmark of products."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from curvescope.cli.typed import options
from curvescope.cli.typed.options import (
    MODEL,
    ConfigFile,
    Set,
    Settings,
    declares,
)
from curvescope.core.config import Value


@declares(
    "data tokens tokenizer revision dtype device blocks checkpoints seed",
    "profile budget parallel force tables json out quiet",
)
def run(
    study: Annotated[
        str, typer.Argument(help="Name of a study: see `curvescope list`.", autocompletion=options.studies)
    ],
    model: Annotated[
        str | None,
        typer.Argument(help=f"{MODEL} Default: the study's own.", autocompletion=options.models),
    ] = None,
    config: ConfigFile = None,
    set: Set = None,
    settings: Settings = False,
    *,
    given: dict[str, Value],
    wish: dict[str, Any],
) -> None:
    """Run a study and save its numbers and figures.

    The run folder has numbers, tables and figures.

    A run that was stopped goes on where it was when the same command is given again; one that is finished is
    shown. `curvescope run STUDY --settings` lists what can be set, and which settings are options of that
    study. With --quiet the folder alone is printed.

    Examples: curvescope run spectrum; curvescope run spectrum tiny-gpt --data notes.txt --set num_probes=8
    """
    from curvescope.cli import study_run

    if settings:
        study_run.show_settings(study)
        return
    given |= {"model": model}
    wishes = study_run.Wish(alone=wish["quiet"], **wish)
    study_run.show(study, config, set or [], given, wishes)


@declares("data tokens tokenizer revision dtype device seed", "budget parallel force json out quiet")
def diagnose(
    model: Annotated[str, typer.Argument(help=MODEL, autocompletion=options.models)] = "tiny-gpt",
    lr: Annotated[float | None, typer.Option("--lr", help="The learning rate that is meant.")] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="sgd (the default), adam or adamw.")
    ] = None,
    momentum: Annotated[float | None, typer.Option("--momentum", help="Of sgd.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="File of Adam's state_dict.")] = None,
    set: Set = None,
    *,
    given: dict[str, Value],
    wish: dict[str, Any],
) -> None:
    """Diagnose a model or a monitored run.

    Lists findings, worst first, with numbers, errors and evidence.

    The same as `run diagnose`, which prints tables too; the exit code is 0 whatever is found.

    Examples: curvescope diagnose tiny-gpt; curvescope diagnose MODEL --data notes.txt --lr 0.001 --json
    """
    from curvescope.cli import diagnosis, study_run

    given |= {
        "model": model,
        "lr": lr,
        "optimizer": optimizer,
        "momentum": momentum,
        "optimizer_state": state,
    }
    diagnosis.show(set or [], given, study_run.Wish(**wish))


@declares("tokens tokenizer dtype device blocks seed", "profile budget parallel force tables json out quiet")
def compare(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SIDE",
            help="Models as in `run`, checkpoints as NAME@REVISION; one with several --data. Default: "
            "tiny-gpt@initial tiny-gpt@final.",
            autocompletion=options.sides,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Corpus, file, folder, images:FOLDER or task:NAME; repeatable for one model.",
            autocompletion=options.data,
        ),
    ] = None,
    set: Set = None,
    settings: Settings = False,
    *,
    given: dict[str, Value],
    wish: dict[str, Any],
) -> None:
    """Compare models, checkpoints or data sets.

    Differences have 95 % intervals.

    λ_max, λ_min, trace, norm, what the GGN misses, loss, densities and blocks, each against the first. The
    same as `run compare`.

    Examples: curvescope compare tiny-gpt@initial tiny-gpt@final; curvescope compare pre.toml post.toml --data
    task:addition; curvescope compare tiny-gpt --data sample --data notes.txt
    """
    from curvescope.cli import study_run

    if settings:
        study_run.show_settings("compare")
        return
    texts = data or []
    given |= {
        "models": sides,
        "data": texts[0] if len(texts) == 1 else None,
        "datasets": texts if len(texts) > 1 else None,
    }
    wishes = study_run.Wish(alone=wish["quiet"], **wish)
    study_run.show("compare", None, set or [], given, wishes)


@declares("device seed", "force json out quiet")
def bench(
    what: Annotated[
        str,
        typer.Argument(
            help="hvp: products of our engines and of other libraries; attention: its derivatives."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="gpt2, llama, neox or encoder (nn.TransformerEncoder), with random weights."
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size", help="small (a million parameters), 124M, 350M, 1.5B, or 8B (a Llama on CUDA)."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Sequences.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", help="Tokens of each.")] = None,
    tf32: Annotated[bool | None, typer.Option("--tf32", help="Matrix products in TF32.")] = None,
    columns: Annotated[
        list[int] | None,
        typer.Option("--columns", help="Our products with so many columns at once too; may be repeated."),
    ] = None,
    set: Set = None,
    *,
    given: dict[str, Value],
    wish: dict[str, Any],
) -> None:
    """Measure the cost of curvature products.

    Time and memory of Hessian and GGN products, or of derivatives of attention.

    Products are in gradients. Where the package has figures of a device of the same name, they stand beside
    those measured, and what takes over 10 % more time or memory is told. Whom to measure: --set
    'contenders=hessian,ggn checkpoint'; `curvescope run hvp --settings` lists all of them. Derivatives of
    attention are in those of PyTorch's plain path, over lengths, widths and masks (`curvescope run attention
    --settings`).

    Examples: curvescope bench hvp; curvescope bench attention; curvescope bench hvp --size 124M --seq-len
    1024 --device cuda --tf32 --columns 4 --columns 8; curvescope bench hvp --model llama --size 8B
    --batch-size 1 --device cuda --tf32
    """
    from curvescope.cli import study_run
    from curvescope.core.errors import UsageError

    if what not in ("hvp", "attention"):
        raise UsageError(f"expected hvp or attention, got {what!r}", hint="curvescope bench hvp")
    given |= {
        "model": model,
        "size": size,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "tf32": tf32,
        "columns": columns,
    }
    study_run.show(what, None, set or [], given, study_run.Wish(tables=True, **wish))

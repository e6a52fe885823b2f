"""Commands that run one study: `run`, `diagnose`, `compare` and `bench`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from curvescope.cli.arguments import options
from curvescope.cli.arguments.options import (
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
        str,
        typer.Argument(
            help="Name of a study: see `curvescope list`.", autocompletion=options.complete_studies
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"{MODEL} Default: the study's own model.", autocompletion=options.complete_models
        ),
    ] = None,
    config: ConfigFile = None,
    set: Set = None,
    settings: Settings = False,
    *,
    given: dict[str, Value],
    run_options: dict[str, Any],
) -> None:
    """Run a study and save its numbers and figures.

    The run folder contains numbers, tables and figures.

    After an interruption the same command resumes. If the run is already finished, the command shows it.
    `curvescope run STUDY --settings` lists the settings, and which of them are also options of that study.
    --quiet prints only the folder.

    Examples: curvescope run spectrum; curvescope run spectrum tiny-gpt --data notes.txt --set num_probes=8
    """
    from curvescope.cli import study_run

    if settings:
        study_run.show_settings(study)
        return
    given |= {"model": model}
    options = study_run.RunOptions(print_only_folder=run_options["quiet"], **run_options)
    study_run.show(study, config, set or [], given, options)


@declares("data tokens tokenizer revision dtype device seed", "budget parallel force json out quiet")
def diagnose(
    model: Annotated[str, typer.Argument(help=MODEL, autocompletion=options.complete_models)] = "tiny-gpt",
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate to check.")] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help="Optimizer: sgd (the default), adam or adamw.")
    ] = None,
    momentum: Annotated[float | None, typer.Option("--momentum", help="Momentum of sgd.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="File with Adam's state_dict.")] = None,
    set: Set = None,
    *,
    given: dict[str, Value],
    run_options: dict[str, Any],
) -> None:
    """Diagnose a model or a monitored run.

    Lists findings, worst first, with numbers, errors and evidence.

    `run diagnose` does the same and also prints tables. The exit code is 0 even if there are findings.

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
    diagnosis.show(set or [], given, study_run.RunOptions(**run_options))


@declares("tokens tokenizer dtype device blocks seed", "profile budget parallel force tables json out quiet")
def compare(
    sides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SIDE",
            help="Models as in `run`, or checkpoints as NAME@REVISION; a single model needs several --data. "
            "Default: tiny-gpt@initial tiny-gpt@final.",
            autocompletion=options.complete_sides,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Corpus, file, folder, images:FOLDER or task:NAME; repeatable with one model.",
            autocompletion=options.complete_data,
        ),
    ] = None,
    set: Set = None,
    settings: Settings = False,
    *,
    given: dict[str, Value],
    run_options: dict[str, Any],
) -> None:
    """Compare models, checkpoints or data sets.

    Every difference has a 95 % interval.

    Compares λ_max, λ_min, trace, norm, the functional part, loss, densities and blocks of each side with the
    first. `run compare` does the same.

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
    options = study_run.RunOptions(print_only_folder=run_options["quiet"], **run_options)
    study_run.show("compare", None, set or [], given, options)


@declares("device seed", "force json out quiet")
def bench(
    what: Annotated[
        str,
        typer.Argument(
            help="hvp: products of our engines and of other libraries; attention: derivatives of attention."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Architecture with random weights: gpt2, llama, neox or encoder (nn.TransformerEncoder).",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size", help="Size: small (a million parameters), 124M, 350M, 1.5B, or 8B (a Llama on CUDA)."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Number of sequences.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", help="Tokens per sequence.")] = None,
    tf32: Annotated[bool | None, typer.Option("--tf32", help="Compute matrix products in TF32.")] = None,
    columns: Annotated[
        list[int] | None,
        typer.Option("--columns", help="Also measure our products with this many columns; repeatable."),
    ] = None,
    set: Set = None,
    *,
    given: dict[str, Value],
    run_options: dict[str, Any],
) -> None:
    """Measure the cost of curvature products.

    Measures time and memory of Hessian and GGN products, or of derivatives of attention.

    The unit of a product is one gradient. If the package has stored figures of the same device, the table
    shows both and marks what takes over 10 % more time or memory. --set 'contenders=hessian,ggn checkpoint'
    chooses what to measure; `curvescope run hvp --settings` lists all contenders. The unit of a derivative
    of attention is that of PyTorch's plain path; `curvescope run attention --settings` lists its lengths,
    widths and masks.

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
    study_run.show(what, None, set or [], given, study_run.RunOptions(tables=True, **run_options))

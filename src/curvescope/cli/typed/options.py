"""Options and arguments that several commands have: one spelling, one meaning, one word of help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from curvescope.cli.typed import completion

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
        autocompletion=completion.dtypes,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", help="cpu, cuda, …; auto (the default): CUDA if there is one.",
        autocompletion=completion.devices,
    ),
]  # fmt: skip
Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="Corpus (sample, python-stdlib), file, folder, task:NAME or task:NAME?OPTION=VALUE.",
        autocompletion=completion.data,
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
        autocompletion=completion.revisions,
    ),
]  # fmt: skip
Blocks = Annotated[list[str] | None, typer.Option("--blocks", help="Globs such as 'L0.*'; repeatable.")]
Checkpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoints", help="Folders or revisions, or a folder of them: a,b; repeatable.",
        autocompletion=completion.revisions,
    ),
]  # fmt: skip
Query = Annotated[
    list[str] | None, typer.Option("--query", help="A text that `influence` asks about; repeatable.")
]
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
        autocompletion=completion.profiles,
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

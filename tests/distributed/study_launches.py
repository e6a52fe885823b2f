"""The command line on ranks, as torchrun and srun start it; and what may happen to a rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

import curvescope.studies.blocks
import curvescope.studies.spectrum  # noqa: F401
from curvescope.cli import main
from curvescope.data import tasks
from curvescope.distributed import division
from curvescope.operators import Hessian
from curvescope.runs import folder as run_folder
from curvescope.runs import resumable_loop

SMALL = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"
SETTINGS = {
    "dtype": "float64", "tokens": 16, "seq_len": 16, "batch_size": 64, "num_steps": 4, "num_probes": 2,
    "num_eigenvalues": 1, "num_trace_probes": 2, "num_map_probes": 1, "max_products": 12,
}  # fmt: skip
BLOCKS = {
    "dtype": "float64", "tokens": 16, "seq_len": 16, "batch_size": 64, "num_trace_probes": 2,
    "num_norm_probes": 2, "num_small_probes": 2, "num_sharp_steps": 3, "max_exact": 3, "num_steps": 3,
    "num_density_probes": 1, "max_products": 8, "extremes": "L0.W_Q", "density": "L0.W_K",
}  # fmt: skip
Trouble = Callable[[], None]


def torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def slurm(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(ranks), "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def alone(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {}


def at_sum(
    number: int,
    happens: Callable[[], object],
    room: ModuleType | type = division,
    name: str = "add_over_ranks",
) -> Trouble:
    """Something that happens before the n-th sum, over ranks or of another function."""

    def prepare() -> None:
        own, count = getattr(room, name), 0

        def counted(*given: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                happens()
            return own(*given)

        setattr(room, name, counted)

    return prepare


def no_memory() -> None:
    """The rank's own part of a product fails."""

    def own(*given: object) -> None:
        raise MemoryError("no room")

    division._Divided._own_sequences = own  # pyright: ignore[reportAttributeAccessIssue]


def fails_alone() -> None:
    """An error that the ranks have not agreed on, while others compute."""

    def own(*given: object) -> None:
        raise ZeroDivisionError("by chance")

    resumable_loop._saving_products = own  # pyright: ignore[reportAttributeAccessIssue]


def wrong() -> None:
    """The rank's pieces of products are wrong."""
    own = Hessian.undivided

    def scaled(*given: Any) -> tuple[Tensor, float]:
        total, num_terms = own(*given)
        return total * 1.01, num_terms

    Hessian.undivided = scaled


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(
    folder: Path,
    name: str,
    ranks: int,
    words: list[str],
    environment: Callable[[int, int, int], dict[str, str]] = torchrun,
    trouble: Trouble | None = None,
) -> dict[str, object]:
    """Run a command on ranks; the last has the trouble."""
    port, children = free_port(), []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            for number, kind in ((1, "out"), (2, "err")):
                file = os.open(folder / f"{name}.{rank}.{kind}", os.O_CREAT | os.O_WRONLY)
                os.dup2(file, number)
            os.environ.update(environment(rank, ranks, port), CURVESCOPE_PATIENCE="3")
            try:
                if trouble is not None and rank == ranks - 1:
                    trouble()
                main(words)
            except Exception:  # a rank that went on as the parent would launch everything again
                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, os.WUNTRACED)[1]) for child in children[:-1]]
    if trouble is not None and codes and ranks > 1:  # one that was stopped does not end by itself
        _, status = os.waitpid(children[-1], os.WUNTRACED)
        if os.WIFSTOPPED(status):
            os.kill(children[-1], signal.SIGKILL)
            _, status = os.waitpid(children[-1], 0)
    else:
        _, status = os.waitpid(children[-1], 0)
    codes.append(os.waitstatus_to_exitcode(status))
    said = [
        [(folder / f"{name}.{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(ranks)
    ]
    return {"codes": codes, "said": said}


def here(folder: Path, name: str, words: list[str]) -> dict[str, object]:
    """A command in this process: what it loads, its children have."""
    with (folder / f"{name}.out").open("w") as out, redirect_stdout(out), suppress(SystemExit):
        main(words)
    return {}


def launch_shards(folder: Path, words: Callable[[str, str], list[str]], model: str) -> dict[str, object]:
    """Those that spread the model."""
    lost = at_sum(12, killed, Hessian, "undivided")  # inside of a piece of several products
    sets = [word for name, value in BLOCKS.items() for word in ("--set", f"{name}={value}")]
    data = [model, "--data", "task:addition", "--parallel", "shards", "--out"]
    blocks = ["run", "blocks", *sets, *data]
    stopped_at = launch(folder, "shards_killed", 2, words("shards", "shards"), trouble=lost)
    return {
        "shards_killed": stopped_at,
        "shards_kept": sorted(path.name for path in (folder / "shards").rglob("*.products")),
        "shards": launch(folder, "shards", 3, words("shards", "shards")),
        "shards_again": launch(folder, "shards_again", 1, words("shards", "shards"), alone),
        "shards_wrong": launch(folder, "shards_wrong", 2, words("wrong", "shards"), trouble=wrong),
        "shards_refused": launch(
            folder, "shards_refused", 2, ["run", "propagation", *data, str(folder / "refused")]
        ),
        "blocks": launch(folder, "blocks", 2, [*blocks, str(folder / "blocks")]),
        "blocks_one": here(folder, "blocks_one", [*blocks, str(folder / "blocks_one")]),
    }


def launch_all(folder: Path) -> None:
    """Every launch, into `launches.json`: its exit codes, and what ranks printed on stdout and stderr."""
    run_folder.write_figures = lambda *given: None  # pyright: ignore[reportAttributeAccessIssue]
    tasks.task_data = partial(tasks.task_data, num_sequences=8)  # pyright: ignore[reportAttributeAccessIssue]
    model = folder / "small.toml"
    model.write_text(SMALL, encoding="utf-8")
    sets = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    command = ["run", "spectrum", str(model), "--data", "task:addition", "--blocks", "L0.W_[QV]", *sets]

    def words(out: str, parallel: str = "data") -> list[str]:
        return [*command, "--out", str(folder / out), "--parallel", parallel]

    found = {
        "one": here(folder, "one", words("one")),
        "killed": launch(folder, "killed", 2, words("killed"), trouble=at_sum(30, killed)),
        "fewer": launch(folder, "fewer", 1, words("killed"), alone),
        "failed": launch(folder, "failed", 2, words("more"), trouble=no_memory),
        "stopped": launch(folder, "stopped", 2, words("more"), trouble=at_sum(20, stopped)),
        "by_chance": launch(folder, "by_chance", 2, words("more"), trouble=fails_alone),
        "more": launch(folder, "more", 3, words("more", "probes")),
        "pieces": launch(folder, "pieces", 2, words("pieces", "pieces"), slurm),
        "again": launch(folder, "again", 2, words("pieces"), slurm),
        **launch_shards(folder, words, str(model)),
    }
    (folder / "launches.json").write_text(json.dumps(found), encoding="utf-8")

"""Ranks for tests: one process imports everything, then forks; each rank prints lines, which must be equal.

A module of tasks calls `run_ranks(tasks)` when it is the main one; `said_by(module, ranks)` starts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 60
Task = Callable[[Path], object]


def said_by(script: str, ranks: int, folder: Path) -> list[str]:
    """What each rank printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-W", "ignore", script, str(ranks), str(folder)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(folder / f"said-{rank}").read_text() for rank in range(ranks)]


def run_ranks(by_number: Mapping[int, Iterable[Task]]) -> None:
    """Fork as many ranks as the command line says, with the tasks of that number, and wait for them."""
    ranks, folder = int(sys.argv[1]), Path(sys.argv[2])
    tasks, children = by_number[ranks], []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os._exit(_rank(rank, ranks, folder, tasks))
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


def _rank(rank: int, ranks: int, folder: Path, tasks: Iterable[Task]) -> int:
    torch.set_num_threads(1)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS)
    )
    try:
        with (folder / f"said-{rank}").open("w") as file:
            for task in tasks:
                try:
                    found = task(folder)
                except Exception as error:
                    if "--debug" in sys.argv:
                        traceback.print_exc()
                    found = f"{type(error).__name__} {error}"
                print(task.__name__, found, file=file, flush=True)
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

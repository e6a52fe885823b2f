"""Ranks for tests: a process that has imported everything forks them; each writes what it found."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 120
Task = Callable[[], object]


def run_ranks(tasks: Iterable[Task], ranks: int, folder: Path) -> None:
    """What each rank says of each task, its name and what it gave or raised, in `said-RANKS-RANK`."""
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os._exit(_rank(rank, ranks, folder, tasks))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), codes


def _rank(rank: int, ranks: int, folder: Path, tasks: Iterable[Task]) -> int:
    torch.set_num_threads(1)
    meet, wait = f"file://{folder / f'meet-{ranks}'}", timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=wait)
    try:
        with (folder / f"said-{ranks}-{rank}").open("w") as file:
            for task in tasks:
                start, found = time.process_time(), _found(task)
                print(task.__name__, found, file=file, flush=True)
                if "--debug" in sys.argv:
                    print(rank, task.__name__, f"{time.process_time() - start:.2f} s")
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _found(task: Task) -> object:
    try:
        return task()
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        return f"{type(error).__name__} {error}"

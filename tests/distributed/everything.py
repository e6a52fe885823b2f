"""All that the tests of this package do on ranks, started once and imported once: FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import data_tasks
import piece_tasks
import study_launches
import torch
from forked import run_ranks

if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in data_tasks.OPERATORS:  # computed once, and known to every rank
        data_tasks.whole(name)
    for ranks, tasks in data_tasks.TASKS.items():
        run_ranks([*tasks, *piece_tasks.TASKS], ranks, place)
    study_launches.launch_all(place)

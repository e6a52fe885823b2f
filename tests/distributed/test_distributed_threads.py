"""Ranks with unequal numbers of threads take the same steps and find the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).parent / "unequal_threads.py"


# Threads that wait for each other sleep. Awake, five threads on two processors take four times as long.
ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
SLOW = [
    ((2, 1, 2), "network"), ((1, 2, 1), "network"), ((1, 2, 3), "transformer"), ((2, 1), "transformer"),
    ((3, 1), "network"),
]  # fmt: skip


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize(
    ("threads", "kind"),
    [((1, 2), "network"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_all_algorithms_agree_on_ranks_with_unequal_threads(threads, kind, tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(len(threads)), str(own), str(tmp_path / "m"), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ASLEEP},
        )
        for rank, own in enumerate(threads)
    ]
    try:
        found = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, found, strict=True):
        assert process.returncode == 0, errors[-2000:]
    lines = [said.splitlines() for said, _ in found]
    assert lines[0][-1] == "threads kept"
    assert all(other == lines[0] for other in lines[1:])

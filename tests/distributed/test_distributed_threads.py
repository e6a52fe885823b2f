"""Ranks with unequal numbers of threads take the same steps and find the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).parent / "unequal_threads.py"


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize(
    "threads", [(1, 2), *(pytest.param(t, marks=pytest.mark.slow) for t in ((2, 1, 2), (1, 2, 1)))]
)
def test_all_algorithms_agree_on_ranks_with_unequal_threads(threads, tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(len(threads)), str(own), str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(threads)
    ]
    found = [process.communicate(timeout=180) for process in started]
    for process, (_, errors) in zip(started, found, strict=True):
        assert process.returncode == 0, errors[-2000:]
    lines = [said.splitlines() for said, _ in found]
    assert lines[0][-1] == "threads kept"
    assert all(other == lines[0] for other in lines[1:])

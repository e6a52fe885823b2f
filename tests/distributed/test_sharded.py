"""Models that are spread over ranks: every operator and algorithm gives what one process gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sharded_rank
import torch.distributed as dist

ROUNDING = 1e-12
HF = ["gpt2", "llama", "fsdp-gpt2"] if find_spec("transformers") else []
EVERYTHING = ["zoo", *HF, "fsdp-zoo", "matrix", "algorithms"]
BRIEFLY = ["brief llama", "brief fsdp-gpt2"] if HF else ["brief fsdp-zoo"]
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def compared(folder: Path, ranks: int, cases: list[str]) -> dict[str, float]:
    """Errors by what was compared, the largest over ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-W", "ignore", sharded_rank.__file__, str(ranks), str(folder), *cases]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "errors-0.json").read_text())


def test_two_ranks_give_what_one_process_gives(tmp_path):
    found = compared(tmp_path, 2, ["brief zoo", *BRIEFLY, "order", "matrix", "counted", "moved", "refused"])
    assert {name: error for name, error in found.items() if not error <= ROUNDING} == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_everything_on_one_two_and_four_ranks(tmp_path, ranks):
    found = compared(tmp_path, ranks, EVERYTHING)
    assert {name: error for name, error in found.items() if not error <= ROUNDING} == {}


def test_four_ranks_give_the_same_products(tmp_path):
    """Of which one has no sequence, and two have nothing of some parameters."""
    found = compared(tmp_path, 4, ["brief zoo"])
    assert {name: error for name, error in found.items() if not error <= ROUNDING} == {}

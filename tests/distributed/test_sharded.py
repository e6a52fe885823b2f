"""Models that are spread over ranks: every operator and algorithm gives what one process gives."""

from __future__ import annotations

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


def compared(tmp_path: Path, ranks: int, cases: list[str]) -> dict[str, float]:
    """Errors by what was compared; this process is one of the ranks."""
    meet = str(tmp_path / "meet")
    words = [sys.executable, "-W", "ignore", sharded_rank.__file__]
    others = [
        subprocess.Popen([*words, str(rank), str(ranks), meet, *cases], stderr=subprocess.PIPE, text=True)
        for rank in range(1, ranks)
    ]
    try:
        found = sharded_rank.main(0, ranks, meet, cases)
        assert [process.wait(timeout=90) for process in others] == [0] * (ranks - 1)
    finally:
        for process in others:
            process.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def test_two_ranks_give_what_one_process_gives(tmp_path):
    found = compared(tmp_path, 2, ["brief zoo", *BRIEFLY, "matrix", "counted", "refused"])
    assert {name: error for name, error in found.items() if not error <= ROUNDING} == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_everything_on_one_two_and_four_ranks(tmp_path, ranks):
    found = compared(tmp_path, ranks, EVERYTHING)
    assert {name: error for name, error in found.items() if not error <= ROUNDING} == {}


def test_four_ranks_give_the_same_products(tmp_path):
    """Of which one has no sequence, and two have nothing of some parameters."""
    found = compared(tmp_path, 4, ["brief zoo", "matrix"])
    assert {name: error for name, error in found.items() if not error <= ROUNDING} == {}

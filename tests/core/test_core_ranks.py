"""Errors that every rank raises together."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
import two_ranks

from curvescope.core.ranks import in_step, shared_errors

EXPECTED = """\
agreed 3.0
own_product CurvescopeError rank 1: MemoryError: no room for a batch
algorithm CurvescopeError rank 1: a product of the operator is not finite (look for nan or inf in op @ v)
storing CurvescopeError rank 0: OSError: no space left
interrupted CurvescopeError rank 1: KeyboardInterrupt
same_mistake UsageError expected a dog, got a cat (bark)
alone looked
"""


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_two_ranks_raise_the_same_sentence_and_neither_waits(tmp_path, capsys):
    """This process is one of them."""
    meet = str(tmp_path / "meet")
    words = [sys.executable, "-W", "ignore", two_ranks.__file__, "1", meet]
    other = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        two_ranks.main(0, meet)
        said = [capsys.readouterr().out, other.communicate(timeout=90)[0]]
    finally:
        other.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert said == [EXPECTED, EXPECTED]


def test_one_process_pays_nothing_and_keeps_its_error():
    assert shared_errors() is shared_errors()  # nothing is made, nothing is asked
    wrong = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, shared_errors():
        raise wrong
    assert caught.value is wrong


def test_ranks_are_in_step_only_inside():
    alone = shared_errors()
    with in_step():
        assert shared_errors() is not alone
    assert shared_errors() is alone

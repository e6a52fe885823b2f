"""The grid on a card finds nothing; and, on any machine, it finds what it should."""

from __future__ import annotations

import os
import stat

import cuda_grid
import pytest
import torch
from grid_cases import BOUND, PRECISIONS, Case, cases, errors, few

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.cuda
@needs_cuda
def test_no_case_fails_on_the_card():
    budget = float(os.environ.get("GRID_SECONDS", "240"))
    groups = cuda_grid.all_groups(list(PRECISIONS), list(cuda_grid.WIDTHS))
    found = cuda_grid.run_grid(groups, budget=budget, jobs=os.cpu_count() or 1)
    assert not cuda_grid.failures(found), cuda_grid.summary(found)
    assert any(result["done"] for result in found["groups"].values()), cuda_grid.summary(found)


@pytest.mark.cuda
@needs_cuda
def test_compute_sanitizer_finds_nothing():
    sanitizer = cuda_grid.find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    groups = cuda_grid.all_groups(["full", "tf32"], list(cuda_grid.WIDTHS), sanitize=True)
    found = cuda_grid.run_grid(groups, sanitizer=sanitizer, budget=240, jobs=os.cpu_count() or 1)
    assert not cuda_grid.failures(found), cuda_grid.summary(found)


def test_the_grid_is_complete():
    made = cases()
    assert len(made) == len(set(made))
    assert {c.mask for c in made} == {"causal", "padded", "full", "window"}
    assert {c.Lq for c in made} == {c.Lk for c in made} == {1, 2, 15, 16, 17, 131, 1024}
    assert all(max(c.Lq, c.Lk) <= 131 for c in few())
    groups = cuda_grid.all_groups(["full"], [64])
    assert sorted(c for g in groups for c in cuda_grid._cases(g, False)) == sorted(made)


@pytest.mark.parametrize("case", [c for c in cases() if max(c.Lq, c.Lk) < 20][::7], ids=str)
def test_a_case_agrees_with_float64_in_torch(case: Case):
    for precision in ("full", "bf16"):
        found = errors(case, precision, 24, device="cpu", exact_on="cpu")
        assert max(found) < BOUND[precision]


def test_a_wrong_number_is_a_failure(monkeypatch):
    result = {"done": 0, "worst": [0.0] * 9, "failures": []}
    wrong = {"number": 0, "errors": [1e-7] * 8 + [float("inf")]}
    cuda_grid._note(result, "full:64", few()[0], wrong)
    assert [one["case"] for one in result["failures"]] == [str(few()[0])]


def test_a_process_that_dies_is_named_by_its_case_and_the_rest_goes_on(tmp_path):
    killer = tmp_path / "sanitizer"
    killer.write_text(
        '#!/bin/sh\ncase "$*" in *"--skip 0"*) echo \'{"begin": 0}\'; kill -9 $$;; esac\n'
        'echo \'{"begin": 1}\'; echo \'{"number": 1, "errors": [0,0,0,0,0,0,0,0,0]}\'\n'
        "echo ERROR SUMMARY: 0 errors\n"
    )
    killer.chmod(killer.stat().st_mode | stat.S_IEXEC)
    found = cuda_grid.run_grid(["full:64"], sanitizer=str(killer), budget=30, jobs=1, device="cpu")
    (line,) = cuda_grid.failures(found)
    assert str(few()[0]) in line
    assert found["groups"]["full:64"]["done"] == 1
    assert found["groups"]["full:64"]["not_reached"] == [str(case) for case in few()[2:]]
    assert "1 failures" in cuda_grid.summary(found)

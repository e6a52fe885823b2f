"""`torchrun … -m curvescope run`: one folder, one voice, and what happens when a rank is lost."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from commands import call
from curvescope.core.errors import UsageError
from curvescope.core.ranks.rank_environment import Launch, first_host, launch_of
from curvescope.studies.run_study import load

KEPT = "hint: finished work is saved: the same command resumes, with any number of ranks"
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-09,11]",
}  # fmt: skip


@pytest.fixture(scope="module")
def launches(ranks_done):
    return json.loads((ranks_done / "launches.json").read_text())


def numbers(out):
    """Every array of the three operators, and what is measured at the end, of the one run in a folder."""
    (path,) = (out / "spectrum").iterdir()
    result = load(path)[1]
    found = [np.array([result.loss, result.gradient_norm])]
    for part in result.parts.values():
        found += [part.density.nodes, part.extremes.values, part.traces.samples, part.map.frobenius]
    return found


@pytest.mark.parametrize("out", ["killed", "more", "pieces"])
def test_a_study_on_ranks_has_the_numbers_of_one_process(out, launches, ranks_done):
    """Killed on two ranks and ended by one process; failed thrice on two and ended on three; by pieces."""
    for found, wanted in zip(numbers(ranks_done / out), numbers(ranks_done / "one"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("name", "codes", "message"),
    [
        ("killed", [1, -9], f"error: another rank has ended\n{KEPT}\n"),
        ("failed", [1, 1], "error: rank 1: MemoryError: no room\n"),
        ("stopped", [1, -9], f"error: rank 1 has sent no sign of life for 3 seconds\n{KEPT}\n"),
        ("by_chance", [1, 1], f"error: ZeroDivisionError: by chance\n{KEPT}\n"),
    ],
)
def test_a_rank_that_is_lost_ends_all_with_one_message(name, codes, message, launches):
    found = launches[name]
    assert found["codes"] == codes
    errors = [err for _, err in found["said"]]
    assert sum(err.endswith(message) for err in errors) == 1
    assert "".join(errors).count("error:") == 1


@pytest.mark.parametrize("name", ["fewer", "more", "pieces", "again"])
def test_rank_0_alone_speaks(name, launches, ranks_done):
    found = launches[name]
    assert set(found["codes"]) == {0}
    (out, _), *others = found["said"]
    assert out.splitlines()[0].startswith("λ_max")
    assert others == [["", ""]] * len(others)


def test_a_run_goes_on_with_another_number_of_ranks(launches):
    lines = {name: launches[name]["said"][0][1].splitlines() for name in ("fewer", "more", "again")}
    assert lines["fewer"][0].startswith("resuming")
    assert re.search(r": [1-9]\d* of 16 pieces are already done$", lines["fewer"][0])
    told = "3 ranks, started by torchrun: a rank without a sign of life for 3 s is lost"
    assert lines["more"][0].startswith(told)
    assert lines["more"][1].startswith("resuming")
    assert lines["again"][1].startswith("already finished")


def test_torchrun_and_srun_say_which_rank_this_is():
    assert launch_of(TORCHRUN) == Launch(3, 4, 1, "host", 29500, "torchrun")
    found = launch_of(SLURM)
    assert found is not None
    assert found[:4] == (5, 8, 1, "gpu07")
    assert 20000 <= found.port < 50000
    assert launch_of({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "7"})[3:] == ("a", 7, "Slurm")


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_NTASKS": "8"}])
def test_one_process_is_no_launch(environment):
    """A batch script of Slurm is one process, whatever its job has."""
    assert launch_of(environment) is None


def test_what_is_missing_in_the_environment_is_said():
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        launch_of({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-007,12],x", "gpu003"),
        ("a[1-2]-ib,b", "a1-ib"),
        ("r[5]", "r5"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_a_command_for_one_process_is_refused_on_ranks(monkeypatch, capsys):
    for name, value in {**TORCHRUN, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = call("list", capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: this command is for one process, and torchrun started 4\n")


def test_a_way_to_divide_that_is_not_there(capsys):
    code, _, err = call("run", "spectrum", "--parallel", "columns", capsys=capsys)
    assert code == 2
    assert "auto, data, probes, pieces" in err

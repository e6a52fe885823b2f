"""Training on two ranks: the same weights with and without a monitor, and the numbers of one process."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
import training_ranks
from torch import nn

import curvescope as cs

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
SLOW = ["compiled", "sharded", "sharded_budget", "refused_fsdp"]


def launched(folder: Path, names: list[str]) -> dict[str, list[dict]]:
    """What the two ranks found of each case."""
    codes = training_ranks.launch(folder, names)
    logs = "".join(path.read_text()[-2000:] for path in folder.glob("log-*"))
    assert codes == [0, 0], logs
    found = {n: [json.loads((folder / f"{n}-{r}.json").read_text()) for r in range(2)] for n in names}
    for name, ranks in found.items():
        for each in ranks:
            assert "failed" not in each, (name, each["failed"])
    return found


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The cases that share one launch."""
    return launched(tmp_path_factory.mktemp("ranks"), SLOW)


def test_data_parallel_training_is_measured_by_rank_0(tmp_path):
    first, second = launched(tmp_path, ["data_parallel"])["data_parallel"]
    assert first["same"]
    assert second["same"]
    assert first["step"] == [0, 2, 4]
    assert second["step"] == []
    assert np.isfinite([first["lambda_max"], first["sharpness"], first["trace"]]).all()
    assert (tmp_path / "ddp" / "result.json").exists()


@pytest.mark.slow
def test_compiled_data_parallel_training(together):
    first, second = together["compiled"]
    assert first["same"]
    assert second["same"]
    assert first["step"] == [0, 2, 4]


@pytest.mark.slow
def test_fully_sharded_training_has_the_numbers_of_the_whole_model(together):
    first, second = together["sharded"]
    assert first["same"]
    assert second["same"]
    for name in ("step", "lambda_max", "sharpness", "weight_norm", "grad_norm"):
        np.testing.assert_array_equal(first[name], second[name])
    assert len(first["step"]) > 0
    for name in ("lambda_max", "sharpness"):
        wanted = np.array([truth[name] for truth in first["truths"]])
        errors = np.abs(np.array(first[name]) - wanted)
        assert (errors <= np.maximum(first[f"{name}_error"], 0.01 * wanted)).all()


@pytest.mark.slow
def test_all_ranks_of_a_sharded_model_decide_the_same(together):
    first, second = together["sharded_budget"]
    assert first["step"] == second["step"]
    assert len(first["step"]) > 0


@pytest.mark.slow
def test_fsdp_without_second_derivatives_is_refused_by_name(together):
    for rank in together["refused_fsdp"]:
        assert "FullyShardedDataParallel" in rank["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "package"), [("hugging_face", "accelerate"), ("lightning", "lightning")], ids=lambda x: x
)
def test_trainers_on_two_ranks(case, package, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    first, second = launched(tmp_path, [case])[case]
    assert first["same"]
    assert second["same"]
    assert first["step"] == [0, 2, 4]
    assert second["step"] == []
    assert np.isfinite(first["lambda_max"]).all()


@pytest.mark.slow
def test_a_rank_that_dies_does_not_hang_the_others(tmp_path):
    codes = training_ranks.launch(tmp_path, ["sharded_dies"])
    assert codes[1] == 7
    survivor = json.loads((tmp_path / "sharded_dies-0.json").read_text())
    assert survivor["seconds"] < training_ranks.SECONDS + 30
    assert survivor["error"]  # of the training's own exchange with the rank that is gone


def test_a_model_without_process_group_is_measured():
    monitor = cs.CurvatureMonitor(nn.DataParallel(training_ranks.gpt()), training_ranks.PROBE, budget=1.0)
    assert monitor.measure(0)["lambda_max"] > 0

"""Models of the hub, through the real client and a server on loopback that speaks the hub's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

HERE = Path(__file__).parent
CASES = HERE / "hub_cases.py"


def run(folder: Path, mode: str, **environment: str) -> dict[str, Any]:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, str(CASES), str(folder), mode],
        env={**known, "HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def online(folder: Path) -> dict[str, Any]:
    return run(folder, "online")


@pytest.mark.parametrize(
    ("case", "saved", "name"),
    [
        ("main", "main", "org/steps"),
        ("step1000", "step1000", "org/steps@step1000"),
        ("sharded", "sharded", "org/sharded"),
        ("private, with its token", "step1000", "org/private@step1000"),
        ("broken off", "large", "org/large"),
        ("stopped, in the cache", "step1000", "org/steps@step1000"),
    ],
)
def test_a_model_has_the_weights_of_its_revision(online: dict[str, Any], case: str, saved: str, name: str):
    assert online[case]["sum"] == online["truth"][saved]
    assert online[case]["name"] == name
    assert online[case]["tokenizer"]
    assert len(set(online["truth"].values())) == len(online["truth"])


def test_a_model_in_the_cache_is_not_downloaded_again(online: dict[str, Any]):
    assert online["again"]["sum"] == online["truth"]["step1000"]
    assert online["again"]["sent"] == 0


def test_a_download_that_breaks_off_goes_on_where_it_stopped(online: dict[str, Any]):
    assert online["broken off"]["ranges"] == [f"bytes={10 * 2**20}-"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("private", ["org/private", "private"]),
        ("missing", ["org/missing"]),
        ("gated", ["org/gated", "gated"]),
        ("no revision", ["org/steps", "'step7'"]),
        ("stopped, not in the cache", ["org/steps@step2000", "cache", "cannot be reached"]),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(online: dict[str, Any], case: str, words: list[str]):
    assert online[case]["error"] == "UsageError"
    assert "\n" not in online[case]["message"]
    assert all(word in online[case]["message"] for word in words)


def test_a_hub_that_does_not_answer_costs_no_minute_of_retries(online: dict[str, Any]):
    assert online["stopped, in the cache"]["seconds"] < 20
    assert online["stopped, not in the cache"]["seconds"] < 20


def test_offline_mode_uses_the_cache(online: dict[str, Any], folder: Path):
    offline = run(folder, "offline", HF_HUB_OFFLINE="1")
    assert offline["in the cache"]["sum"] == online["truth"]["step1000"]
    assert offline["not in the cache"]["error"] == "UsageError"
    assert "HF_HUB_OFFLINE" in offline["not in the cache"]["message"]


@pytest.mark.slow
def test_the_command_line_takes_revisions_of_a_hub_id(folder: Path, online: dict[str, Any]):
    done = run(folder, "commands")
    assert [study["code"] for study in done.values()] == [0, 0], done
    assert done["spectrum"]["verification"][0]["model"] == "org/steps@step1000"
    largest = max(
        row["eigenvalue"] for row in done["spectrum"]["tables"]["extremes"] if row["operator"] == "H"
    )
    whole = {row["checkpoint"]: row for row in done["gap"]["tables"]["gap"] if row["block"] == "all"}
    assert list(whole) == ["step1000", "step2000"]
    assert whole["step1000"]["lambda_max_H"] == pytest.approx(largest, rel=1e-4)
    assert abs(whole["step2000"]["lambda_max_H"] - largest) > 0.01 * largest

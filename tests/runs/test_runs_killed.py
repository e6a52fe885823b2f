"""Runs that are killed at any moment, model or data changed in between: resumed, or begun anew; right."""

import json
import multiprocessing
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import curvescope as cs
from curvescope.studies import run_study
from curvescope.tokenizers import BPETokenizer
from selection import some

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.usefixtures("undrawn")
CONFIG = cs.TransformerConfig(
    n_layers=1, d_model=8, n_heads=2, d_ff=8, vocab_size=260, n_ctx=16, init="scaled"
)
TEXTS = ["one text, and nothing else in it. " * 9, "quite another one: 1, 2, 3, 4, 5 and so on. " * 8]


@pytest.fixture(scope="module")
def processes():
    """Processes that begin with everything imported, and with no thread running."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["curvescope.studies.run_study", "curvescope.studies.spectrum"])
    return found


def write_model(path, seed):
    model = cs.load(replace(CONFIG, seed=seed), dtype="float64")
    cs.save(replace(model, tokenizer=BPETokenizer.train(TEXTS, 260)), path)


def write_data(path, number):
    path.write_text(TEXTS[number], encoding="utf-8")


def settings(path):
    return {
        "model": str(path / "model"), "data": str(path / "text.txt"), "dtype": "float64", "tokens": 32,
        "seq_len": 16, "batch_size": 2, "blocks": ["L0.ln1.g"], "map_blocks": ["L0.*"], "num_probes": 1,
        "num_steps": 4, "num_eigenvalues": 1, "num_trace_probes": 2, "num_map_probes": 1, "max_products": 6,
    }  # fmt: skip


def run(path, out):
    return run_study.run("spectrum", settings(path), out=out)[1]


def numbers(result):
    """Every array of the three operators, and what is measured at the end."""
    found = [np.array([result.loss, result.gradient_norm])]
    for part in result.parts.values():
        found += [part.density.nodes, part.extremes.values, part.traces.samples, part.map.frobenius]
    return found


def kill_and_change(processes, path, moments, *, seed, once_there="state/*/result.json"):
    """Kill a run at each of the moments, change something in half of the cases, and run it to its end.

    Moments are counted from when a file of its folder is there: the first piece's result, if not said.
    """
    chance, right, resumed = random.Random(seed), {}, 0
    versions = {"model": 0, "text": 0}

    def expected():
        key = tuple(versions.values())
        if key not in right:
            right[key] = numbers(run(path, path / "right"))
        return right[key]

    write_model(path / "model", 0)
    write_data(path / "text.txt", 0)
    start = time.monotonic()
    expected()
    whole = time.monotonic() - start
    for i, moment in enumerate(moments):
        out = path / f"runs{i}"
        process = processes.Process(target=run, args=(path, out))
        process.start()
        until = time.monotonic() + 60
        while not list(out.glob(f"spectrum/*/{once_there}")) and process.is_alive():
            assert time.monotonic() < until
            time.sleep(0.002)
        time.sleep(moment * whole)
        process.kill()
        process.join()
        if i % 2:
            what = chance.choice(["model", "text"])
            versions[what] = 1 - versions[what]
            write_model(path / "model", versions["model"])
            write_data(path / "text.txt", versions["text"])
        said = []
        result = run_study.run("spectrum", settings(path), out=out, say=said.append)[1]
        for found, want in zip(numbers(result), expected(), strict=True):
            np.testing.assert_array_equal(found, want)
        resumed += any("resuming" in line for line in said)
        if i % 2:
            assert not any("resuming" in line for line in said)
    return resumed


@pytest.mark.parametrize("moments", some([[0.0], [0.0, 0.0]], 1))
def test_a_few_kills(processes, moments, tmp_path):
    assert kill_and_change(processes, tmp_path, moments, seed=0) >= 1


def test_a_kill_in_the_middle_of_a_piece(processes, tmp_path):
    assert kill_and_change(processes, tmp_path, [0.0], seed=0, once_there="state/*.products") == 1


def test_the_stored_kills_ended_with_the_same_bits():
    stored = json.loads((BENCHMARKS / "results/kills/default.json").read_text(encoding="utf-8"))
    for name in ("spectrum", "blocks", "beyond"):
        cases = stored[name]["kills"]
        assert len(cases) >= 20
        assert all(case["same"] for case in cases)
        within = [case for case in cases if 0 < case["killed_after_products"][-1] < stored[name]["products"]]
        assert name == "beyond" or len(within) >= 5  # in the middle of the products


@pytest.mark.slow
def test_kills_before_the_first_piece_is_finished(processes, tmp_path):
    kill_and_change(processes, tmp_path, [0.0], seed=2, once_there="config.toml")


@pytest.mark.slow
def test_twenty_kills_at_random_moments(processes, tmp_path):
    chance = random.Random(1)
    resumed = kill_and_change(processes, tmp_path, [chance.random() for _ in range(20)], seed=1)
    assert resumed >= 3

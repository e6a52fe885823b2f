"""The same command once more: finished, stopped in the middle of a piece, or with no room left."""

import errno
import os

import numpy as np
import pytest
import torch

from curvescope.algorithms.spectra.density import SpectralDensity
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.result import Result
from curvescope.engines import SecondDerivative
from curvescope.operators import Hessian
from curvescope.runs.disk.atomic_files import check_writable
from curvescope.runs.folder import RunStopped
from curvescope.runs.listing import list_runs
from curvescope.studies import run_study

pytestmark = pytest.mark.usefixtures("undrawn", "few_sequences")
CHECK = 2  # products of the check of the Hessian, inside its first one
SMALL = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    few = {"num_probes": 1, "num_steps": 6, "num_eigenvalues": 1, "num_trace_probes": 2, "num_map_probes": 1}
    few |= {"max_products": 8, "map_blocks": ["L0.W_[QV]"]}
    return {"model": str(path), "data": "task:addition", "dtype": "float64", "batch_size": 64, **few}


def count_products(monkeypatch, stop_at=None):
    """Counts the products of the Hessian, and stops in one of them."""
    counted, own = [], Hessian._matmat

    def product(self, V):
        if len(counted) == stop_at:
            raise KeyboardInterrupt
        counted.append(V.shape[1])
        return own(self, V)

    monkeypatch.setattr(Hessian, "_matmat", product)
    return counted


def test_what_is_finished_is_read_unless_forced(settings, tmp_path, monkeypatch):
    said = []
    first, result = run_study.run("spectrum", settings, out=tmp_path / "runs")
    counted = count_products(monkeypatch)
    again, read = run_study.run("spectrum", settings, out=tmp_path / "runs", say=said.append)
    assert again == first
    assert said == [f"already finished: {first}"]
    assert not counted
    assert read.summary() == result.summary()
    for own, force in ((settings, True), ({**settings, "seed": 1}, False)):  # stopped as soon as it is begun
        with monkeypatch.context() as patch:
            count_products(patch, stop_at=1 + CHECK)
            with pytest.raises(RunStopped):
                run_study.run("spectrum", own, out=tmp_path / "runs", force=force)
    assert len(list(first.parent.iterdir())) == 3


@pytest.mark.parametrize("name", ["result.json", "arrays.npz"])
@pytest.mark.usefixtures("undrawn")
def test_a_finished_run_whose_files_are_damaged_is_set_aside_and_computed_again(name, settings, tmp_path):
    first, result = run_study.run("spectrum", settings, out=tmp_path / "runs")
    whole, said = (first / name).read_bytes(), []
    (first / name).write_bytes(whole[: len(whole) // 2])
    again, found = run_study.run("spectrum", settings, out=tmp_path / "runs", say=said.append)
    assert found.summary() == result.summary()
    assert any("damaged" in line for line in said)
    assert [run.path for run in list_runs(tmp_path / "runs")] == [again]
    assert run_study.run("spectrum", settings, out=tmp_path / "runs")[0] == again


def test_a_run_that_is_stopped_in_its_first_piece_goes_on_there(settings, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        whole = count_products(patch)
        _, want = run_study.run("spectrum", settings, out=tmp_path / "right")
    with monkeypatch.context() as patch:
        count_products(patch, stop_at=4 + CHECK)
        with pytest.raises(RunStopped) as stop:
            run_study.run("spectrum", settings, out=tmp_path / "runs")
    assert stop.value.standing == (0, 16, 4)
    said, told = [], []
    counted = count_products(monkeypatch)
    path, result = run_study.run(
        "spectrum", settings, out=tmp_path / "runs", say=said.append, progress=lambda *x: told.append(x[1])
    )
    assert len(counted) == len(whole) - 4
    for name, part in want.parts.items():
        np.testing.assert_array_equal(result.parts[name].density.nodes, part.density.nodes)
        np.testing.assert_array_equal(result.parts[name].extremes.values, part.extremes.values)
    assert said[0].startswith(f"resuming {path}: 0 of 16 pieces")
    assert said[1].startswith("H: eigenvalues from ")
    assert told == list(range(1, 17))
    assert not list(path.rglob("*.products"))


def test_a_resumed_run_does_not_tell_of_pieces_that_are_there(settings, tmp_path, monkeypatch):
    own = SpectralDensity.__init__
    made = []

    def second(self, *args, **rest):
        made.append(1)
        if len(made) == 2:
            raise KeyboardInterrupt
        own(self, *args, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(SpectralDensity, "__init__", second)
        with pytest.raises(RunStopped) as stop:
            run_study.run("spectrum", settings, out=tmp_path)
    first = stop.value.standing.pieces
    assert 0 < first < 16
    told, said = [], []

    def sixth(what, number, total):
        told.append(number)
        if number == first + 2:
            raise KeyboardInterrupt

    with pytest.raises(RunStopped):
        run_study.run("spectrum", settings, out=tmp_path, say=said.append, progress=sixth)
    assert told == [first + 1, first + 2]
    assert f"{first} of 16 pieces" in said[0]


def test_a_disk_that_fills_up_says_what_is_kept(settings, tmp_path, monkeypatch):
    own, saved = Result.save, []

    def save(self, place):
        saved.append(place)
        if len(saved) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return own(self, place)

    monkeypatch.setattr(Result, "save", save)
    with pytest.raises(CurvescopeError, match=r"the disk is full: 3 of 16 pieces are"):
        run_study.run("spectrum", settings, out=tmp_path / "runs")


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null", "FILE", "FILE/inside"])
def test_a_folder_that_takes_nothing_is_refused_before_the_work(place, settings, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    counted = count_products(monkeypatch)
    with pytest.raises(UsageError, match="expected a folder that can be written to"):
        run_study.run("spectrum", settings, out=place.replace("FILE", str(tmp_path / "file")))
    assert not counted


def test_a_full_disk_is_refused_and_nothing_is_left_behind(tmp_path, monkeypatch):
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    with pytest.raises(UsageError, match=r"only 1 MiB .* at least 16 MiB"):
        check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_memory_that_runs_out_is_a_line_in_the_log_and_no_end(settings, tmp_path, monkeypatch):
    _, want = run_study.run("spectrum", settings, out=tmp_path / "right")
    own, said = SecondDerivative.apply, []

    def product(self, engine, index, batch, rows, tangents, receive):
        if len(next(iter(tangents.values()))) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        own(self, engine, index, batch, rows, tangents, receive)

    monkeypatch.setattr(SecondDerivative, "apply", product)
    path, found = run_study.run("spectrum", settings, out=tmp_path / "runs", say=said.append)
    assert "memory ran out: from now on 1 column at a time" in said
    assert "memory ran out: from now on 1 column at a time" in (path / "log.txt").read_text(encoding="utf-8")
    np.testing.assert_allclose(
        found.parts["hessian"].extremes.values, want.parts["hessian"].extremes.values, rtol=1e-9
    )

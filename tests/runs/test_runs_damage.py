"""What happens to files: torn, flipped, a disk that is full. Noticed, said, and nothing else is lost."""

import json
import multiprocessing
import shutil
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from curvescope.algorithms import spectral_density
from curvescope.core.config import Config
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import Matrix
from curvescope.core.progress import listening
from curvescope.core.result import Result
from curvescope.runs.disk import atomic_files
from curvescope.runs.disk.atomic_files import SyncPace, explain_full_disk, sync_tree, write_atomically
from curvescope.runs.folder import RunFolder
from curvescope.runs.pieces import SUMS, Pieces
from curvescope.runs.resumable_loop import Piece, work_through


@dataclass(frozen=True)
class Numbers(Result):
    values: np.ndarray
    name: str


def worked(path, said=lambda line: None):
    """Three pieces, and which of them were done now."""
    done = []

    def make(i):
        done.append(i)
        return Numbers(np.full(1000, float(i)) / 3, f"number {i}")

    state = Pieces(path, tell=said)
    found = work_through([Piece(f"p{i}", partial(make, i)) for i in range(3)], state=state)
    return done, [found.take(Numbers, f"p{i}") for i in range(3)]


@pytest.mark.parametrize("file", ["result.json", "arrays.npz", SUMS])
@pytest.mark.parametrize("how", ["torn", "flipped", "emptied"])
def test_a_damaged_piece_is_done_again_and_the_others_are_not(file, how, tmp_path):
    want, said = worked(tmp_path)[1], []
    path = tmp_path / "p1" / file
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes(content[: {"torn": len(content) // 2, "flipped": None, "emptied": 0}[how]])
    done, found = worked(tmp_path, said.append)
    assert done == [1]
    assert len(said) == 1
    assert "p1 is damaged" in said[0]
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a.values, b.values)
    assert worked(tmp_path)[0] == []


def test_a_piece_without_digests_is_taken_at_its_word(tmp_path):
    worked(tmp_path)
    (tmp_path / "p1" / SUMS).unlink()
    assert worked(tmp_path)[0] == []


def test_a_piece_that_was_being_written_is_no_piece(tmp_path):
    worked(tmp_path)
    (tmp_path / "p2").rename(tmp_path / "p2.partial")
    assert list(Pieces(tmp_path)) == ["p0", "p1"]
    assert worked(tmp_path)[0] == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p0", "p1", "p2", "pid"]


def test_files_come_to_the_disk_before_their_names_and_folders_behind(tmp_path, monkeypatch):
    seen, fsync, own = [], atomic_files.os.fsync, atomic_files.Path.replace
    monkeypatch.setattr(atomic_files.os, "fsync", lambda handle: (seen.append("sync"), fsync(handle)))
    monkeypatch.setattr(atomic_files.Path, "replace", lambda a, b: (seen.append("name"), own(a, b)))
    write_atomically(tmp_path / "a", "text")
    assert seen == ["sync", "name", "sync"]
    assert (tmp_path / "a").read_text(encoding="utf-8") == "text"
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "d").touch()
    seen.clear()
    sync_tree(tmp_path / "b")
    assert seen == ["sync"] * 4  # d, c, b, and the folder that names b


def test_the_pace_is_ten_times_what_a_visit_takes(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(atomic_files.time, "monotonic", lambda: clock[0])
    pace = SyncPace()
    assert pace.due()
    with pace.visit():
        clock[0] += 0.5
    due = []
    for _ in range(6):
        clock[0] += 1.0
        due.append(pace.due())
    assert due == [False] * 4 + [True] * 2


def limited(path, answers):
    """Work with files of at most 6 kB, which `arrays.npz` of the last piece is not."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    def make(i):
        return Numbers(np.random.default_rng(i).normal(size=10 + 5000 * (i == 2)), "")

    try:
        with explain_full_disk(lambda: f"{len(state)} pieces are kept"):
            state = Pieces(path)
            work_through([Piece(f"p{i}", partial(make, i)) for i in range(3)], state=state)
    except CurvescopeError as error:
        answers.put(str(error))


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits")
def test_files_that_may_not_grow_are_one_sentence_and_nothing_is_lost(tmp_path):
    processes = multiprocessing.get_context("fork")
    answers = processes.Queue()
    process = processes.Process(target=limited, args=(tmp_path, answers))
    process.start()
    said = answers.get(timeout=60)
    process.join()
    assert said.startswith("the disk is full: 2 pieces are kept")
    assert "free some disk space" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p0", "p1", "pid"]
    json.loads((tmp_path / "p1" / "result.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Settings(Config):
    seed: int = 0


@dataclass(frozen=True)
class Density(Result):
    nodes: np.ndarray


def stopped_and_resumed(out, scale, *, stop=None):
    """A run of a density of scale · diag(1, …, 40), stopped at a product; lines and results."""
    said, contents = [], f"contents of {scale}"
    A = Matrix(scale * torch.diag(torch.arange(1.0, 41, dtype=torch.float64)))
    run = RunFolder(out, "density", Settings(), say=said.append)

    def halt(what, done, total):
        if done == stop:
            raise KeyboardInterrupt

    def density():
        return Density(spectral_density(A, num_probes=2, num_steps=8).nodes)

    pieces = [Piece("first", lambda: Density(np.full(3, scale))), Piece("density", density)]
    try:
        with listening(halt):
            found = work_through(pieces, contents=contents, state=run)
    except KeyboardInterrupt:
        return run.path / "state", said, None
    return run.path / "state", said, [found.take(Density, name).nodes for name in ("first", "density")]


def test_state_of_another_run_is_not_used(tmp_path):
    *_, right = stopped_and_resumed(tmp_path / "right", 3.0)
    other, *_ = stopped_and_resumed(tmp_path / "other", 1.0, stop=6)
    own, *_ = stopped_and_resumed(tmp_path / "own", 3.0, stop=6)
    assert sorted(path.name for path in other.iterdir()) == ["density.products", "first", "pid"]
    shutil.rmtree(own)
    shutil.copytree(other, own)
    _, said, found = stopped_and_resumed(tmp_path / "own", 3.0)
    for a, b in zip(found, right, strict=True):
        np.testing.assert_array_equal(a, b)
    assert sum("of another model" in line for line in said) == 1


def test_one_file_of_another_run_is_not_used(tmp_path):
    *_, right = stopped_and_resumed(tmp_path / "right", 3.0)
    other, *_ = stopped_and_resumed(tmp_path / "other", 1.0, stop=6)
    own, *_ = stopped_and_resumed(tmp_path / "own", 3.0, stop=6)
    shutil.copyfile(other / "density.products", own / "density.products")
    _, said, found = stopped_and_resumed(tmp_path / "own", 3.0)
    np.testing.assert_array_equal(found[1], right[1])
    assert sum("of another model" in line for line in said) == 1


def test_products_of_other_contents_in_a_folder_of_pieces_are_not_used(tmp_path):
    def density(scale, *, stop=None):
        A = Matrix(scale * torch.diag(torch.arange(1.0, 41, dtype=torch.float64)))

        def halt(what, done, total):
            if done == stop:
                raise KeyboardInterrupt

        piece = Piece("density", lambda: Density(spectral_density(A, num_probes=2, num_steps=8).nodes))
        with listening(halt):
            found = work_through([piece], contents=f"of {scale}", state=Pieces(tmp_path / "state"))
        return found.take(Density, "density").nodes

    with pytest.raises(KeyboardInterrupt):
        density(1.0, stop=6)
    assert (tmp_path / "state" / "density.products").exists()
    assert density(3.0).max() > 100

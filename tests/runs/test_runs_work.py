"""The loop over pieces: what is there is not done again, what belongs to other contents is not used."""

import json
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import CurvescopeError
from curvescope.core.result import Result
from curvescope.runs.disk.atomic_files import write_tables
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.folder import RunFolder
from curvescope.runs.pieces import Pieces
from curvescope.runs.resumable_loop import Piece, work_through
from curvescope.runs.study_result import Shown
from curvescope.studies import heads


@dataclass(frozen=True)
class Number(Result):
    value: int


@dataclass(frozen=True)
class Other(Result):
    value: int


class Work:
    """Two pieces that count how often they are done."""

    def __init__(self, start=0):
        self.done, self.start = 0, start

    def piece(self, i):
        self.done += 1
        return Number(self.start + i)

    def through(self, state, contents="one", **options):
        pieces = [Piece(f"p{i}", partial(self.piece, i), f"piece {i}") for i in range(2)]
        found = work_through(pieces, contents=contents, state=state, **options)
        return [found.take(Number, f"p{i}").value for i in range(2)]


def folder(path, **options):
    return RunFolder(path, "heads", heads.Config(), **options)


def place(kind, path):
    """A new value for the same state."""
    return {"mapping": Pieces(path / "state"), "folder": folder(path)}[kind]


@pytest.mark.parametrize("kind", ["mapping", "folder"])
def test_pieces_are_done_once(kind, tmp_path):
    work = Work()
    assert work.through(place(kind, tmp_path)) == [0, 1]
    assert work.through(place(kind, tmp_path)) == [0, 1]
    assert work.done == 2


@pytest.mark.parametrize("kind", ["mapping", "folder"])
def test_other_contents_begin_anew(kind, tmp_path):
    Work().through(place(kind, tmp_path))
    assert Work(10).through(place(kind, tmp_path), "two") == [10, 11]


def test_a_long_wait_is_announced_behind_the_first_piece_of_its_kind(tmp_path, monkeypatch):
    clock, said = [0.0], []
    monkeypatch.setattr("curvescope.runs.resumable_loop.time.monotonic", lambda: clock[0])

    def wait(seconds):
        clock[0] += seconds
        return Number(1)

    slow = [Piece(f"slow {i}", partial(wait, 9.0), kind="heads") for i in range(4)]
    quick = [Piece(f"quick {i}", partial(wait, 0.1), kind="pairs") for i in range(4)]
    work_through(
        [*slow, *quick, Piece("alone", partial(wait, 99.0))], state=folder(tmp_path, say=said.append)
    )
    assert len(said) == 1
    assert "27 s" in said[0]
    assert "heads" in said[0]


def test_a_mapping_of_unknown_origin_is_not_trusted():
    state = {"p0": Number(7)}
    assert Work().through(state) == [0, 1]
    assert Work(5).through(state) == [0, 1]


def test_what_was_begun_with_other_contents_stays_and_is_said(tmp_path):
    said = []
    Work().through(folder(tmp_path))
    Work(10).through(folder(tmp_path, say=said.append), "two")
    assert "beginning anew" in said[0]
    assert Work(20).through(folder(tmp_path, say=said.append)) == [0, 1]
    assert "resuming" in said[-1]


def test_progress_hears_of_every_piece():
    heard = []
    Work().through(None, progress=lambda *words: heard.append(words))
    assert heard == [("piece 0", 1, 2), ("piece 1", 2, 2)]


def test_a_piece_is_given_those_that_it_needs_also_when_a_run_goes_on():
    state, calls = {}, []
    first = Piece("first", lambda: calls.append("first") or Number(3))
    second = Piece("second", lambda found: Number(found.value + 1), needs=("first",))
    work_through([first], state=state)
    found = work_through([first, second], state=state)
    assert found.take(Number, "second").value == 4
    assert calls == ["first"]


def test_two_pieces_with_one_name_and_a_piece_of_another_kind():
    with pytest.raises(AssertionError, match="two pieces"):
        work_through([Piece("a", lambda: Number(1)), Piece("a", lambda: Number(2))])
    found = work_through([Piece("a", lambda: Number(1))])
    with pytest.raises(CurvescopeError, match="expected a Other"):
        found.take(Other, "a")


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    first, second = folder(tmp_path), folder(tmp_path)
    for run in (first, second):
        run.at("same")  # both look before either has begun
    for run in (first, second):
        run._pieces["p"] = Number(1)
    assert first.path != second.path
    assert second.path.name == f"{first.path.name}-2"


def test_a_fingerprint_sees_every_content():
    model, data = cs.load("tiny-gpt"), cs.task_data("addition")
    first = fingerprint(model, data)
    assert fingerprint(cs.load("tiny-gpt"), cs.task_data("addition")) == first
    assert fingerprint(model, cs.task_data("addition", seed=1)) != first
    assert fingerprint(cs.load("tiny-gpt", revision="early"), data) != first
    assert fingerprint(cs.load("tiny-gpt", dtype="float64"), data) != first
    weight = next(iter(model.module.parameters()))
    with torch.no_grad():
        weight[-1, -1] += 1e-6
    assert fingerprint(model, data) != first
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


def test_buffers_and_configurations_count():
    def of(*, eps=1e-5, moved=0.0):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2, eps=eps))
        for parameter in module.parameters():
            torch.nn.init.ones_(parameter)
        module.register_buffer("scale", torch.tensor(1.0 + moved), persistent=False)
        return fingerprint(cs.load(module))

    assert of() == of()
    assert len({of(), of(eps=1e-6), of(moved=1e-3)}) == 3


def test_two_outputs_with_one_name_are_refused(tmp_path):
    import pandas as pd

    @dataclass(frozen=True)
    class Twice(Shown):
        def summary(self):
            return []

        def captions(self):
            return {}

        def tables(self):
            return {"Keys": pd.DataFrame({"x": np.arange(2)})}

        def figures(self):
            return {}

        def files(self):
            return {"keys.csv": "x"}

    with pytest.raises(CurvescopeError, match="two outputs"):
        write_tables(Twice(), tmp_path)


def test_a_run_says_what_its_models_are_made_of(tmp_path):
    model = cs.load("tiny-gpt")
    inner = fingerprint(model)
    assert isinstance(inner, str)
    contents = fingerprint(inner, cs.load("tiny-gpt"), "words")
    assert [one["model"] for one in contents.models] == ["tiny-gpt"]
    run = folder(tmp_path)
    Work().through(run, contents=contents)
    (found,) = json.loads((run.path / "model.json").read_text(encoding="utf-8"))
    assert found["parameters"] == model.num_parameters == sum(row["parameters"] for row in found["blocks"])
    other = folder(tmp_path / "other")
    Work().through(other, contents="two")
    assert not (other.path / "model.json").exists()


def test_tables_are_given_as_rows_columns_or_frames():
    import pandas as pd

    @dataclass(frozen=True)
    class Rows(Shown):
        def tables(self):
            frame = pd.DataFrame({"x": [1, 2]})
            parts = [frame, frame.assign(x=[3, 4])]
            return {"rows": [{"x": 1}, {"x": 2}], "columns": {"x": [1, 2]}, "frame": frame, "parts": parts}

    found = Rows().tables()
    for name in ("rows", "columns", "frame"):
        assert found[name].equals(pd.DataFrame({"x": [1, 2]})), name
    assert found["parts"].equals(pd.DataFrame({"x": [1, 2, 3, 4]}))

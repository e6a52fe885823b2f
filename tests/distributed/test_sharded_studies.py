"""`torchrun … --parallel shards`: studies on a model of which every rank holds a part."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from curvescope.core.ranks import is_single_process, loads_sharded
from curvescope.core.ranks.collectives import single_process, use_division
from curvescope.studies.run_study import load

ROUNDING = 1e-12
KEPT = "hint: finished work is saved: the same command resumes, with any number of ranks"


@pytest.fixture(scope="module")
def launches(ranks_done):
    return json.loads((ranks_done / "launches.json").read_text())


def run_in(out, study):
    """The one run of a study in a folder."""
    (path,) = (out / study).iterdir()
    return path


def arrays(found, where):
    """Every number of a result, by where it is; residuals and overlaps are rounding alone."""
    if is_dataclass(found):
        parts = {f.name: getattr(found, f.name) for f in fields(found)}
        left_out = {k for k in parts if "residual" in k or k in ("asymmetry", "orthogonality")}
        left_out |= {k for k in parts if k.startswith("sampled")}  # not measured on sharded models
        yield from arrays({k: v for k, v in parts.items() if k not in left_out}, where)
    elif isinstance(found, dict):
        for name, value in found.items():
            yield from arrays(value, f"{where}.{name}")
    elif isinstance(found, int | float | np.ndarray):
        yield where, np.asarray(found, dtype=float)


def assert_same(out, wanted, study, *, scale):
    """All numbers to rounding, of their own size or of `scale`, below which a block is rounding alone."""
    ours, theirs = (dict(arrays(load(run_in(place, study))[1], study)) for place in (out, wanted))
    assert ours.keys() == theirs.keys()
    for where, x in ours.items():
        atol = ROUNDING * max(np.nanmax(np.abs(theirs[where]), initial=0.0), scale)
        np.testing.assert_allclose(x, theirs[where], rtol=0, atol=atol, err_msg=where)


def test_a_spectrum_in_pieces_has_the_numbers_of_one_process(launches, ranks_done):
    """Killed on two ranks, and ended on three."""
    assert_same(ranks_done / "shards", ranks_done / "one", "spectrum", scale=0.0)


def test_blocks_in_pieces_have_the_numbers_of_one_process(launches, ranks_done):
    """With sizes of whole blocks."""
    assert_same(ranks_done / "blocks", ranks_done / "blocks_one", "blocks", scale=1e-3)
    assert set(launches["blocks"]["codes"]) == {0}


def test_the_folder_is_that_of_the_whole_model(launches, ranks_done):
    """The same contents, so that one process finds what ranks have finished, and the same blocks."""
    ours, theirs = (run_in(ranks_done / out, "spectrum") for out in ("shards", "one"))
    assert ours.name[-8:] == theirs.name[-8:]
    told = [json.loads((path / "model.json").read_text())[0] for path in (ours, theirs)]
    assert told[0]["blocks"] == told[1]["blocks"]
    assert told[0]["roles"] == told[1]["roles"]
    err = launches["shards_again"]["said"][0][1]
    assert err.startswith("already finished")


def test_a_lost_rank_ends_all_and_the_run_goes_on_with_another_number(launches):
    lost = launches["shards_killed"]
    assert lost["codes"] == [1, -9]
    assert lost["said"][0][1].endswith(f"error: another rank has ended\n{KEPT}\n")
    kept = {name.removesuffix(".products").rpartition(".")[2] for name in launches["shards_kept"]}
    assert {"0-of-2", "1-of-2"} <= kept, "each rank its pieces of products"
    went_on = launches["shards"]["said"]
    line = went_on[0][1].splitlines()[1]
    assert line.startswith("resuming")
    assert not line.endswith((" 0 of 12 pieces were there", " 12 of 12 pieces were there"))
    assert went_on[1:] == [["", ""]] * 2
    assert launches["shards"]["codes"] == [0, 0, 0]


def test_all_ranks_check_the_operators_together(launches, ranks_done):
    found = json.loads((run_in(ranks_done / "shards", "spectrum") / "verification.json").read_text())
    checked = {one["operator"]: [check["name"] for check in one["checks"]] for one in found}
    assert checked["Hessian"] == ["symmetry", "finite difference"]
    assert {one["operator"]: one["left_out"] for one in found}["Hessian"] == ["columns"]
    assert checked["GGN"] == checked["FunctionalHessian"] == ["symmetry"]
    assert all(one["passed"] for one in found)


def test_a_wrong_piece_of_one_rank_fails_the_check(launches, ranks_done):
    found = launches["shards_wrong"]
    assert found["codes"] == [1, 1]
    said = "".join(err for _, err in found["said"])
    assert said.count("error: the Hessian of small failed its check") == 1
    assert not list((ranks_done / "wrong" / "spectrum").glob("*/result.json"))


def test_a_study_that_needs_the_whole_model_is_refused_before_any_work(launches, ranks_done):
    found = launches["shards_refused"]
    assert found["codes"] == [2, 2]
    said = "".join(err for _, err in found["said"])
    assert said.count("error:") == 1
    assert "expected a study that supports sharded models (spectrum, blocks, gap, compare)" in said
    assert "got propagation" in said
    assert "Traceback" not in said
    assert not (ranks_done / "refused").exists()


def test_a_rank_by_itself_spreads_nothing():
    """What rank 0 does alone while the others wait."""
    with use_division(None, models=True):
        assert loads_sharded()
        with single_process():
            assert is_single_process()
            assert not loads_sharded()
    assert not loads_sharded()

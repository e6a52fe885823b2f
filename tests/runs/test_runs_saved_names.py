"""Results that curvescope 0.1 saved still load, wherever their classes live now."""

import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from curvescope.core.moved import HOMES, RENAMED
from curvescope.core.result import Result, saved_name
from curvescope.operators import LossPlane

SAVED = json.loads((Path(__file__).parent / "data" / "saved_by_0_1.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SAVED)
def test_what_version_0_1_saved_loads(name, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(SAVED[name]), encoding="utf-8")
    np.savez(tmp_path / "arrays.npz")
    found = Result.load(tmp_path)
    assert type(found).__name__ == name.rpartition(".")[2]
    assert {field.name for field in fields(found)} >= set(SAVED[name]["fields"])
    found.save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "result.json").read_text(encoding="utf-8"))
    assert again["@class"] == name  # a name that was written once is kept


@pytest.mark.parametrize("name", HOMES)
def test_every_home_has_its_class(name):
    cls = getattr(import_module(HOMES[name]), name.rpartition(".")[2])
    assert cls.__module__ == HOMES[name]
    assert saved_name(cls) == name


def test_the_fixture_has_every_study_class_that_moved():
    assert set(SAVED) == {name for name in HOMES if name.startswith("curvescope.studies.")}


@pytest.mark.parametrize("now", RENAMED.values())
def test_every_renamed_class_is_there(now):
    module, _, name = now.rpartition(".")
    assert saved_name(getattr(import_module(module), name)) == now


def test_a_result_of_before_the_renaming_loads(tmp_path):
    plane = {
        "@class": "curvescope.operators.taylor.plane.Plane",
        "fields": {
            "names": ["u", "v"], "normalise": "filters", "a": {"@array": "a"}, "b": {"@array": "a"},
            "loss": {"@array": "loss"}, "here": 1.0, "slope": {"@array": "a"}, "lengths": {"@array": "a"},
            "curvature": {"@array": "loss"}, "cosine": 0.0, "num_losses": 4,
            "agreement": {
                "@class": "curvescope.operators.taylor.expansion.Agreement",
                "fields": {"tolerance": 0.1, "rounding": 0.0},
            },
        },
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps({"schema": 1, **plane}), encoding="utf-8")
    np.savez(tmp_path / "arrays.npz", a=np.zeros(2), loss=np.ones((2, 2)))
    found = LossPlane.load(tmp_path)
    assert found.normalize == "filters"
    assert found.loss.shape == (2, 2)

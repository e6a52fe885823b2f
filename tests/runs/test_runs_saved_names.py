"""Results that curvescope 0.1 saved still load, wherever their classes live now."""

import json
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import numpy as np
import pytest

import curvescope
from curvescope.core.errors import CurvescopeError
from curvescope.core.result import RENAMED, Result, result_class, saved_name
from curvescope.operators import LossPlane

SAVED = json.loads((Path(__file__).parent / "data" / "saved_by_0_1.json").read_text(encoding="utf-8"))
OLD = {  # full names of modules and flat names, as they were saved once
    "algorithms.spectra.density.SpectralDensity": "algorithms",
    "geometry.trajectory_average.Curve": "geometry",
    "geometry.probes.KeyProbe": "geometry",
    "closed_form.bounds_as_printed.PrintedBound": "closed_form",
    "operators.third_derivative.ThirdDerivative": "operators",
    "papers.ormaniec2025.statement_rows.Statement": "papers.ormaniec2025",
    "papers.ormaniec2025.growth.Sweep": "papers.ormaniec2025.growth",
}


def name_now(name: str) -> str:
    """Name of the class today: of old modules, too, whose packages have renamed it."""
    parts = name.split(".")
    keys = (".".join([*parts[:k], parts[-1]]) for k in range(len(parts) - 1, 1, -1))
    return next((RENAMED[key] for key in keys if key in RENAMED), name).rpartition(".")[2]


def write(folder: Path, tree: dict) -> Path:
    (folder / "result.json").write_text(json.dumps(tree), encoding="utf-8")
    np.savez(folder / "arrays.npz")
    return folder


@pytest.mark.parametrize("name", SAVED)
def test_what_version_0_1_saved_loads(name, tmp_path):
    found = Result.load(write(tmp_path, SAVED[name]))
    assert type(found).__name__ == name_now(name)
    assert {field.name for field in fields(found)} >= set(SAVED[name]["fields"])
    assert type(Result.load(found.save(tmp_path / "again"))) is type(found)


@pytest.mark.parametrize("name", OLD)
def test_a_class_is_found_under_the_name_of_an_old_module(name):
    cls = result_class(f"curvescope.{name}")
    assert cls.__name__ == name_now(f"curvescope.{name}")
    assert cls.__module__.startswith(f"curvescope.{OLD[name]}")


def test_a_saved_name_is_that_of_one_class():
    for module in walk_packages(curvescope.__path__, "curvescope."):
        if "triton" not in module.name and not module.name.endswith("__main__"):
            import_module(module.name)
    ours = {cls for cls in every(Result) - {Result} if cls.__module__.startswith("curvescope.")}
    assert len(ours) > 150
    names = {saved_name(cls): f"{cls.__module__}.{cls.__name__}" for cls in ours}
    assert len(names) == len(ours)
    assert set(RENAMED.values()) <= set(names)
    code = (
        "import json, sys; from curvescope.core.result import result_class;"
        "found = {name: result_class(name) for name in json.load(sys.stdin)};"
        "print(json.dumps({name: f'{cls.__module__}.{cls.__name__}' for name, cls in found.items()}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(names)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == names  # by a process that had imported none of them


def every(cls: type[Result]) -> set[type[Result]]:
    """All classes below this one."""
    return {cls}.union(*map(every, cls.__subclasses__()))


@pytest.mark.parametrize("name", ["curvescope.algorithms.Gone", "curvescope.gone.Gone", "elsewhere.Gone"])
def test_a_class_that_is_gone_is_refused_by_its_name(name, tmp_path):
    with pytest.raises(CurvescopeError, match=name):
        Result.load(write(tmp_path, {"schema": 1, "@class": name, "fields": {}}))


@pytest.mark.parametrize("change", [{"unheard": 1}, None])
def test_other_fields_than_those_of_the_class_are_refused_by_their_names(change, tmp_path):
    tree = json.loads(json.dumps(SAVED["curvescope.studies.weight_norms.ranks.Correlation"]))
    tree["fields"] = {**tree["fields"], **change} if change else {}
    with pytest.raises(CurvescopeError, match="unheard" if change else "expected a Correlation"):
        Result.load(write(tmp_path, tree))


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

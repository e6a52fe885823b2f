"""Results survive a folder, and nothing is ever pickled."""

from __future__ import annotations

import json
import zipfile
from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from curvescope.core.errors import CurvescopeError
from curvescope.core.result import Result


@dataclass(frozen=True)
class Leaf(Result):
    values: np.ndarray
    seed: int = 0


@dataclass(frozen=True)
class Tree(Result):
    name: str
    main: Leaf
    others: list[Leaf] = field(default_factory=list)
    blocks: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    converged: bool = False
    level: float = 0.0


@dataclass(frozen=True)
class Anything(Result):
    value: Any


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Result):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def example() -> Tree:
    grid = np.linspace(0, 1, 6).reshape(2, 3)
    return Tree(
        name="é − ∂",
        main=Leaf(grid, seed=3),
        others=[Leaf(np.arange(3)), Leaf(np.array([], dtype=np.float32))],
        blocks={"L0.W_Q": grid.T.copy(), "L0": {"deep": [np.array(2.5), {"more": np.array([True, False])}]}},
        converged=True,
        level=float("nan"),
    )


def test_nested_results_round_trip(tmp_path):
    result = example()
    folder = result.save(tmp_path / "a" / "b")
    assert folder == tmp_path / "a" / "b"
    assert sorted(file.name for file in folder.iterdir()) == ["arrays.npz", "result.json"]
    assert same(result, Tree.load(folder))
    assert same(result, Result.load(folder))


def test_files_can_be_read_without_this_package(tmp_path):
    folder = example().save(tmp_path)
    tree = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert tree["schema"] == 1
    assert tree["@class"] == f"{__name__}.Tree"
    with np.load(folder / "arrays.npz", allow_pickle=False) as archive:
        assert set(archive.files) >= {"main/values", "others/0/values", "blocks/L0.W_Q"}
        for key in archive.files:
            assert archive[key].dtype != object
    for member in zipfile.ZipFile(folder / "arrays.npz").namelist():
        assert member.endswith(".npy")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    array=hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.int64, np.bool_, np.complex128, "<U3"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    ),
    number=st.floats() | st.integers(-(2**60), 2**60) | st.booleans() | st.none() | st.text(max_size=5),
)
def test_any_array_and_number_round_trip(array: np.ndarray, number: Any, tmp_path):
    result = Anything({"array": array, "list": [number, [array]]})
    assert same(result, Anything.load(result.save(tmp_path)))


def test_numpy_scalars_become_numbers(tmp_path):
    found = Anything.load(Anything([np.float64(1.5), np.int32(2), np.bool_(True)]).save(tmp_path)).value
    assert found == [1.5, 2, True]
    assert [type(x) for x in found] == [float, int, bool]


def test_saving_again_replaces_and_leaves_no_partial_file(tmp_path):
    Leaf(np.zeros(3)).save(tmp_path)
    Leaf(np.ones(2), seed=7).save(tmp_path)
    assert same(Leaf.load(tmp_path), Leaf(np.ones(2), seed=7))
    assert not list(tmp_path.glob("*.partial"))


def test_results_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Leaf(np.zeros(1)).seed = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_no_result_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"value/x is a set"):
        Anything({"x": {1, 2}}).save(tmp_path)
    with pytest.raises(TypeError, match=r"value is a function"):
        Anything(lambda: 0).save(tmp_path)


def test_arrays_of_objects_are_refused_and_not_pickled(tmp_path):
    with pytest.raises((TypeError, CurvescopeError), match=r"object|arrays"):
        Anything(np.array([{"a": 1}, None], dtype=object)).save(tmp_path)


@pytest.mark.parametrize("name", ["file", "allow_pickle"])
def test_a_field_may_be_called_anything(name: str, tmp_path):
    cls = dataclass(frozen=True)(type(f"Odd_{name}", (Result,), {"__annotations__": {name: np.ndarray}}))
    folder = cls(**{name: np.arange(3)}).save(tmp_path)
    assert np.array_equal(getattr(cls.load(folder), name), np.arange(3))


def test_a_folder_without_a_result_is_one_sentence(tmp_path):
    with pytest.raises(CurvescopeError, match=r"expected a folder with result\.json and arrays\.npz.*state/"):
        Leaf.load(tmp_path)


def test_another_class_or_schema_is_refused(tmp_path):
    folder = Leaf(np.zeros(2)).save(tmp_path)
    with pytest.raises(CurvescopeError, match=r"expected a saved Tree in .*, found Leaf"):
        Tree.load(folder)
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text.replace('"schema": 1', '"schema": 9'))
    with pytest.raises(CurvescopeError, match="found 9"):
        Leaf.load(folder)
    (folder / "result.json").write_text(text.replace("Leaf", "Unheard"))
    with pytest.raises(CurvescopeError, match="Unheard"):
        Result.load(folder)


def _cut(path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


LEAF = '{"schema": 1, "@class": "' + __name__ + '.Leaf", "fields": %s}'
DAMAGE = {
    "json": lambda f: (f / "result.json").write_text("{"),
    "no-zip": lambda f: (f / "arrays.npz").write_bytes(b"no archive"),
    "no-npz": lambda f: (f / "arrays.npz").unlink(),
    "empty-npz": lambda f: (f / "arrays.npz").write_bytes(b""),
    "cut-npz": lambda f: _cut(f / "arrays.npz", 60),
    "json-list": lambda f: (f / "result.json").write_text("[]"),
    "array-gone": lambda f: (f / "result.json").write_text(LEAF % '{"values": {"@array": "gone"}}'),
    "field-unknown": lambda f: (f / "result.json").write_text(LEAF % '{"other": 1}'),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_a_damaged_folder_is_one_sentence(name: str, tmp_path):
    folder = Leaf(np.arange(100.0)).save(tmp_path)
    DAMAGE[name](folder)
    with pytest.raises(CurvescopeError):
        Leaf.load(folder)


@dataclass(frozen=True)
class Many(Result):
    values: np.ndarray
    few: np.ndarray
    names: list[str]
    table: dict[str, int]
    inner: Leaf | None
    scale: float = 0.5


def test_a_result_is_printed_in_short():
    names = [f"block {i}" for i in range(100)]
    shown = repr(
        Many(np.zeros((500, 3)), np.array([1.0, 2.5]), names, dict.fromkeys(names, 1), Leaf(np.ones(50)))
    )
    assert shown == (
        "Many(values=array of (500, 3) float64, few=[1, 2.5], "
        "names=['block 0', 'block 1', 'block 2', … of 100], "
        "table={100 entries}, inner=Leaf(values=array of (50,) float64, seed=0), scale=0.5)"
    )


def test_pickles_are_not_opened(tmp_path):
    folder = Leaf(np.zeros(2)).save(tmp_path)
    np.savez(folder / "arrays.npz", values=np.array([{"a": 1}], dtype=object))
    with pytest.raises(CurvescopeError, match="allow_pickle"):
        Leaf.load(folder)


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def test_numbers_that_json_does_not_have_are_null_with_their_name_and_come_back(tmp_path):
    inf, nan = float("inf"), float("nan")
    result = Anything({"a/b": nan, "a": {"b": None, "~": [inf, -inf, 1.0]}, "x": np.float64("nan")})
    result.save(tmp_path)
    tree = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert tree["fields"]["value"]["a"]["~"] == [None, None, 1.0]
    assert tree["not_finite"]["/fields/value/a/~0/1"] == "-Infinity"
    assert same(Result.load(tmp_path), Anything({"a/b": nan, "a": result.value["a"], "x": nan}))


def test_files_with_bare_nan_are_still_read(tmp_path):
    Anything(1.5).save(tmp_path)
    path = tmp_path / "result.json"
    path.write_text(path.read_text(encoding="utf-8").replace("1.5", "[NaN, -Infinity]"), encoding="utf-8")
    assert same(Result.load(tmp_path), Anything([float("nan"), -float("inf")]))

"""Configurations refuse what they do not know; errors say what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from curvescope.core.config import Config, setting
from curvescope.core.errors import CurvescopeError, MissingExtra, ShapeError, UsageError, near_misses


@dataclass(frozen=True)
class Settings(Config):
    size: int = 3
    rate: float = 0.1
    name: str = "x"
    kind: Literal["one", "two"] = "one"
    flag: bool = False
    limit: int | None = None
    sizes: tuple[int, ...] = (1, 2)


def test_round_trip_through_a_dict():
    settings = Settings(size=5, rate=2, kind="two", limit=4, sizes=(3,))
    values = settings.to_dict()
    assert values == {
        "size": 5,
        "rate": 2,
        "name": "x",
        "kind": "two",
        "flag": False,
        "limit": 4,
        "sizes": [3],
    }
    assert Settings.from_dict(values) == settings
    assert "limit" not in Settings().to_dict()
    assert Settings.from_dict({}) == Settings()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sise": 3}, r"unknown setting 'sise' \(did you mean 'size'"),
        ({"zzz": 3}, r"unknown setting 'zzz' \(known: size, rate"),
        ({"size": "3"}, r"size: expected int, got '3'"),
        ({"size": 3.0}, r"size: expected int, got 3\.0"),
        ({"size": True}, r"size: expected int, got True"),
        ({"size": None}, r"size: expected int, got None"),
        ({"rate": "fast"}, r"rate: expected float, got 'fast'"),
        ({"rate": True}, r"rate: expected float, got True"),
        ({"name": 3}, r"name: expected str, got 3"),
        ({"flag": 1}, r"flag: expected bool, got 1"),
        ({"kind": "three"}, r"kind: expected one of one, two, got 'three'"),
        ({"kind": ["one"]}, r"kind: expected one of one, two, got"),
        ({"sizes": ["a"]}, r"sizes: expected int, got 'a'"),
        ({"limit": "no"}, r"limit: expected int or nothing, got 'no'"),
    ],
)
def test_wrong_values_are_refused(values: dict, message: str):
    with pytest.raises(UsageError, match=message):
        Settings.from_dict(values)


def test_a_float_takes_an_integer_and_an_optional_takes_nothing():
    assert Settings(rate=2).rate == 2
    assert Settings(limit=None).limit is None


def test_errors_carry_a_hint_and_an_exit_code():
    error = CurvescopeError("it broke", hint="mend it")
    assert str(error) == "it broke (mend it)"
    assert (error.message, error.hint, error.exit_code) == ("it broke", "mend it", 1)
    assert UsageError("no").exit_code == 2
    assert str(ShapeError("no")) == "no"
    assert issubclass(ShapeError, ValueError)
    assert issubclass(MissingExtra, ImportError)
    assert issubclass(MissingExtra, CurvescopeError)


def test_near_misses_name_what_is_close_or_what_there_is():
    known = ["cross_entropy", "mse", "mse_mean"]
    assert near_misses("mse_men", known).startswith("did you mean 'mse_mean'")
    assert near_misses("zzzz", known) == "known: cross_entropy, mse, mse_mean"
    assert near_misses("q", [str(i) for i in range(12)]).endswith(", …")
    assert near_misses("q", []) is None


def test_near_misses_do_not_mind_the_case():
    assert "'L0.W_Q'" in near_misses("l0.w_q", ["L0.b_Q", "L0.b_V", "L0.b_O", "L0.W_Q", "E"])


def test_near_misses_know_initials_and_parts_and_nothing_far_fetched():
    known = ["cross_entropy", "mse", "mse_mean"]
    assert near_misses("ce", known) == "did you mean 'cross_entropy'?"
    assert near_misses("entropy", known) == "did you mean 'cross_entropy'?"
    assert near_misses("hinge", known) == "known: cross_entropy, mse, mse_mean"


@dataclass(frozen=True)
class Described(Config):
    layers: tuple[int, ...] = setting((), "layers to look at")
    blocks: tuple[str, ...] | None = setting(None, "globs")
    kind: Literal["one", "two"] = setting("one", "which")
    rate: float = setting(0.5, "speed")


def test_settings_say_what_they_are():
    assert Described() == Described(layers=(), blocks=None, kind="one", rate=0.5)
    assert [(s.name, s.kind, s.default, s.meaning) for s in Described.settings()] == [
        ("layers", "list of whole numbers", (), "layers to look at"),
        ("blocks", "list of text", None, "globs"),
        ("kind", "one | two", "one", "which"),
        ("rate", "number", 0.5, "speed"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("layers", "0,1", [0, 1]),
        ("layers", "[0, 1]", [0, 1]),
        ("layers", "3", 3),
        ("blocks", "L0.*, L1.W_[QK]", ["L0.*", "L1.W_[QK]"]),
        ("blocks", '["L0.*"]', ["L0.*"]),
        ("blocks", '"L0.*"', "L0.*"),
        ("kind", "two", "two"),
        ("kind", "a,b", "a,b"),
        ("rate", "1e-3", 1e-3),
    ],
)
def test_values_are_read_as_they_are_typed(name, text, value):
    assert Described.read(name, text) == value


def test_a_name_that_is_not_there_is_not_read():
    with pytest.raises(UsageError, match=r"unknown setting 'layer'.*did you mean 'layers'"):
        Described.read("layer", "0")


@dataclass(frozen=True)
class Bounded(Config):
    num: int = setting(4, "at least two", least=2)
    share: float = setting(0.5, "not negative", least=0)
    limit: int | None = setting(None, "if given, at least one", least=1)


@pytest.mark.parametrize(
    ("given", "name"), [({"num": 1}, "num"), ({"share": -0.1}, "share"), ({"limit": 0}, "limit")]
)
def test_a_number_below_its_least_is_refused(given, name):
    with pytest.raises(UsageError, match=f"^{name}.* got {given[name]}$"):
        Bounded(**given)
    assert Bounded(num=2, share=0, limit=1) == Bounded.from_dict({"num": 2, "share": 0, "limit": 1})
    assert Bounded().limit is None


def test_a_field_of_several_values_takes_one_and_lists():
    assert Settings(sizes=3).sizes == (3,)  # pyright: ignore[reportArgumentType]
    assert Settings(sizes=[4, 5]).sizes == (4, 5)  # pyright: ignore[reportArgumentType]

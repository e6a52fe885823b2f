"""Configurations refuse what they do not know; errors say what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from curvescope.core.config import Config
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

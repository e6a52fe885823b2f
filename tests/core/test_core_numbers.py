"""Numbers with their errors, as text."""

import math

import pytest

from curvescope.core.number_format import below_noise, between, bound, duration, one_of, to_error, with_error


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (21755.4, 1023.6, "21,800 ± 1,000"),
        (0.123456, 0.0042, "0.1235 ± 0.0042"),
        (-3.14159, 0.5, "-3.14 ± 0.50"),
        (5.0, math.nan, "5"),
        (5.0, 0.0, "5"),
        (1.5e-9, 2e-11, "(1.500 ± 0.020)e-9"),
        (2.5e9, 1.5e8, "(2.50 ± 0.15)e+9"),
        (1079.776078, 1.1e-5, "1,079.78"),
        (21800.0, math.nan, "21,800"),
        (0.00996, 0.00996, "0.010 ± 0.010"),
        (2e-4, 1e-5, "0.000200 ± 0.000010"),
        (0.0, 0.3, "0.00 ± 0.30"),
        (999_999.7, 20.0, "1,000,000 ± 20"),
        (math.inf, 1.0, "inf"),
        (1.234, math.inf, "1.2 ± ∞"),
        (-0.4, 120.0, "0 ± 120"),
        (-0.001, 0.5, "0.00 ± 0.50"),
        (-1e-12, 1.5e-9, "(0.0 ± 1.5)e-9"),
        (5e-324, 5e-324, "(4.9 ± 4.9)e-324"),
        (-0.0, 0.0, "0"),
    ],
)
def test_the_error_has_two_digits_and_the_value_ends_there(value, stderr, text):
    assert with_error(value, stderr) == text


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (0.3148602, 5.1e-6, "0.314860 ± 0.000005"),
        (3799.876, 0.006, "3,799.88 ± 0.01"),
        (3799.876, 0.004, "3,799.88"),
        (1.0, 4e-6, "1"),
        (1.5000004e-9, 1.2e-14, "(1.50000 ± 0.00001)e-9"),
    ],
)
def test_a_value_has_six_digits_at_most(value, stderr, text):
    assert with_error(value, stderr) == text


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-278.9, 1200.0, "-300"),
        (9636.4, 1800.0, "9,600"),
        (1996.78, 0.0, "1,997"),
        (2378.28937, 0.0023, "2,378"),
        (0.0, 2.0, "0"),
        (3.0, 1000.0, "3"),
        (1996.78, math.inf, "2,000"),
    ],
)
def test_a_value_ends_where_its_error_does(value, error, text):
    assert to_error(value, error) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (5430.7, 6753.1, "5,430 to 6,754"),
        (6753.1, 5430.7, "6,754 to 5,430"),
        (-48.8, -11.0, "-48.80 to -11.00"),
        (59.517, 59.5171, "59.52"),
        (3.0, math.nan, "3.000"),
        (math.nan, math.nan, "–"),
    ],
)
def test_where_a_number_lies_is_told_by_two_or_by_one(low: float, high: float, text: str):
    assert between(low, high) == text


@pytest.mark.parametrize(
    ("value", "up", "text"),
    [
        (2892.47, True, "2,893"),
        (2892.47, False, "2,892"),
        (0.5, True, "0.5000"),
        (-2892.47, True, "-2,892"),
        (99999.0, True, "100,000"),
        (1.23456e9, True, "1.235e+09"),
        (math.inf, True, "inf"),
    ],
)
def test_a_bound_holds_as_it_is_written(value: float, up: bool, text: str):
    assert bound(value, up=up) == text


def test_what_is_below_noise_is_below_what_is_written():
    assert below_noise(0.0, 3.24) == "< 3.3"
    assert below_noise(0.0, 1234.0) == "< 1,300"


@pytest.mark.parametrize(
    ("names", "text"),
    [("a", "a"), ("ab", "a or b"), ("abc", "a, b or c"), ("abcd", "a, b, c or another"),
     ("abcde", "a, b, c or one of 2 more")],
)  # fmt: skip
def test_one_of_several(names: str, text: str):
    assert one_of(names) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1, "1 s"),
        (89, "89 s"),
        (180, "3 min"),
        (9000, "2.5 h"),
        (30 * 3600, "30.0 h"),
        (22914 * 3600, "2.6 years"),
        (3.5 * 86400, "3.5 days"),
        (126 * 86400, "126 days"),
        (4000 * 365.25 * 86400, "4,000 years"),
    ],
)
def test_how_long(seconds, text):
    assert duration(seconds) == text

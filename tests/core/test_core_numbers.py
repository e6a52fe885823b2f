"""Numbers with their errors, as text."""

import math

import pytest

from curvescope.core.numbers import with_error


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
    ],
)
def test_the_error_has_two_digits_and_the_value_ends_there(value, stderr, text):
    assert with_error(value, stderr) == text

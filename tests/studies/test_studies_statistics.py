"""Every interval that studies state: its formula, how often it holds the truth; and the rules of verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from curvescope.algorithms.estimates.intervals import student
from curvescope.algorithms.estimates.ranks import spearman
from curvescope.runs.study_result import FAILS, HOLDS, OPEN
from curvescope.studies.common.statistics import (
    Interval,
    above,
    all_above,
    all_below,
    below,
    contrast,
    correlation_gain,
    crossed_bootstrap,
    exponent_interval,
    geometric_interval,
    half_width,
    log_slope,
    mean_correlation,
    mean_interval,
    median_difference,
    median_interval,
    of_runs,
    over_models,
    variance_interval,
)

HIGH, LOW, WIDE = (0.8, 0.9, 0.85), (-0.8, -0.9, -0.85), (0.9, -0.2, 0.1)
S = 6  # seeds
Draw = Callable[[np.random.Generator], Interval]

COVERED: dict[str, tuple[float, Draw]] = {
    "mean": (0.0, lambda source: mean_interval(source.standard_normal(4))),
    "geometric mean": (2.0, lambda source: geometric_interval(2 * np.exp(source.standard_normal(5)))),
    "median": (math.log(2), lambda source: median_interval(source.exponential(size=40))),
    "difference of medians": (
        1.0,
        lambda source: median_difference(1 + source.standard_normal(40), source.standard_normal(60)),
    ),
    "variance": (1.0, lambda source: variance_interval(source.standard_normal(100))),
    "exponent": (
        -0.5,
        lambda source: exponent_interval(
            2.0 ** np.arange(5),
            np.exp(-0.5 * np.log(2.0 ** np.arange(5)) + 0.2 * source.standard_normal((4, 5))),
        ),
    ),
}


@pytest.mark.parametrize("name", COVERED)
def test_an_interval_holds_the_truth_as_often_as_it_says(name):
    truth, draw = COVERED[name]
    source, inside = np.random.default_rng(0), 0
    for _ in range(1000):
        found = draw(source)
        inside += found.low <= truth <= found.high
    assert 0.93 <= inside / 1000 <= 0.99  # ± 0.014 around 0.95 by chance; a bootstrap of few draws is wider


def test_half_widths_are_those_of_single_rows_and_not_known_from_one_sample():
    values = np.random.default_rng(0).standard_normal((3, 5))
    half = half_width(values)
    assert half == pytest.approx([mean_interval(row).high - row.mean() for row in values])
    assert np.isnan(half_width(values[:, :1])).all()
    assert np.isnan(mean_interval(np.ones(1)).low)


def test_a_crossed_bootstrap_is_wider_than_one_over_rows():
    """Where columns have effects of their own, drawing rows alone misses their scatter."""
    source, inside, alone = np.random.default_rng(1), 0, 0
    for i in range(300):
        table = (
            source.standard_normal((12, 1))
            + source.standard_normal((1, 12))
            + source.standard_normal((12, 12))
        )

        def mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return (0 * b + a).mean(axis=(-2, -1))

        found = crossed_bootstrap(mean, table, table, draws=200, seed=i, groups=12)
        rows = mean_interval(table.mean(axis=1))
        inside += found.low <= 0 <= found.high
        alone += rows.low <= 0 <= rows.high
    assert inside / 300 > 0.9 > alone / 300


def test_axes_that_are_not_drawn_stay_together():
    source = np.random.default_rng(0)
    x, y = source.standard_normal((2, 4, 3, 7))
    found = mean_correlation(x, y, axes=(0, 2), draws=50, seed=3, groups=4)
    again = np.random.default_rng(3)
    seeds, methods = again.integers(0, 4, (50, 4)), again.integers(0, 7, (50, 7))
    each = [spearman(x[a][:, :, b], y[a][:, :, b]).mean() for a, b in zip(seeds, methods, strict=True)]
    assert (found.low, found.high) == pytest.approx(np.quantile(each, [0.025, 0.975]))
    assert found.value == pytest.approx(spearman(x, y).mean())
    none = correlation_gain(x, x, y, axes=(0, 2), draws=50, seed=3, groups=4)
    assert (none.value, none.low, none.high) == (0, 0, 0)


def test_a_power_law_has_its_exponent():
    x = np.array([1.0, 3.0, 10.0])
    assert log_slope(x, 5 * x**-1.5) == pytest.approx(-1.5)


def test_verdicts_follow_intervals():
    up, down, wide, unknown = (
        Interval(1, 0.5, 2),
        Interval(-1, -2, -0.5),
        Interval(0, -1, 1),
        Interval(1, math.nan, math.nan),
    )
    assert [above(one) for one in (up, down, wide, unknown)] == [HOLDS, FAILS, OPEN, OPEN]
    assert [below(one) for one in (up, down, wide, unknown)] == [FAILS, HOLDS, OPEN, OPEN]
    assert above(up, 3) == FAILS
    assert (all_above([up, up]), all_above([up, wide]), all_above([up, wide, down])) == (HOLDS, OPEN, FAILS)
    assert (all_below([down]), all_below([up], 3), all_below([down, unknown])) == (HOLDS, HOLDS, OPEN)
    assert [of_runs(so) for so in ([True, True], [True, False], [False])] == [HOLDS, OPEN, FAILS]


def test_intervals_over_sequences_are_student_s():
    found = mean_interval(np.array([1.0, 2.0, 3.0]))
    assert found.value == 2
    assert found.high - 2 == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert np.isnan(mean_interval(np.array([1.0])).low)


def test_sequences_of_unequal_length_that_change_alike_leave_nothing_open():
    counted = np.array([1.0, 2, 3, 5, 8, 13])
    shares = counted / counted.mean()
    found = mean_interval(shares * 0.5, shares)
    assert found == pytest.approx((0.5, 0.5, 0.5), abs=1e-12)
    d = np.array([0.1, 0.4, 0.2, 0.3, 0.5, 0.2])
    m = (counted * d).sum() / counted.sum()
    half = 2.570582 * (counted * (d - m) / counted.mean()).std(ddof=1) / np.sqrt(6)
    assert mean_interval(shares * d, shares) == pytest.approx((m, m - half, m + half), rel=1e-6)


def test_intervals_of_a_ratio_cover_what_they_should():
    source, inside = np.random.default_rng(0), np.zeros(2)
    for _ in range(600):
        counted = source.integers(1, 11, 20).astype(float)
        shares = counted / counted.mean()
        values = shares * (0.5 / counted + 0.001 * source.normal(size=20))
        for i, found in enumerate((mean_interval(values, shares), mean_interval(values))):
            inside[i] += found.low <= 0.5 / 5.5 <= found.high
    assert inside[0] > 0.91 * 600 > inside[1]


def test_an_interval_is_that_of_logarithms_and_not_known_from_one_network():
    found = geometric_interval([1.0, 100.0])
    np.testing.assert_allclose(found.value, 10)
    np.testing.assert_allclose(np.log(found.high / 10), 12.706 * np.log(10), rtol=1e-3)
    assert str(geometric_interval([2.0])) == "2"


def test_an_interval_holds_the_median_of_its_draws():
    draws = np.random.default_rng(0).normal(size=200)
    found = median_interval(np.append(draws, np.nan))
    assert found.low < 0 < found.high
    assert found.value == np.median(draws)
    apart = median_difference(draws + 1, draws)
    assert apart.low < 1 < apart.high
    assert np.isnan(median_interval(np.full(3, np.nan)).value)


def test_a_contrast_counts_configurations_and_seeds():
    source = np.random.default_rng(2)
    values = source.standard_normal((4, S)) + source.standard_normal((4, 1))
    mean, low, high = contrast(values)
    variance = values.mean(1).var(ddof=1) / 4 + values.mean(0).var(ddof=1) / S
    assert (mean, high - mean, mean - low) == pytest.approx(
        (values.mean(), *[student(3) * math.sqrt(variance)] * 2)
    )
    one = contrast(values[:1])
    assert one[2] - one[0] == pytest.approx(student(S - 1) * values[0].std(ddof=1) / math.sqrt(S))
    less = contrast(values[:2], values[2:])
    assert less[0] == pytest.approx(values[:2].mean() - values[2:].mean())


def test_a_contrast_covers():
    """Of effects of configurations, of seeds and of both, as often as it says or more."""
    source, inside = np.random.default_rng(0), 0
    for _ in range(400):
        values = (
            source.standard_normal((4, S)) + source.standard_normal((4, 1)) + source.standard_normal((1, S))
        )
        _, low, high = contrast(values)
        inside += low <= 0 <= high
    assert inside / 400 >= 0.94


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [(HIGH, HIGH, HOLDS), (HIGH, WIDE, OPEN), (HIGH, LOW, FAILS), (WIDE, LOW, FAILS), (WIDE, WIDE, OPEN)],
)
def test_a_claim_holds_if_it_does_in_every_family(one, other, verdict):
    families = {"a": [{"it ranks": x} for x in one], "b": [{"it ranks": x} for x in other]}
    (claim,) = over_models(families)
    assert (claim.claim, claim.verdict) == ("it ranks", verdict)
    half = 4.3027 * np.std(one, ddof=1) / math.sqrt(3)
    assert f"a {np.mean(one):+.3g} [{np.mean(one) - half:+.3g}," in claim.measured
    assert claim.measured.count("over 3 runs") == 2


def test_one_run_decides_nothing_and_what_has_no_order_is_left_out():
    (claim,) = over_models({"a": [{"it ranks": 0.9}, {"it ranks": math.nan}, {}]})
    assert claim.verdict == OPEN
    assert "over 1 run" in claim.measured
    assert over_models({"a": [{"it ranks": math.nan}]}) == []

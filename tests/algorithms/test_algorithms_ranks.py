"""Rank correlations: intervals hold what is true as often as they say, few rows decide nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from curvescope.algorithms.estimates.ranks import FEWEST, difference, mean_within, rank_correlation

RUNS = 150


def pairs(seed: int, count: int, r: float) -> tuple[np.ndarray, np.ndarray]:
    """Two Gaussian rows of `count` numbers with correlation r."""
    x, noise = np.random.default_rng(seed).normal(size=(2, count))
    return x, r * x + math.sqrt(1 - r * r) * noise


@pytest.mark.parametrize("count", [3, 4, 5])
def test_few_rows_have_no_interval(count):
    x, y = pairs(0, count, 0.0)
    for found in (rank_correlation(x, x, draws=100), difference(x, y, x, draws=100)):
        assert math.isfinite(found.value)
        assert math.isnan(found.low)
        assert math.isnan(found.high)


@pytest.mark.parametrize(("count", "r"), [(6, 0.0), (6, 0.97), (8, 0.99), (24, 0.9)])
def test_intervals_hold_the_truth_as_often_as_they_say(count, r):
    """ρ of Gaussian pairs is 6/π arcsin(r/2); 0.95 less three standard errors of a share over the runs."""
    truth = 6 / math.pi * math.asin(r / 2)
    found = [rank_correlation(*pairs(seed, count, r), draws=100, seed=seed) for seed in range(RUNS)]
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert held >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / RUNS)


def test_one_order_is_no_certainty():
    x = np.arange(6.0)
    found = rank_correlation(x, x, draws=100)
    assert found.value == found.high == pytest.approx(1)
    assert 0 < found.low < 0.9
    assert rank_correlation(x, -x, draws=100).high == pytest.approx(-found.low)
    assert rank_correlation(np.arange(40.0), np.arange(40.0), draws=100).low > 0.99
    gap = difference(x, -x, x, draws=100)
    assert gap.value == gap.high == pytest.approx(2)
    assert gap.low < 1.9


def test_differences_hold_the_truth():
    held = 0
    for seed in range(RUNS):
        y, other, noise = np.random.default_rng(seed).normal(size=(3, 8))
        x = 0.97 * y + math.sqrt(1 - 0.97**2) * noise
        found = difference(x, other, y, draws=100, seed=seed)
        held += found.low <= 6 / math.pi * math.asin(0.97 / 2) <= found.high
    assert held / RUNS >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / RUNS)


@pytest.mark.parametrize("count", [FEWEST, 10])
def test_means_within_groups_hold_zero_for_what_is_independent(count):
    group = np.repeat(np.arange(count), 4)
    found = [mean_within(*pairs(seed, 4 * count, 0.0), groups=group) for seed in range(2 * RUNS)]
    held = np.mean([one.low <= 0 <= one.high for one in found])
    assert held >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / (2 * RUNS))


def test_groups_that_all_agree_are_no_certainty():
    x, group = np.tile(np.arange(4.0), 24), np.repeat(np.arange(24), 4)
    found = mean_within(x, x, groups=group)
    assert (found.value, found.high) == pytest.approx((1, 1))
    assert 0.6 < found.low < 0.9
    few = mean_within(x[:20], x[:20], groups=group[:20])
    assert (few.groups, few.value) == (5, pytest.approx(1))
    assert math.isnan(few.low)
    assert math.isnan(mean_within(np.ones(8), x[:8], groups=group[:8]).value)

"""Verdicts of the study `why_adam`, on numbers that are made."""

from __future__ import annotations

import math

import numpy as np
import pytest

from curvescope.runs.study_result import FAILS, HOLDS, OPEN
from curvescope.studies.common.statistics import Interval, above, contrast
from curvescope.studies.why_adam import WhyAdam
from curvescope.studies.why_adam.analysis import (
    CHOICES,
    MOMENTS,
    CurvatureMeasures,
    TunedRuns,
    correlation,
    log_ratio,
    together,
)

S = 5


def made(gap: dict[str, float], heterogeneity: dict[str, float], noise: float = 0.01) -> WhyAdam:
    """A result with these gaps and measures, and noise over seeds."""
    source = np.random.default_rng(0)
    runs, curvature = {}, {}
    for name, value in gap.items():
        loss = {"adam": np.ones(S), "sgd": 10 ** (value + noise * source.standard_normal(S))}
        for optimizer, final in loss.items():
            course = np.broadcast_to(final[:, None, None], (S, 1, 5))
            runs[f"{name}/{optimizer}"] = TunedRuns(
                np.array([0.1]), course, np.zeros(S, dtype=int), False, np.zeros(0)
            )
        seen = heterogeneity[name] + noise * source.standard_normal((len(MOMENTS), S, 3))
        curvature[name] = CurvatureMeasures(["E"], 10, seen, seen[0], np.ones((S, 1)), np.ones((S, 1)))
    return WhyAdam(list(gap), 400, 16, 16, [0, 400], runs, curvature, draws=400, seed=0)


def verdicts(result: WhyAdam) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in result.claims()}


RANK = "the spread of block sizes at the start (GGN) ranks the gap"


@pytest.mark.parametrize(("sign", "expected"), [(1.0, HOLDS), (-1.0, FAILS)])
def test_correlations_of_one_sign_are_decided(sign, expected):
    gap = {name: 0.1 * i for i, name in enumerate(CHOICES)}
    found = verdicts(made(gap, {name: sign * value for name, value in gap.items()}))
    assert found[RANK] == found[RANK.replace("(GGN)", "(Hessian)")] == expected
    assert found[f"{RANK}, among Transformers only"] == expected


def test_noise_is_not_decided():
    source = np.random.default_rng(3)
    gap = {name: float(source.standard_normal()) for name in CHOICES}
    found = verdicts(made(gap, {name: float(source.standard_normal()) for name in CHOICES}))
    assert found[RANK] == OPEN


def test_families_alone_can_make_a_correlation():
    """MLPs low, Transformers high, and nothing inside either."""
    source = np.random.default_rng(1)
    high = {name: 1.0 if choice.family == "transformer" else 0.0 for name, choice in CHOICES.items()}
    found = verdicts(
        made(high, {n: v + 0.01 * source.standard_normal() for n, v in high.items()}, noise=0.05)
    )
    assert found[RANK] == HOLDS
    assert found[f"{RANK}, among Transformers only"] == OPEN
    assert found["Transformers have a larger gap than MLPs, in general"] == HOLDS


def test_factors_and_directions():
    """Merging narrows, bare networks have a larger gap; sizes follow the first and not the second."""
    gap, size = {}, {}
    for name, choice in CHOICES.items():
        gap[name] = 0.5 - 0.3 * choice.merged + 0.2 * (not choice.norm)
        size[name] = 1.0 - 0.3 * choice.merged - 0.2 * (not choice.norm)
    found = verdicts(made(gap, size))
    for scope in ("for these networks", "in general"):
        assert found[f"merging queries and keys narrows the gap, {scope}"] == HOLDS
        assert found[f"norms narrow the gap, {scope}"] == HOLDS
    assert found["attention without softmax narrows the gap, in general"] == OPEN
    same = "the spread of block sizes at the start (GGN) and the gap change in the same direction"
    assert found[same] == FAILS  # 4 pairs go the same way, 6 the other
    assert verdicts(made(gap, gap))[same] == HOLDS
    assert verdicts(made(gap, dict.fromkeys(CHOICES, 1.0), noise=1e-3))[same] == OPEN


def test_what_pairs_disagree_on_is_decided_of_them_and_not_of_others():
    gap = {name: 0.5 - 0.3 * (choice.merged and choice.norm) for name, choice in CHOICES.items()}
    found = verdicts(made(gap, gap))
    assert found["merging queries and keys narrows the gap, for these networks"] == HOLDS
    assert found["merging queries and keys narrows the gap, in general"] == OPEN


def test_correlations_of_nothing_are_seldom_decided():
    source, decided = np.random.default_rng(0), 0
    for i in range(100):
        x, y = (source.standard_normal((8, 1)) + 0.3 * source.standard_normal((8, S)) for _ in range(2))
        found = correlation(x, y, draws=200, seed=i)
        decided += above(found) != OPEN
    assert decided <= 9  # 5 are expected of an interval of 95 %


def test_divergence_is_not_decided():
    assert log_ratio(np.array([math.inf, 1.0]), np.array([1.0, 1.0])).tolist() == [math.inf, 0.0]
    lost = contrast(np.array([[math.inf, 1.0, 2.0]]))
    assert lost.value == math.inf
    assert above(lost) == OPEN
    both = contrast(np.array([[math.nan, 1.0, 2.0]]))
    assert above(both) == OPEN
    x = np.arange(12.0)[:, None] + np.zeros((12, S))
    y = x.copy()
    y[0] = math.nan
    found = correlation(x, y, draws=100, seed=0)
    assert (found.groups, found.value) == (11, pytest.approx(1.0))


def test_two_changes_go_together_where_both_are_decided():
    up, down, open_ = Interval(1.0, 0.5, 1.5), Interval(-1.0, -1.5, -0.5), Interval(0.1, -1.0, 1.0)
    assert together(up, up) == together(down, down) == HOLDS
    assert together(up, down) == FAILS
    assert together(up, open_) == OPEN

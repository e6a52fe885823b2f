"""Numbers of several runs: intervals over runs, verdicts over families."""

from __future__ import annotations

import math

import numpy as np
import pytest

from curvescope.runs.shown import FAILS, HOLDS, OPEN
from curvescope.studies.over_models import over_models

HIGH, LOW, WIDE = (0.8, 0.9, 0.85), (-0.8, -0.9, -0.85), (0.9, -0.2, 0.1)


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

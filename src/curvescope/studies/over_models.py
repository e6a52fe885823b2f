"""Rank correlations of several runs: means over models and seeds, with intervals over them.

An interval over the weights or blocks of one model says what other weights of that model would give. One over
runs says what another model of the same kind would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from curvescope.core.numbers import plural
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin
from curvescope.studies.weight_changes import Interval, over_sequences

OURS: Origin = ("ours", "ours")
Families = Mapping[str, Sequence[Mapping[str, float]]]
"""By family of models, the numbers of each run by what is said about them."""


def over_models(families: Families) -> list[Claim]:
    """A claim that each number is above zero: it holds if all families' intervals are, fails if one is below.

    A family's interval is Student's over its runs. Numbers that no order could be made of (nan) are left out.
    """
    words = dict.fromkeys(said for runs in families.values() for run in runs for said in run)
    found = []
    for said in words:
        known = {family: _known(runs, said) for family, runs in families.items()}
        each = {family: (over_sequences(x), len(x)) for family, x in known.items() if len(x)}
        if not each:
            continue
        measured = "; ".join(f"{f} {one.words} over {plural(n, 'run')}" for f, (one, n) in each.items())
        verdict = _verdict([one for one, _ in each.values()])
        found.append(Claim(said, "above 0 in every family", measured, verdict, *OURS))
    return found


def _known(runs: Sequence[Mapping[str, float]], said: str) -> np.ndarray:
    values = np.array([run[said] for run in runs if said in run])
    return values[np.isfinite(values)]


def _verdict(found: Sequence[Interval]) -> str:
    verdict = FAILS if any(one.high < 0 for one in found) else OPEN
    return HOLDS if all(one.low > 0 for one in found) else verdict

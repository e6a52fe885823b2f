"""What is said about saliencies, next to what was measured; every verdict is computed from an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin
from curvescope.studies.prune.correlations import PLACE, better, rows
from curvescope.studies.prune.pieces import AT_MINIMUM
from curvescope.studies.prune.removals import GREEDY
from curvescope.studies.prune.tables import every_set
from curvescope.studies.weight_changes import Effects, Interval, Part, over_sequences

if TYPE_CHECKING:
    from curvescope.studies.prune.study import Pruned

OURS: Origin = ("ours", "ours")


class Said(NamedTuple):
    """A rank correlation, or the difference of two."""

    correlation: Correlation
    difference: bool


def judge(result: Pruned) -> list[Claim]:
    """Predictions first, then methods against each other."""
    return [_above(words, one) for words, one in ranked(result).items()] + _methods(result)


def ranked(result: Pruned) -> dict[str, Said]:
    """Rank correlations with measured increases, by what is said about them: that they are above zero."""
    found = {(row.removed, row.how, row.predictor): row.correlation for row in rows(result)}
    said = {}
    for kind in dict.fromkeys(removed for removed, _, _ in found):
        words = f"the saliency of OBS ranks the measured increase: {kind}"
        said[words] = Said(found[kind, "compensated", "obs"], False)
        words = f"first and second order together rank the measured increase of plain removals: {kind}"
        said[words] = Said(found[kind, "plain", "both orders"], False)
        if not kind.startswith("random groups"):  # which are alike
            words = f"the curvature's diagonal (OBD) ranks plain removals better than magnitudes do: {kind}"
            said[words] = Said(better(result, kind, "obd", "magnitude"), True)
    return said


def _above(words: str, said: Said) -> Claim:
    one = said.correlation
    verdict = HOLDS if one.low > 0 else FAILS if one.high < 0 else OPEN
    published, measured = ("better", "ρ larger by") if said.difference else ("ρ > 0", "ρ =")
    return Claim(words, published, f"{measured} {one.words}", verdict, *OURS)


SEEN: dict[Part, str] = {"measured": "the same", "held_out": "other"}  # whether curvature has seen them
METHODS = (
    ("OBS beats magnitude at the same sparsity", "obs", "magnitude"),
    ("OBD beats magnitude at the same sparsity", "obd", "magnitude"),
    ("weights that stay make up for small ones that go", "magnitude + obs", "magnitude"),
    ("the choice of OBS is better than that of magnitudes, both made up for", "obs", "magnitude + obs"),
    ("one after the other is better than at once", GREEDY, "obs"),
    ("curvature measured anew is better than once", "obs iterated", "obs"),
)


def _methods(result: Pruned) -> list[Claim]:
    """On data that curvature has not seen; on those it has seen, for blocks at their minimum."""
    asked: list[tuple[str, list[Interval]]] = []
    for words, one, other in METHODS:
        asked.append((f"{words}, on other data", differences(result, one, other, "held_out", False)))
    for words, one, other in METHODS[:3]:
        for data, which in SEEN.items():
            asked.append((f"{words}{PLACE}, on {which} data", differences(result, one, other, data, True)))
    return [_beats(words, found, result) for words, found in asked if found]


def differences(result: Pruned, one: str, other: str, data: Part, at_minimum: bool) -> list[Interval]:
    """Loss by one method less that by another, at each sparsity: means over blocks, over sequences.

    `data` is `measured`, those that curvature has seen, or `held_out`. Empty where a method was left out.
    """
    keys = [key for key in result.sets if key.endswith(AT_MINIMUM) == at_minimum]
    every = [sets for key in keys for sets in every_set(result, key)]

    def changes(method: str) -> list[Effects]:
        return [sets.at(method) for sets in every if method in sets.methods]

    a, b = changes(one), changes(other)
    if not a or len(a) != len(b):
        return []
    means = [np.mean([getattr(each, data) for each in some], axis=0) for some in (a, b)]
    return [over_sequences(values, a[0].shares_of(data)) for values in means[0] - means[1]]


def _beats(words: str, found: list[Interval], result: Pruned) -> Claim:
    """It holds if the loss is lower at every sparsity, and fails if it is higher at one; by intervals."""
    shares = next(iter(result.sets.values())).sparsities
    said = ", ".join(f"{one.words} at {100 * s:.0f} %" for one, s in zip(found, shares, strict=True))
    verdict = FAILS if any(one.low > 0 for one in found) else OPEN
    verdict = HOLDS if all(one.high < 0 for one in found) else verdict
    return Claim(words, "lower loss at every sparsity", f"difference of losses {said}", verdict, *OURS)

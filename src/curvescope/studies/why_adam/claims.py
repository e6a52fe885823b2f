"""What is said about heterogeneity and the gap; every verdict is computed from an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin
from curvescope.studies.why_adam.comparison import Interval, contrast, correlation, together, verdict, words
from curvescope.studies.why_adam.curvature import MEASURES
from curvescope.studies.why_adam.networks import FACTORS, pairs

if TYPE_CHECKING:
    from curvescope.studies.why_adam.study import WhyAdam

OURS: Origin = ("ours", "ours")
SAID = {
    "sizes": "how different the sizes of blocks are",
    "spectra": "how different the spectra of blocks are",
    "entries": "how different the entries inside blocks are",
}
WHEN = {
    "start": "at the start (GGN)",
    "hessian": "at the start (Hessian)",
    "sgd": "along training with SGD (GGN)",
    "adam": "along training with Adam (GGN)",
}
NARROWS = {  # the sign that a change of the gap has to have
    "merged": ("merging queries and keys narrows the gap", -1),
    "linear": ("attention without softmax narrows the gap", -1),
    "bare": ("norms narrow the gap", +1),
}


class Ranked(NamedTuple):
    """A correlation of a measure with the gap."""

    measure: str
    when: str
    among: str  # all, transformer
    found: Correlation


def judge(result: WhyAdam) -> list[Claim]:
    """Correlations, families, paired changes."""
    return [*map(_ranks, correlations(result)), *_families(result), *_factors(result), *_same_way(result)]


def correlations(result: WhyAdam) -> list[Ranked]:
    """Of every measure with the gap: over all configurations, and at the start inside Transformers."""
    groups = {"all": result.configurations, "transformer": result.family("transformer")}
    asked = [("all", measure, when) for when in WHEN for measure in MEASURES]
    if 0 < len(groups["transformer"]) < len(result.configurations):
        asked += [("transformer", measure, "start") for measure in MEASURES]
    return [
        Ranked(
            measure,
            when,
            among,
            correlation(
                result.heterogeneity(measure, when, groups[among]),
                result.gaps(groups[among]),
                draws=result.draws,
                seed=result.seed,
            ),
        )
        for among, measure, when in asked
    ]


def _ranks(one: Ranked) -> Claim:
    where = ", among Transformers alone" if one.among == "transformer" else ""
    said = f"{SAID[one.measure]} {WHEN[one.when]} ranks the gap{where}"
    measured = f"ρ = {one.found.words}, {one.found.groups} configurations"
    return Claim(said, "ρ > 0", measured, verdict(one.found.low, one.found.high), *OURS)


def _families(result: WhyAdam) -> list[Claim]:
    groups = [result.family(name) for name in ("transformer", "mlp")]
    if not all(groups):
        return []
    found = contrast(*(result.gaps(names) for names in groups))
    measured = f"larger by {words(found)}"
    return [Claim("Transformers have a larger gap than MLPs", "larger", measured, verdict(*found[1:]), *OURS)]


def changes(result: WhyAdam, factor: str) -> dict[str, Interval]:
    """What a change of architecture does to the gap and to each measure at the start, over its pairs."""
    found = pairs(factor, result.configurations)
    if not found:
        return {}
    before, after = (list(names) for names in zip(*found, strict=True))

    def change(values: np.ndarray, others: np.ndarray) -> Interval:
        with np.errstate(invalid="ignore"):
            return contrast(values - others)

    measured = {"gap": change(result.gaps(after), result.gaps(before))}
    for measure in MEASURES:
        at = (result.heterogeneity(measure, "start", names) for names in (after, before))
        measured[measure] = change(*at)
    return measured


def _factors(result: WhyAdam) -> list[Claim]:
    found = []
    for factor in FACTORS:
        change = changes(result, factor)
        if not change:
            continue
        said, sign = NARROWS[factor]
        count = len(pairs(factor, result.configurations))
        _, low, high = change["gap"]
        decided = verdict(low, high) if sign > 0 else verdict(-high, -low)
        before, after = FACTORS[factor]
        measured = f"{before} to {after}: gap {words(change['gap'])}, {count} pairs"
        found.append(Claim(said, "narrower", measured, decided, *OURS))
    return found


def _same_way(result: WhyAdam) -> list[Claim]:
    """Whether changes of architecture move a measure and the gap the same way, wherever both are decided."""
    found = []
    for measure in MEASURES:
        ways = {}
        for factor in FACTORS:
            change = changes(result, factor)
            if change:
                ways[factor] = together(change["gap"], change[measure])
        if not ways:
            continue
        decided = set(ways.values()) - {OPEN}
        all_of = HOLDS if decided == {HOLDS} else FAILS if FAILS in decided else OPEN
        measured = ", ".join(f"{' to '.join(FACTORS[name])}: {WAYS[way]}" for name, way in ways.items())
        said = f"what changes {SAID[measure]} at the start (GGN) changes the gap the same way"
        found.append(Claim(said, "same way", measured, all_of, *OURS))
    return found


WAYS = {HOLDS: "same way", FAILS: "the other way", OPEN: "not decided"}

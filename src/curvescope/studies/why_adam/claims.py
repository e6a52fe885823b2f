"""What is said about heterogeneity and the gap; every verdict is computed from an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.ranks import FEWEST, Correlation
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
AMONG = {
    "all": "",
    "transformer": ", among Transformers alone",
    "norm": ", among networks with norms alone",
    "bare": ", among networks without norms alone",
}
"""Groups of configurations, and how a claim says so: a correlation over all may be that of two groups."""
SCOPES = {"of these networks": True, "of others too": False}
"""Whether a claim is about the networks of the study alone, with an interval over seeds, or in general."""
NARROWS = {  # the sign that a change of the gap has to have
    "merged": ("merging queries and keys narrows the gap", -1),
    "linear": ("attention without softmax narrows the gap", -1),
    "bare": ("norms narrow the gap", +1),
}


class Ranked(NamedTuple):
    """A correlation of a measure with the gap."""

    measure: str
    when: str
    among: str  # of AMONG
    found: Correlation


def judge(result: WhyAdam) -> list[Claim]:
    """Correlations, families, paired changes."""
    return [*map(_ranks, correlations(result)), *_families(result), *_factors(result), *_same_way(result)]


def correlations(result: WhyAdam) -> list[Ranked]:
    """Of every measure with the gap: over all configurations, and at the start inside groups."""
    groups = {name: result.group(name) for name in AMONG}
    smaller = [name for name, some in groups.items() if FEWEST <= len(some) < len(result.configurations)]
    asked = [("all", measure, when) for when in WHEN for measure in MEASURES]
    asked += [(name, measure, "start") for name in smaller for measure in MEASURES]
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
    said = f"{SAID[one.measure]} {WHEN[one.when]} ranks the gap{AMONG[one.among]}"
    measured = f"ρ = {one.found.words}, {one.found.groups} configurations"
    return Claim(said, "ρ > 0", measured, verdict(one.found.low, one.found.high), *OURS)


def _families(result: WhyAdam) -> list[Claim]:
    groups = [result.group(name) for name in ("transformer", "mlp")]
    if not all(groups):
        return []
    claims = []
    for scope, fixed in SCOPES.items():
        found = contrast(*(result.gaps(names) for names in groups), fixed=fixed)
        said = f"Transformers have a larger gap than MLPs, {scope}"
        claims.append(Claim(said, "larger", f"larger by {words(found)}", verdict(*found[1:]), *OURS))
    return claims


def changes(
    result: WhyAdam, found: list[tuple[str, str]], *, fixed: bool, tests: int = 1
) -> dict[str, Interval]:
    """What changes in the gap and in each measure at the start from the first to the second of some pairs.

    Args:
        fixed: of these pairs, over seeds alone; so it is for one.
        tests: so many such intervals cover together.
    """
    before, after = (list(names) for names in zip(*found, strict=True))

    def change(values: np.ndarray, others: np.ndarray) -> Interval:
        with np.errstate(invalid="ignore"):
            return contrast(values - others, fixed=fixed, tests=tests)

    measured = {"gap": change(result.gaps(after), result.gaps(before))}
    for measure in MEASURES:
        at = (result.heterogeneity(measure, "start", names) for names in (after, before))
        measured[measure] = change(*at)
    return measured


def _factors(result: WhyAdam) -> list[Claim]:
    claims = []
    for factor, (before, after) in FACTORS.items():
        found = pairs(factor, result.configurations)
        for scope, fixed in SCOPES.items() if found else ():
            said, sign = NARROWS[factor]
            change = changes(result, found, fixed=fixed)["gap"]
            decided = verdict(*change[1:]) if sign > 0 else verdict(-change[2], -change[1])
            measured = f"{before} to {after}: gap {words(change)}, {len(found)} pairs"
            claims.append(Claim(f"{said}, {scope}", "narrower", measured, decided, *OURS))
    return claims


def _same_way(result: WhyAdam) -> list[Claim]:
    """Whether a measure and the gap go the same way, pair by pair, where seeds decide on both.

    The intervals of all pairs cover together, since chance would decide on some of so many. It holds if all
    of those that are decided do, and fails if at least half of them do not; three have to be.
    """
    found = [pair for factor in FACTORS for pair in pairs(factor, result.configurations)]
    each = [changes(result, [pair], fixed=True, tests=len(found)) for pair in found]
    claims = []
    for measure in MEASURES if each else ():
        ways = [together(change["gap"], change[measure]) for change in each]
        same, other = ways.count(HOLDS), ways.count(FAILS)
        decided = same + other
        all_of = OPEN if decided < FEWEST else HOLDS if not other else FAILS if other >= same else OPEN
        measured = (
            f"same way in {same}, the other way in {other} of {len(ways)} pairs; in the rest not decided"
        )
        said = f"what changes {SAID[measure]} at the start (GGN) changes the gap the same way"
        claims.append(Claim(said, "same way", measured, all_of, *OURS))
    return claims

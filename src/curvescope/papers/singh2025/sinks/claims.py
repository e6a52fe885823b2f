"""What the slides say of attention sinks, condition by condition, what we add, and what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.singh2025.rules import OURS, SLIDES
from curvescope.papers.singh2025.sinks.cases import INITIAL, TRAINED
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim
from curvescope.studies.sinks.analysis import UNCHANGED, Quantity, Way, effect

if TYPE_CHECKING:
    from curvescope.papers.singh2025.sinks.study import SinkCases
    from curvescope.studies.sinks import Sinks

STILL = 0.02  # a factor nearer to one than this on every text is no move
GROWN = 0.05  # by so much must the sink's share of the weights rise to count as a larger sink


def of(result: SinkCases) -> list[Claim]:
    """All claims, with verdicts computed from the numbers."""
    found = []
    for name, one in result.cases.items():
        found += [_activations(name, one), _shrinks(name, one), _grows(name, one), _stretches(name, one)]
    trained = result.cases[TRAINED]
    return [
        *found,
        _trained_sink(result),
        _all_alike(trained),
        _ggn_follows(trained),
        _queries_and_keys(trained),
        _beyond_noise(trained),
        _no_sink_needed(trained),
    ]


def last(result: Sinks, how: str) -> Way:
    """A way at its largest strength."""
    return next(way for way in reversed(result.ways) if way.how == how)


def times(result: Sinks, way: Way, *quantities: Quantity) -> str:
    """`λ_max × 1.25 (1.10 to 1.42)` at a strength."""
    labels = {"lambda_max": "λ_max", "bulk_width": "bulk width", "ggn_lambda_max": "λ_max of the GGN"}
    found = [(labels.get(q, q), effect(result, way.name, q)) for q in quantities]
    said = [f"{label} × {e.mean:.3g} ({e.texts.min():.3g} to {e.texts.max():.3g})" for label, e in found]
    return f"{way.how} {way.strength:g}: {', '.join(said)}"


def by_direction(direction: int, wanted: int) -> str:
    """Holds where it is sure to have moved the wanted way, fails where the other way."""
    return HOLDS if direction == wanted else FAILS if direction == -wanted else OPEN


def _activations(name: str, one: Sinks) -> Claim:
    way = last(one, "activation")
    quantities: tuple[Quantity, ...] = ("lambda_max", "bulk_width", "outliers")
    effects = [effect(one, way.name, quantity) for quantity in quantities]
    still = all(np.abs(np.log(e.texts)).max() < STILL for e in effects)
    moved = any(e.direction and np.abs(np.log(e.texts)).min() >= STILL for e in effects)
    verdict = HOLDS if moved else FAILS if still else OPEN
    return Claim(
        f"outlier activations move the spectrum ({name})",
        "move",
        times(one, way, *quantities),
        verdict,
        *SLIDES,
    )


def _shrinks(name: str, one: Sinks) -> Claim:
    way = last(one, "bias")
    verdict = by_direction(effect(one, way.name, "bulk_width").direction, -1)
    return Claim(
        f"a larger bias at the first token shrinks the bulk ({name})",
        "shrinks",
        times(one, way, "bulk_width"),
        verdict,
        *SLIDES,
    )


def _grows(name: str, one: Sinks) -> Claim:
    """At the largest bias; smaller ones are told."""
    way = last(one, "bias")
    verdict = by_direction(effect(one, way.name, "lambda_max").direction, 1)
    others = [w for w in one.ways if w.how == "bias" and w != way]
    path = ", ".join(f"{effect(one, w.name, 'lambda_max').mean:.3g} at {w.strength:g}" for w in others)
    measured = times(one, way, "lambda_max", "outliers") + (f"; λ_max × {path}" if path else "")
    return Claim(
        f"a larger bias at the first token grows the outliers ({name})", "grows", measured, verdict, *SLIDES
    )


def _stretches(name: str, one: Sinks) -> Claim:
    """Over every way whose sink is larger than the model's own: λ_max over the bulk width."""
    larger = [last(one, how) for how in dict.fromkeys(one.hows) if _rise(one, last(one, how)) > GROWN]
    directions = [effect(one, way.name, "stretch").direction for way in larger]
    right, wrong = all(d == 1 for d in directions), all(d == -1 for d in directions)
    verdict = OPEN if not larger else HOLDS if right else FAILS if wrong else OPEN
    measured = "; ".join(times(one, way, "stretch") for way in larger) or "no way made the sink larger"
    return Claim(f"larger sinks stretch the spectrum ({name})", "stretch", measured, verdict, *SLIDES)


def _rise(one: Sinks, way: Way) -> float:
    """By how much the sink's share of the weights rose, mean over texts."""
    return float((one.moved[way.name].mass - one.moved[UNCHANGED].mass).mean())


def _trained_sink(result: SinkCases) -> Claim:
    before, after = (result.cases[name].heads.mass for name in (INITIAL, TRAINED))
    measured = f"mean weight on the first token {before.mean():.3f} at first, {after.mean():.3f} trained; "
    measured += f"its largest head {before.max():.3f} and {after.max():.3f}"
    verdict = HOLDS if after.mean() > before.mean() and after.max() > 2 * before.max() else FAILS
    return Claim("training makes the bundled model's sink", "makes", measured, verdict, *OURS)


def _all_alike(one: Sinks) -> Claim:
    found = {how: effect(one, last(one, how).name, "lambda_max") for how in dict.fromkeys(one.hows)}
    signs = {e.direction for e in found.values()}
    measured = ", ".join(f"{how} × {e.mean:.3g}" for how, e in found.items())
    verdict = HOLDS if signs in ({1}, {-1}) else FAILS if {1, -1} <= signs else OPEN
    return Claim("all ways move λ_max to the same side", "same side", measured, verdict, *OURS)


def _ggn_follows(one: Sinks) -> Claim:
    hows = list(dict.fromkeys(one.hows))
    pairs = [
        [effect(one, last(one, how).name, q).direction for q in ("lambda_max", "ggn_lambda_max")]
        for how in hows
    ]
    each = "; ".join(times(one, last(one, how), "lambda_max", "ggn_lambda_max") for how in hows)
    sure = [(a, b) for a, b in pairs if a or b]
    wrong = any(a * b == -1 for a, b in sure)
    verdict = FAILS if wrong else HOLDS if sure and all(a == b for a, b in sure) else OPEN
    measured = f"both to the same side in {sum(a == b for a, b in sure)} of {len(sure)} ways that move one "
    measured += f"surely; {each}"
    return Claim("the GGN's λ_max moves as the Hessian's does", "same side", measured, verdict, *OURS)


def _queries_and_keys(one: Sinks) -> Claim:
    """With their errors: an eigenvalue lies within."""
    group, way = "queries, keys", last(one, "bias")
    before, after = one.blocks[UNCHANGED], one.blocks[way.name]
    i = before.names.index(group)
    low, high = (side * b.errors[i] for side, b in ((-1, before), (1, after)))
    measured = (
        f"λ_max of these blocks {before.values[i]:.3g} → {after.values[i]:.3g} at bias {way.strength:g}"
    )
    less = after.values[i] + high < before.values[i] + low
    more = after.values[i] - high > before.values[i] - low
    return Claim(
        "a saturated sink takes the curvature of queries and keys",
        "less",
        measured,
        HOLDS if less else FAILS if more else OPEN,
        *OURS,
    )


def _beyond_noise(one: Sinks) -> Claim:
    """The change of the bulk on each text over its error, which holds the noise of probes."""
    way = last(one, "bias")
    found = effect(one, way.name, "bulk_width")
    ratios = np.abs(np.log(found.texts)) / np.maximum(found.errors, np.finfo(float).tiny)
    measured = f"change of the bulk over its error, text by text: {', '.join(f'{r:.2g}' for r in ratios)}"
    return Claim(
        "paired probes tell the bulk's change under a bias from noise",
        "above 1",
        measured,
        HOLDS if ratios.min() > 1 else FAILS,
        *OURS,
    )


def _no_sink_needed(one: Sinks) -> Claim:
    """A one in the denominator and gates take weight away without a token that gets it."""
    hows = [how for how in ("softmax_one", "gated") if how in one.hows]
    effects = [effect(one, last(one, how).name, "bulk_width") for how in hows]
    measured = "; ".join(times(one, last(one, how), "bulk_width") for how in hows)
    right, wrong = all(e.direction == -1 for e in effects), all(e.direction == 1 for e in effects)
    return Claim(
        "weight that goes nowhere shrinks the bulk too (softmax one, gates)",
        "shrinks",
        measured,
        HOLDS if right else FAILS if wrong else OPEN,
        *OURS,
    )

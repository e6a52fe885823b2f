"""The ceiling of the learning rate, of all parameters and of single blocks."""

from __future__ import annotations

import math
from dataclasses import replace

from curvescope.algorithms import Sharpness
from curvescope.core.numbers import plural, rounded
from curvescope.studies.diagnose.checks import limits
from curvescope.studies.diagnose.checks.seen import Seen
from curvescope.studies.diagnose.finding import Finding, unseen

EDGE = "Cohen et al. 2021, Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability"
ADAM = "Cohen et al. 2022, Adaptive Gradient Methods at the Edge of Stability"
OURS = "benchmarks/results/diagnosis: planted rate"


def learning_rate(seen: Seen) -> Finding:
    """The largest stable learning rate, and the given one over it.

    The error has two parts: the residual of λ_max, and how much λ_max differs between parts of the data.
    """
    name, s = "learning_rate", seen.sharpness
    ceiling, rate = s.max_learning_rate, _given(seen)
    if not math.isfinite(ceiling):
        return unseen(name, f"λ_max is {s.value:.3g}: no curvature above zero limits a step")
    relative = math.hypot(s.residual / s.value, 0.0 if math.isnan(seen.spread) else seen.spread)
    told = f"{s.optimizer} is stable up to {s.formula} = {rounded(ceiling, 3)} on these data"
    found = Finding(
        name=name,
        severity="note",
        value=ceiling,
        error=ceiling * relative,
        limit=math.nan,
        unit="ceiling",
        where="",
        meaning=f"{told}; other or fewer data have another ceiling",
        advice="",
        evidence=f"{ADAM if 'Adam' in s.optimizer else EDGE}; {OURS}",
    )
    return found if rate is None else _against(found, rate, told)


def _against(ceiling: Finding, rate: float, told: str) -> Finding:
    """A given rate over the ceiling: a fault beyond 1 by more than the error, a note within it, else fine."""
    ratio = rate / ceiling.value
    error = ratio * ceiling.error / ceiling.value
    told = f"{told}; {rate:g} is {rounded(ratio, 3)} of it"
    safe = below(ceiling.value**2 / (ceiling.value + ceiling.error))
    if ratio - error > limits.RATE:
        severity, meaning = "fault", f"{told}: steps along the sharpest direction grow"
        advice = f"take at most {safe}, or warm up to it while λ_max falls"
    elif ratio + error > limits.RATE:
        severity, meaning = "note", f"{told}, and the error leaves open whether that is too much"
        advice = f"{safe} is below the ceiling by more than its error; more data would make the error smaller"
    else:
        severity, meaning, advice = "fine", told, ""
    found = replace(ceiling, value=ratio, error=error, limit=limits.RATE, unit="given over ceiling")
    return replace(found, severity=severity, meaning=meaning, advice=advice)


def below(rate: float) -> str:
    """Two digits of a rate, rounded down, so that what is said is not above it."""
    place = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return rounded(math.floor(rate / place) * place, 2)


def block_learning_rate(seen: Seen) -> Finding:
    """The matrix whose own ceiling is lowest; whether the given rate is above that of some.

    The ceiling is c/λ_max of the block with the c of gradient descent, 2, or of its momentum.
    """
    name, blocks, s = "block_learning_rate", seen.blocks, seen.sharpness
    if blocks is None or not len(blocks.names):
        return unseen(
            name, "λ_max of single matrices is left out of this run; --set block_steps=8 takes it in"
        )
    i = int(blocks.top.argmax())
    top, error = float(blocks.top[i]), float(blocks.error[i])
    if top <= 0:
        return unseen(name, "no block has curvature above zero")
    most = block_threshold(s)
    rate, ceiling = _given(seen), most / top
    how = "gradient descent 2/λ_max" if "Adam" in s.optimizer else f"{s.optimizer} {s.formula}"
    meaning = f"{blocks.names[i]} alone allows {how} = {rounded(ceiling, 3)}"
    evidence = f"{EDGE}; {OURS}"
    if rate is None or "Adam" in s.optimizer:
        return Finding(
            name=name,
            severity="note",
            value=ceiling,
            error=ceiling * error / top,
            limit=math.nan,
            unit="ceiling",
            where=blocks.names[i],
            meaning=meaning,
            advice="",
            evidence=evidence,
        )
    ends = zip(blocks.names, blocks.top, blocks.error, strict=True)
    over = [n for n, t, e in ends if rate * (t - e) > most]
    ratio = rate / ceiling
    meaning += f"; the given rate is above the ceiling of {plural(len(over), 'block')}" if over else ""
    advice = f"a rate of their own for {', '.join(over[:4])}, or the lower one for all" if over else ""
    return Finding(
        name=name,
        severity="fault" if over else "fine",
        value=ratio,
        error=ratio * error / top,
        limit=limits.RATE,
        unit="given over ceiling",
        where=", ".join(over[:4]) or blocks.names[i],
        meaning=meaning,
        advice=advice,
        evidence=evidence,
    )


def block_threshold(s: Sharpness) -> float:
    """c of η λ_max < c for a block alone: that of SGD with its momentum, and of plain descent beside Adam."""
    known = "Adam" not in s.optimizer and s.value > 0
    return s.max_learning_rate * s.value if known else 2.0


def _given(seen: Seen) -> float | None:
    """The learning rate that was said, else that of a saved state."""
    if seen.learning_rate is not None:
        return seen.learning_rate
    return None if math.isnan(seen.sharpness.learning_rate) else seen.sharpness.learning_rate

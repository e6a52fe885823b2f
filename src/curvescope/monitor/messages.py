"""Sentences about a monitored run: its summary, captions, notes, and its end.

`end_of` gives these numbers of the step that the loop has reached, measured or not:

step       the last that the loop passed on
seconds    since the start, of all processes
share      of them that was spent measuring
skipped    measurements that came due and were not made, to keep the budget
next_step  at which the one that waits would be affordable, at the pace of the loop; only where one waits
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from curvescope.core.number_format import plural, rounded, with_error
from curvescope.monitor.budget import Budget
from curvescope.monitor.diagnosis import verdict
from curvescope.monitor.measurement import PARTS
from curvescope.monitor.run_history import RunHistory, stable_rate
from curvescope.runs.study_result import Line

if TYPE_CHECKING:
    from curvescope.monitor.result import Monitored

SOON = 30  # steps that the first measurement may wait without a word
FAR = 30  # times λ_max: a ceiling that is further is not drawn


def summary(result: Monitored) -> list[Line]:
    """The numbers to look at first."""
    h = result.history
    if not len(h["step"]):
        return [("measurements", "0", "nothing was measured")]
    count, sure = len(h["step"]), int((h["converged"] == 1).sum())
    span = f"steps {h['step'][0]:.0f} to {h['step'][-1]:.0f}, {sure} of them converged"
    if skipped := result.end.get("skipped"):
        span += f"; {skipped:.0f} more that were due were skipped, to keep the budget"
    lines = [("measurements", f"{count}", span)]
    lines += [line for line in (_largest(h), _ceiling(h), _lowest(h), _trace(h), _gap(h)) if line]
    share = f"{h['products'].sum():,.0f} products, {h['cost_seconds'].sum():.3g} s"
    part = result.end["share"] if result.end else float(h["share"][-1])
    lines += _diagnosis(result)
    lines.append(("share of the time", f"{100 * part:.1f} %", f"of {100 * result.budget:g} %: {share}"))
    return lines


def _diagnosis(result: Monitored) -> list[Line]:
    """The verdict of the diagnosis, and the largest rate that would have been stable."""
    findings, history = result.findings, result.run_history
    words = (
        "; ".join(finding.name for finding in findings) or "see docs/guides/unstable.md for what it looks at"
    )
    lines = [("diagnosis", verdict(findings), words)]
    if (rate := stable_rate(history)) is not None:
        error = max(rate.high - rate.value, rate.value - rate.low)
        where = f"by the sharpness at step {rate.step}, the largest of {rate.num_measurements} measurements"
        lines.append(("largest stable rate", with_error(rate.value, error), where))
    return lines


def skipping(end: Mapping[str, float], made: int, budget: float) -> str:
    """Say how many measurements were skipped, why, when the next would have come, and what to do."""
    sentence = (
        f"of the measurements that came due {end['skipped']:.0f} were skipped, {made} made: measuring may "
        f"take {100 * budget:g} % of the time and took {100 * end['share']:.1f} %"
    )
    if "next_step" in end:
        sentence += f"; the next would have come at about step {end['next_step']:,.0f}"
    return f"{sentence}. A larger budget or fewer probe sequences measure more often"


def opening(result: Monitored) -> str:
    """Say how λ_max began, peaked and ended, and whether the optimizer crossed its threshold."""
    h = result.history
    known = np.flatnonzero(np.isfinite(h["lambda_max"]))
    if not len(known):
        return " ".join(["No λ_max was measured.", *_worst_finding(result)])
    first, last, top = int(known[0]), int(known[-1]), int(np.nanargmax(h["lambda_max"]))
    ends = [
        f"{with_error(h['lambda_max'][i], h['lambda_max_error'][i])} at step {h['step'][i]:.0f}"
        for i in (first, last)
    ]
    course = f"λ_max goes from {ends[0]} to {ends[1]}" if last > first else f"λ_max is {ends[0]}"
    if top not in (first, last):
        course += f", highest at step {h['step'][top]:.0f} ({h['lambda_max'][top]:.4g})"
    ratio, what = _ratio(h)
    if not np.isfinite(ratio).any():
        return " ".join([f"{course}.", *_worst_finding(result)])
    above = int((ratio > 1).sum())
    crossed = f"at {above} of {plural(int(np.isfinite(ratio).sum()), 'measurement')}" if above else "nowhere"
    course = f"{course}. {what} is above 1, where steps on the quadratic diverge, {crossed}."
    return " ".join([course, *_worst_finding(result)])


def _worst_finding(result: Monitored) -> list[str]:
    """The worst finding in a sentence."""
    worst = next(iter(result.findings), None)
    return [] if worst is None else [f"Diagnosis: {worst.sentence()}."]


def _ratio(h: dict[str, np.ndarray]) -> tuple[np.ndarray, str]:
    """η · sharpness over the optimizer's threshold, or that of λ_max if no sharpness is known, and its name.

    It is nan in the first steps of an adaptive optimizer, whose preconditioner is not formed yet.
    """
    ratio, counts = h["lr_sharpness"] / h["sharpness_threshold"], RunHistory(h).is_formed()
    if np.isfinite(ratio).any():
        return np.where(counts, ratio, np.nan), "η · sharpness / threshold"
    return h["lr_lambda_max"] / h["threshold"], "η λ_max / threshold"


def _last(h: dict[str, np.ndarray], name: str) -> int | None:
    """Index of the last measurement of a column."""
    known = np.flatnonzero(np.isfinite(h[name]))
    return int(known[-1]) if len(known) else None


def _largest(h: dict[str, np.ndarray]) -> Line | None:
    i = _last(h, "lambda_max")
    if i is None:
        return None
    top = int(np.nanargmax(h["lambda_max"]))
    words = f"at step {h['step'][i]:.0f}; largest {h['lambda_max'][top]:.4g} at step {h['step'][top]:.0f}"
    return "λ_max", with_error(h["lambda_max"][i], h["lambda_max_error"][i]), words


def _ceiling(h: dict[str, np.ndarray]) -> Line | None:
    """The step at which the optimizer was nearest to its threshold, or furthest beyond it."""
    ratio, what = _ratio(h)
    seen = h["lr_sharpness"] / h["sharpness_threshold"]
    if not np.isfinite(ratio).any() and np.isfinite(seen).any():
        i = int(np.flatnonzero(np.isfinite(seen))[-1])
        words = f"at step {h['step'][i]:.0f}; not counted, the optimizer's preconditioner is not formed yet"
        return what, f"{seen[i]:.3g}", words
    if not np.isfinite(ratio).any():
        return None
    top, above = int(np.nanargmax(ratio)), int((ratio > 1).sum())
    times = f"above 1, unstable on the quadratic, at {plural(above, 'measurement')}"
    return what, f"{ratio[top]:.3g}", f"the largest, at step {h['step'][top]:.0f}; {times}"


def _lowest(h: dict[str, np.ndarray]) -> Line | None:
    i = _last(h, "lambda_min")
    if i is None:
        return None
    ratio = abs(h["lambda_min"][i] / h["lambda_max"][i]) if h["lambda_max"][i] else np.nan
    return "λ_min", with_error(h["lambda_min"][i], h["lambda_min_error"][i]), f"|λ_min| / λ_max = {ratio:.2g}"


def _trace(h: dict[str, np.ndarray]) -> Line | None:
    i = _last(h, "trace")
    if i is None:
        return None
    return "trace", rounded(float(h["trace"][i])), f"{_interval(h, 'trace', i)}at step {h['step'][i]:.0f}"


def _gap(h: dict[str, np.ndarray]) -> Line | None:
    i = _last(h, "ggn_gap")
    if i is None:
        return None
    words = f"at step {h['step'][i]:.0f}; λ_max of the GGN {h['ggn_lambda_max'][i]:.4g}"
    return "‖H − H_o‖ / ‖H‖", rounded(float(h["ggn_gap"][i])), _interval(h, "ggn_gap", i) + words


def _interval(h: dict[str, np.ndarray], name: str, i: int) -> str:
    """The 95 % interval of a number, in words; empty for a history without one."""
    low, high = (float(h[f"{name}_{end}"][i]) for end in ("low", "high"))
    known = np.isfinite([low, high]).all()
    return f"95 % interval {rounded(low)} to {rounded(high)}, " if known else ""


def ceiling(h: Mapping[str, np.ndarray]) -> np.ndarray:
    """The λ_max (S,) above which steps on the quadratic diverge: threshold / η; nan where it has none."""
    return h["threshold"] / np.where(h["lr"] > 0, h["lr"], np.nan)


def is_near(h: Mapping[str, np.ndarray]) -> bool:
    """Return True if a ceiling comes near enough to be drawn with λ_max."""
    known = np.isfinite(ceiling(h)) & np.isfinite(h["lambda_max"])
    return bool(known.any() and (ceiling(h)[known] < FAR * np.nanmax(h["lambda_max"])).any())


def _stability(result: Monitored, where: str) -> str:
    """Caption of the course, with the reason if no ceiling is drawn."""
    h = result.history
    caption = (
        f"λ_max of the Hessian {where}, with a band of its error, up to a bound that holds "
        "with probability 99 %; "
    )
    if not len(h["step"]) or is_near(h):
        caption += "dashed: the ceiling, the threshold of the optimizer's momentum over its learning rate η."
    elif np.isfinite(ceiling(h)).any():
        caption += (
            f"its ceiling, the threshold over the learning rate, is more than {FAR} times it, and not drawn."
        )
    elif np.isfinite(h["lr"]).any():
        caption += (
            "without a ceiling: the optimizer scales every parameter by itself, and λ_max of H has none then."
        )
    else:
        caption += "without a ceiling: the learning rate is not known."
    if len(h["step"]) and not np.isfinite(h["sharpness"]).any():
        return caption
    return (
        f"Left: {caption} Right: η times λ_max over the threshold, for the Hessian if it has one and for "
        "what the optimizer sees, P^(−½) (H + weight decay) P^(−½) with its own diagonal P as it was then; "
        "steps on the quadratic diverge above 1."
    )


def captions(result: Monitored) -> dict[str, str]:
    """Captions of the figures and tables, by name."""
    where = f"of {result.model} on {result.num_terms:,.0f} terms of {result.data}, which stay the same"
    known = len(result.history["step"]) and np.isfinite(ceiling(result.history)).any()
    return {
        "course": f"Numbers {where}, over the steps; bands are errors"
        f"{'; of λ_max with its ceiling' if known else ''}.",
        "stability": _stability(result, where),
        "training": "Loss and norm of its gradient on the probe batches, in eval mode.",
        "curvature": "Trace with its standard error over probes, exact inside the subspace of the "
        "eigenvectors; the smallest eigenvalue; and shares: overlap of the top eigenvectors with those of "
        "the measurement before, part of ‖∇L‖² in their span, and how far the GGN is "
        "from the Hessian.",
        "blocks_lambda_max": "λ_max of every block of the Hessian; a block that was not measured at a step "
        "has the color of the last time, white before the first.",
        "blocks_trace": "Trace of every block, from the probes of the whole; blue is below zero, red above.",
        "history": "One row a measurement; empty where the budget left a part out.",
        "blocks": "One row a block and measurement.",
        "steps": "The loss of every training batch that the loop passed on.",
    }


COUNTED = re.compile(r"(.*\bin )(\d+)( entries\b.*)", re.S)
FEW = 4  # counts that are listed one by one


@final
class Notes:
    """Notes in the order in which they came.

    Args:
        texts: those that are there from the beginning.
    """

    def __init__(self, texts: Sequence[str] = ()):
        self._found: dict[tuple[str, str], list[tuple[str, int]]] = {(text, ""): [] for text in texts}

    def add(self, text: str, step: int) -> None:
        """A note of a step; "in 5 entries" is put together with what other steps say of the same."""
        if parts := COUNTED.fullmatch(text):
            self._found.setdefault((parts[1], parts[3]), []).append((parts[2], step))
        else:
            self._found.setdefault((text, ""), [])

    def all(self) -> list[str]:
        """One sentence each."""
        return [f"{before}{_counts(counts)}{after}" for (before, after), counts in self._found.items()]


def _counts(counts: Sequence[tuple[str, int]]) -> str:
    """`186 (step 0), 11 (step 50)`; of many the first and the last."""
    entries = [f"{count} (step {step})" for count, step in counts]
    if len(entries) <= FEW:
        return ", ".join(entries)
    return f"{entries[0]} to {entries[-1]}, at {len(entries)} measurements,"


def schedule(
    budget: Budget, every: int, products: Mapping[str, float], parts: Sequence[str], step: int
) -> str:
    """Say how often the budget allows each part; empty if it allows every due row.

    Args:
        every: steps from one due measurement to the next.
        products: that each part usually takes.
        parts: that are due.
        step: of the training loop.
    """
    first, rest = parts[0], parts[1:]
    between = budget.steps_between(parts[:1], products)
    if not math.isfinite(between):
        return ""
    next_step = step + max(1, math.ceil(budget.wait(first, products) / budget.step_seconds))
    cycle = budget.steps_between(rest, products)
    sentence = (
        f"the first measurement took the time of {budget.spent / budget.step_seconds:.3g} training steps; "
        f"at budget={budget.limit:g} λ_max and the sharpness come again at about step {next_step:,}, then "
        f"about every {max(every, round(between)):,} steps instead of every {every:,}"
    )
    if rest:
        sentence += f", and {', '.join(rest)} about once in {max(every, round(cycle)):,} steps"
    return f"{sentence}. A larger budget or fewer probe sequences measure more often"


def waiting(budget: Budget, products: Mapping[str, float], step: int) -> str:
    """Say when the first measurement will be affordable; empty if that is within the next steps.

    Args:
        products: that each part usually takes.
        step: of the training loop.
    """
    steps = budget.wait_first(PARTS[0], products) / budget.step_seconds
    if not steps > SOON:
        return ""
    return (
        "a training step is short, so the first measurement waits until about step "
        f"{step + math.ceil(steps):,} to keep budget={budget.limit:g}. A larger budget or fewer probe "
        "sequences measure sooner"
    )


def end_of(
    step: int,
    rows: Sequence[Mapping[str, Any]],
    budget: Budget,
    waiting: int,
    products: Mapping[str, float],
) -> dict[str, float]:
    """The numbers above.

    Args:
        step: the last.
        rows: of the history, with what each of them skipped.
        waiting: skipped since the last row, the one that is due now among them.
        products: that each part usually takes.
    """
    before = sum(row["skipped"] for row in rows if not math.isnan(row["skipped"]))
    numbers = {
        "step": step,
        "seconds": budget.elapsed,
        "share": budget.share,
        "skipped": int(before) + waiting,
    }
    if waiting and rows and budget.steps:
        wait = budget.wait(PARTS[0], products)
        numbers["next_step"] = step + max(1, math.ceil(wait / budget.step_seconds))
    return numbers

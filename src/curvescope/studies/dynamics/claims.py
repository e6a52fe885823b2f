"""What papers say of training runs, next to what was measured; every verdict follows from its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.numbers import plural
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin
from curvescope.studies.dynamics.course import Course
from curvescope.studies.dynamics.edge import NEAR, Approach, approach, later_loss
from curvescope.studies.dynamics.grokking import change, phases
from curvescope.studies.dynamics.spikes import SPIKE, false_alarms, onset, rise, warned

if TYPE_CHECKING:
    from curvescope.studies.dynamics.study import Dynamics

GD: Origin = ("Cohen et al. 2021", "paper")
ADAM: Origin = ("Cohen et al. 2022", "paper")
GROK: Origin = ("Power et al. 2022", "paper")
OURS: Origin = ("ours", "ours")
ENOUGH = 0.8  # of measurements that are near
FALLEN = 0.9  # of the loss, at most
SURE = 0.05  # of a test, one-sided
LONG = 20  # measurements of a run that could have risen


def claims(result: Dynamics) -> list[Claim]:
    """One row each."""
    found: list[Claim] = []
    if runs := result.of("edge"):
        found += _edge(runs)
    if runs := result.of("adam"):
        found += _adam(runs[0])
    if result.of("warmup"):
        found += _warmup(result)
    if result.of("spikes"):
        found += _spikes(result)
    if runs := result.of("grokking"):
        found += _grokking(runs)
    return found


def _edge(runs: list[Course]) -> list[Claim]:
    ways = [approach(run) for run in runs]
    return [
        Claim(
            "λ_max rises until it reaches 2/η", "progressive sharpening", _each(ways, _rise),
            _reached(ways), *GD,
        ),
        Claim(
            f"it then stays within {100 * NEAR:.0f} % of 2/η", "hovers just above it", _each(ways, _stay),
            _stays(ways), *GD,
        ),
        Claim(
            "the loss falls over long times, non-monotonically", "it does",
            "; ".join(map(_loss_words, runs, ways)), _falls(runs, ways), *GD,
        ),
    ]  # fmt: skip


def _adam(run: Course) -> list[Claim]:
    way, h = approach(run), run.seen.history
    threshold = float(np.nanmax(h["sharpness_threshold"]))
    start = 0 if way.reached is None else int(np.flatnonzero(run.measured == way.steps[way.reached])[0])
    first, last = h["lambda_max"][start], h["lambda_max"][-1]
    errors = h["lambda_max_error"][start] + h["lambda_max_error"][-1]
    verdict = OPEN if way.reached is None else HOLDS if last - first > errors else FAILS
    return [
        Claim(
            f"Adam: the preconditioned sharpness reaches {threshold:.0f}/η", "it rises to it",
            _rise(way), _reached([way]), *ADAM,
        ),
        Claim(
            f"it then stays within {100 * NEAR:.0f} % of {threshold:.0f}/η", "equilibrates there", _stay(way),
            _stays([way]), *ADAM,
        ),
        Claim(
            "λ_max itself goes on rising meanwhile", "it may", f"from {first:.3g} to {last:.3g}",
            verdict, *ADAM,
        ),
    ]  # fmt: skip


def _each(ways: list[Approach], words) -> str:
    return "; ".join(words(way) for way in ways)


def _rise(way: Approach) -> str:
    low = f"from {way.ratio[way.lowest]:.2f} of it at step {way.steps[way.lowest]}"
    if way.reached is None:
        return f"{low} to {way.ratio[-1]:.2f} at step {way.steps[-1]}, the last"
    ratio, error = way.ratio[way.reached], way.error[way.reached]
    return f"{low} to {ratio:.2f} (± {error:.1g}) at step {way.steps[way.reached]}"


def _reached(ways: list[Approach]) -> str:
    if all(way.reached is not None and way.rises for way in ways):
        return HOLDS
    fell = all(way.reached is None and not way.rises and len(way.ratio) >= LONG for way in ways)
    return FAILS if fell else OPEN


def _stay(way: Approach) -> str:
    if len(way.after) < 2:
        return "not reached" if way.reached is None else "reached at the end"
    low, middle, high = np.quantile(way.after, [0.1, 0.5, 0.9])
    many = plural(len(way.after), "measurement")
    return f"median {middle:.2f} of it, 80 % from {low:.2f} to {high:.2f}, of {many}"


def _stays(ways: list[Approach]) -> str:
    known = [way for way in ways if len(way.after) >= 4]
    if not known:
        return OPEN
    good = [way.near >= ENOUGH for way in known]
    return HOLDS if all(good) else FAILS if not any(good) else OPEN


def _loss_words(run: Course, way: Approach) -> str:
    if way.reached is None:
        return "not reached"
    ratio, up = later_loss(run, int(way.steps[way.reached]))
    return f"× {ratio:.2f} from there on, up on {100 * up:.0f} % of the steps"


def _falls(runs: list[Course], ways: list[Approach]) -> str:
    known = [
        later_loss(run, int(way.steps[way.reached]))
        for run, way in zip(runs, ways, strict=True)
        if way.reached
    ]
    if not known:
        return OPEN
    good = [ratio <= FALLEN and up > 0 for ratio, up in known]
    return HOLDS if all(good) else FAILS if not any(good) else OPEN


def _warmup(result: Dynamics) -> list[Claim]:
    from scipy import stats

    kinds = {way: result.of("warmup", way) for way in ("without", "with")}
    (a, n), (b, m) = ((sum(onset(run) is not None for run in runs), len(runs)) for runs in kinds.values())
    counts: Any = stats.fisher_exact([[a, n - a], [b, m - b]], alternative="greater")
    p = float(counts.pvalue)
    rises = [np.array([rise(run) for run in runs]) for runs in kinds.values()]
    middle = [float(np.median(each)) for each in rises]
    logs = np.log(rises[0]) - np.log(rises[1])
    signs: Any = stats.wilcoxon(logs, alternative="greater") if logs.any() else None
    paired = 1.0 if signs is None else float(signs.pvalue)
    return [
        Claim(
            "without warm-up the run spikes, with it not", "fewer spikes with it",
            f"spikes in {a} of {n} without, {b} of {m} with; one-sided p = {p:.2g}",
            HOLDS if p < SURE else FAILS if b > a else OPEN, *OURS,
        ),
        Claim(
            "with warm-up the loss rises less above its lowest", "less",
            f"at most × {middle[0]:.3g} without, × {middle[1]:.3g} with (medians); paired p = {paired:.2g}",
            HOLDS if paired < SURE else FAILS if middle[1] > middle[0] else OPEN, *OURS,
        ),
    ]  # fmt: skip


def _spikes(result: Dynamics) -> list[Claim]:
    above, below = result.of("spikes", "above"), result.of("spikes", "below")
    spiked = [run for run in above if onset(run) is not None]
    leads = [next(w.lead for w in warned(run) if w.signal == "sharpness") for run in spiked]
    words = f"{plural(len(spiked), 'spike')} in {plural(len(above), 'run')}, "
    words += f"{', '.join(map(str, leads))} steps earlier" if leads else "nothing to warn of"
    verdict = OPEN if not leads else HOLDS if min(leads) > 0 else FAILS
    quiet = [run for run in below if onset(run) is None]
    count, total = false_alarms(quiet)["sharpness"]
    found = [
        Claim("η λ_max is above its threshold before the loss spikes", "before", words, verdict, *OURS),
        Claim(
            "below the ceiling it gives no false alarm", "none",
            f"{count} alarms in {total} measurements of {plural(len(quiet), 'run')} without a spike",
            OPEN if not total else FAILS if count else HOLDS, *OURS,
        ),
    ]  # fmt: skip
    edge = [run for run in result.of("edge") if onset(run) is None]
    if edge:
        count, total = false_alarms(edge)["sharpness"]
        words = (
            f"{count} of {total} measurements at the edge are above, and no spike of {SPIKE:g} times followed"
        )
        found.append(
            Claim("η λ_max > 2 means that a spike comes", "ours", words, FAILS if count else OPEN, *OURS)
        )
    return found


def _grokking(runs: list[Course]) -> list[Claim]:
    found = [phases(run) for run in runs]
    said = []
    for run, one in zip(runs, found, strict=True):
        at = [None if i is None else int(run.evaluated[i]) for i in (one.memorized, one.generalized)]
        said.append(f"memorized at step {at[0]}, generalized at {at[1]}")
    grokked = [one.delayed for one in found]
    verdict = HOLDS if all(grokked) else OPEN  # more steps might show it
    return [
        Claim(
            "the model generalizes long after it has memorized", "it does", "; ".join(said), verdict, *GROK
        ),
        _changed(runs, "λ_max falls when the model groks", per_loss=False),
        _changed(runs, "λ_max falls more than the loss does", per_loss=True),
    ]


def _changed(runs: list[Course], claim: str, *, per_loss: bool) -> Claim:
    moves = [move for run in runs if (move := change(run, "lambda_max", per_loss=per_loss)) is not None]
    what = "λ_max/L" if per_loss else "λ_max"
    words = (
        "; ".join(f"{what} × {m.value:.2g} ({m.low:.2g} to {m.high:.2g})" for m in moves) or "none grokked"
    )
    signs = {move.direction for move in moves}
    verdict = HOLDS if signs == {-1} else FAILS if signs == {1} else OPEN
    return Claim(claim, "flatter", words, verdict, *OURS)

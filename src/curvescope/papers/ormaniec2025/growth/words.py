"""What is said about the sweeps: claims, summary and captions, from the result alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.claims import AUTHORS_CODE, Claim
from curvescope.papers.ormaniec2025.growth.published import published_curves
from curvescope.papers.ormaniec2025.growth.settings import Experiment
from curvescope.papers.ormaniec2025.growth.slopes import Slope
from curvescope.runs.shown import HOLDS

if TYPE_CHECKING:
    from curvescope.papers.ormaniec2025.growth.study import Growth, Sweep

NEAR = 3.0  # standard errors
DATA = "Data: 64 sums of two numbers of five digits, 18 tokens."
NETWORKS = {
    "softmax": "Network: width 128, one head, ReLU feed-forward of width 512, skips, cross-entropy.",
    "linear": "Network: width 128, one head, attention alone, no skips, squared error.",
    "mlp": "Network: linear layers of width 128 without biases, squared error.",
}


def title(experiment: Experiment) -> str:
    """An experiment in words."""
    depth = "one layer" if experiment.depth == 1 else f"{experiment.depth} layers"
    if experiment.family == "mlp":
        return f"linear MLP, {depth}"
    if experiment.family == "linear":
        return f"linear attention, {depth}, squared error"
    norm = "pre-norm" if experiment.norm == "pre" else "no norm"
    return f"softmax attention, {depth}, {norm}"


def family(experiment: Experiment) -> str:
    """A kind of sweep whose exponents belong together: all depths, unless depth changes the exponent."""
    if experiment.family == "linear":
        return title(experiment)
    return {"mlp": "linear MLPs", "softmax": "softmax, pre-norm" if experiment.norm == "pre" else "softmax"}[
        experiment.family
    ]


def claims(result: Growth) -> list[Claim]:
    """One line per kind of sweep, block, part and regime; ranges are over depths and layers.

    The table of slopes has all of them, layer by layer, also those that have no published counterpart.
    """
    groups: dict[tuple[str, ...], list[Slope]] = {}
    for sweep in result.sweeps.values():
        if sweep.setting.grid.startswith("linear"):
            continue  # the same network as on the logarithmic grid
        for row in sweep.table_of_slopes():
            if (math.isnan(row.claimed) and math.isnan(row.expected)) or math.isnan(row.published):
                continue
            power = "no exponent" if math.isnan(row.claimed) else f"σ^{row.claimed:g}"
            scales = f"{row.sigma_lo:g} ≤ σ ≤ {row.sigma_hi:g}"
            key = family(sweep.setting), row.block, row.part, scales, power
            groups.setdefault(key, []).append(row)
    return [_claim(key, rows) for key, rows in groups.items()]


def _claim(key: tuple[str, ...], rows: list[Slope]) -> Claim:
    kind, block, part, scales, power = key
    return Claim(
        f"{kind}: {block}, {part} ~ {power} for {scales}",
        _range(row.published for row in rows),
        _range(row.measured for row in rows),
        _verdict([row.verdict for row in rows]),
        AUTHORS_CODE,
    )


def _range(values: Iterable[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} to {high}"


def _verdict(verdicts: list[str]) -> str:
    kinds = sorted(set(verdicts), key=verdicts.count, reverse=True)
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{kind} ({verdicts.count(kind)} of {len(verdicts)})" for kind in kinds)


def summary(result: Growth) -> list[tuple[str, str, str]]:
    """The numbers to look at first: label, value, words."""
    rows = [row for sweep in result.sweeps.values() for row in sweep.table_of_slopes()]
    laws = [row for row in rows if row.expected == row.claimed]
    claimed = [row for row in rows if not math.isnan(row.claimed)]
    held, all_held = (sum(row.verdict == HOLDS for row in some) for some in (laws, claimed))
    near, of = agreement(result.sweeps.values())
    zeros = [
        float(np.abs(sweep.curve(*row)).max())
        for sweep in result.sweeps.values()
        for row in sweep.setting.rows
        if sweep.setting.is_zero(*row)
    ]
    settings = result.settings
    own = "the paper's own random numbers" if settings["replay"] else f"own seed {settings['seed']}"
    found = [
        ("sweeps", str(len(result.sweeps)), f"{settings['repeats']} repeats each, {own}"),
        ("exponents", f"{held} of {len(laws)}", "claimed ones hold on the ranges where theory expects them"),
        ("on all ranges", f"{all_held} of {len(claimed)}", "hold, where curves bend and saturate included"),
        ("published means", f"{near} of {of}", f"curve points with σ ≤ 1 within {NEAR:g} standard errors"),
    ]
    if zeros:
        found.append(("structural zeros", f"{max(zeros):g}", f"largest norm of {len(zeros)} such curves"))
    return found


def agreement(sweeps: Iterable[Sweep]) -> tuple[int, int]:
    """How many means with σ ≤ 1 are within NEAR standard errors of the published ones, of how many."""
    near = of = 0
    for sweep in sweeps:
        small = sweep.sigma <= 1
        for curve, published in published_curves(sweep.experiment).items():
            values = sweep.curve(*curve)[:, small]
            mean, then = values.mean(0), published.mean[sweep.indices][small]
            spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            error = np.hypot(spread / math.sqrt(len(values)), published.stderr[sweep.indices][small])
            known = np.isfinite(then) & (then > 0) & np.isfinite(error)
            near += int((np.abs(mean - then) <= NEAR * error)[known].sum())
            of += int(known.sum())
    return near, of


def captions(result: Growth) -> dict[str, str]:
    """What each figure and table shows."""
    settings = result.settings
    draw = (
        "new embeddings at every σ"
        if settings.get("redraw") or settings["replay"]
        else "one draw of the embeddings per repeat, scaled"
    )
    found = {
        f"growth_{name}": f"{title(sweep.setting)[0].upper()}{title(sweep.setting)[1:]}. Frobenius norm of "
        "diagonal blocks against the standard deviation σ of the embeddings. Lines: mean of "
        f"{settings['repeats']} repeats ({draw}), the band is its standard error; "
        f"{_method(sweep, settings)}. Dots with bars: published mean of 20 repeats with its standard error. "
        "Gray: slopes that the paper draws. Layers are counted from 0. "
        f"{DATA} {NETWORKS[sweep.setting.family]}"
        for name, sweep in result.sweeps.items()
    }
    found["growth"] = "Every norm; stderr is the error of an estimate over probes, 0 where the norm is exact."
    found["slopes"] = (
        "Slopes of log mean against log σ per regime: claimed by the paper, published (fitted to its data), "
        "measured, with an interval of 95 % from the jackknife over repeats. `expected` is theory's exponent "
        "in the regime, if it has one."
    )
    return found


def _method(sweep: Sweep, settings: dict) -> str:
    if not settings["exact"] and sweep.setting.family != "mlp":
        return f"from {settings['probes']} probes"
    if sweep.setting.depth == 1 or sweep.setting.family == "mlp":
        return "norms are exact"
    return f"exact in the last layer, from {settings['probes']} probes in the others"

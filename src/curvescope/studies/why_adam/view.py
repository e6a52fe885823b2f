"""Tables, claims, figures and captions of the study `why_adam`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.ranks import FEWEST, Correlation
from curvescope.core.numbers import plural
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Line, Origin
from curvescope.studies.common.statistics import Interval, above, below, contrast
from curvescope.studies.why_adam.analysis import (
    CHECKPOINTS,
    CHOICES,
    FACTORS,
    LAST,
    MEASURES,
    MOMENTS,
    MOMENTUM,
    OPTIMIZERS,
    correlation,
    pairs,
    together,
    words,
)
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def claims(result: WhyAdam) -> list[Claim]:
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
    return Claim(said, "ρ > 0", measured, above(one.found), *OURS)


def _families(result: WhyAdam) -> list[Claim]:
    groups = [result.group(name) for name in ("transformer", "mlp")]
    if not all(groups):
        return []
    claims = []
    for scope, fixed in SCOPES.items():
        found = contrast(*(result.gaps(names) for names in groups), fixed=fixed)
        said = f"Transformers have a larger gap than MLPs, {scope}"
        claims.append(Claim(said, "larger", f"larger by {words(found)}", above(found), *OURS))
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
            decided = above(change) if sign > 0 else below(change)
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


# ----------------------------------------------------------------------------------------------------- tables


def tables(result: WhyAdam) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    rows = {
        "gaps": _gaps(result),
        "correlations": _correlations(result),
        "changes": _changes(result),
        "pairs": _pairs(result),
        "heterogeneity": _heterogeneity(result),
        "blocks": _blocks(result),
        "rates": _rates(result),
    }
    return {name: pd.DataFrame(found) for name, found in rows.items()}


def _named(interval: Interval, name: str = "mean") -> dict[str, float]:
    return dict(zip((name, "low", "high"), interval, strict=True))


def _gaps(result: WhyAdam) -> list[dict[str, Any]]:
    """One row for every configuration."""
    found = []
    for name in result.configurations:
        row: dict[str, Any] = {"configuration": name, "parameters": result.curvature[name].num_parameters}
        for optimizer in OPTIMIZERS:
            run = result.runs[f"{name}/{optimizer}"]
            rates, counts = np.unique(run.rates[run.chosen], return_counts=True)
            row[f"lr_{optimizer}"] = float(rates[counts.argmax()])
            row[f"loss_{optimizer}"] = float(run.loss.mean())
        found.append(row | _named(contrast(result.gaps([name])), "gap"))
    return found


def _correlations(result: WhyAdam) -> list[dict[str, Any]]:
    """One row for every correlation."""
    return [
        {"measure": one.measure, "matrix": "H" if one.when == "hessian" else "GGN",
         "when": "start" if one.when == "hessian" else one.when, "among": one.among,
         "rho": one.found.value, "low": one.found.low, "high": one.found.high,
         "configurations": one.found.groups, "above_zero": above(one.found)}
        for one in correlations(result)
    ]  # fmt: skip


def _changes(result: WhyAdam) -> list[dict[str, Any]]:
    """What each factor changes, over its pairs."""
    return [
        {"from": before, "to": after, "of": of, "scope": scope, "pairs": len(found)}
        | _named(interval, "change")
        for factor, (before, after) in FACTORS.items()
        if (found := pairs(factor, result.configurations))
        for scope, fixed in SCOPES.items()
        for of, interval in changes(result, found, fixed=fixed).items()
    ]


def _pairs(result: WhyAdam) -> list[dict[str, Any]]:
    """What changes in each pair."""
    return [
        {"from": pair[0], "to": pair[1], "of": of} | _named(interval, "change")
        for factor in FACTORS
        for pair in pairs(factor, result.configurations)
        for of, interval in changes(result, [pair], fixed=True).items()
    ]


def _heterogeneity(result: WhyAdam) -> list[dict[str, Any]]:
    """Every measure at every moment."""
    return [
        {"configuration": name, "measure": measure, "matrix": "H" if when == "hessian" else "GGN",
         "when": "start" if when == "hessian" else when}
        | _named(contrast(result.heterogeneity(measure, when, [name])))
        for name in result.configurations
        for measure in MEASURES
        for when in ("hessian", *MOMENTS)
    ]  # fmt: skip


def _blocks(result: WhyAdam) -> list[dict[str, Any]]:
    """Sizes of blocks at the start: geometric means over seeds."""
    found = []
    for name in result.configurations:
        one = result.curvature[name]
        for b, block in enumerate(one.blocks):
            sizes = {"ggn": one.ggn_sizes[:, b], "hessian": one.hessian_sizes[:, b]}
            with np.errstate(divide="ignore"):
                means = {key: float(np.exp(np.log(values).mean())) for key, values in sizes.items()}
            found.append({"configuration": name, "block": block} | means)
    return found


def _rates(result: WhyAdam) -> list[dict[str, Any]]:
    """Every rate that was tried."""
    found = []
    for name in result.configurations:
        for optimizer in OPTIMIZERS:
            run = result.runs[f"{name}/{optimizer}"]
            for r, rate in enumerate(run.rates):
                final = run.final[:, r]
                found.append(
                    {"configuration": name, "optimizer": optimizer, "lr": float(rate),
                     "loss": float(final.mean()), "diverged": int(np.isinf(final).sum()),
                     "chosen_by": int((run.chosen == r).sum())}
                )  # fmt: skip
    return found


# ---------------------------------------------------------------------------------------------------- figures

KINDS = {"softmax": style.BLUE, "linear": style.ORANGE, "mlp": style.TEAL}
NAMES = {"adam": "Adam", "sgd": "SGD"}
LABELS = {
    "sizes": "sizes of blocks: spread of log₁₀ mean |λ|",
    "spectra": "spectra of blocks: mean divergence, bits",
    "entries": "inside blocks: spread of log₁₀ |diagonal|",
}


def figures(result: WhyAdam) -> dict[str, Figure]:
    """By name."""
    return {"gap": _gap(result), "along": _along(result), "tuning": _tuning(result)}


def _style(name: str) -> dict[str, Any]:
    """Color: attention or MLP. Shape: single or merged, or depth. Filled: with norms."""
    choice = CHOICES[name]
    mlp = choice.family == "mlp"
    color = KINDS["mlp" if mlp else choice.attention]
    shape = {1: "^", 3: "D"}[choice.hidden] if mlp else "s" if choice.merged else "o"
    return {
        "color": color,
        "marker": shape,
        "ms": 6,
        "mfc": color if choice.norm else "white",
        "mec": color,
    }


def _panels(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure with its axes."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, layout="constrained", **options)


def _gap(result: WhyAdam) -> Figure:
    figure, axes = _panels(1, 3, figsize=(12.5, 4.2), sharey=True)
    ranked = {
        one.measure: one.found for one in correlations(result) if (one.when, one.among) == ("start", "all")
    }
    for ax, measure in zip(axes, MEASURES, strict=True):
        for name in result.configurations:
            x, y = contrast(result.heterogeneity(measure, "start", [name])), contrast(result.gaps([name]))
            bars = {"xerr": _ends(x), "yerr": _ends(y), "lw": 0, "elinewidth": 0.9, "capsize": 2}
            ax.errorbar(x[0], y[0], **bars, **_style(name), label=name)
        rho = ranked[measure]
        ax.set_title(f"at the start: ρ = {rho.words}, {above(rho)}", fontsize=9)
        ax.axhline(0, color="0.7", lw=0.8, zorder=0)
        ax.set_xlabel(LABELS[measure])
    axes[0].set_ylabel("gap: log₁₀ loss with SGD / with Adam")
    _legend(figure, axes[0])
    return figure


def _along(result: WhyAdam) -> Figure:
    figure, axes = _panels(2, 3, figsize=(12.5, 6.6), sharex=True, sharey="col")
    where = np.array([0.0, *(100 * share for share in CHECKPOINTS)])
    for row, optimizer in zip(axes, OPTIMIZERS, strict=True):
        moments = ["start", *(f"{optimizer} {share:.0%}" for share in CHECKPOINTS)]
        for ax, measure in zip(row, MEASURES, strict=True):
            for i, name in enumerate(result.configurations):
                each = [contrast(result.heterogeneity(measure, when, [name])) for when in moments]
                bars = np.hstack([_ends(one) for one in each])
                x = where + 0.9 * (i - len(result.configurations) / 2)
                style = _style(name) | {"ms": 4.5}
                ax.errorbar(x, [one[0] for one in each], bars, **style, lw=0.9, elinewidth=0.6, label=name)
            ax.set_title(f"{NAMES[optimizer]}, {LABELS[measure]}", fontsize=9)
            ax.set_xticks(where, [f"{x:.0f}" for x in where])
    for ax in axes[-1]:
        ax.set_xlabel("share of the run, %")
    _legend(figure, axes[0, 0])
    return figure


def _tuning(result: WhyAdam) -> Figure:
    columns = min(4, len(result.configurations))
    rows = -(-len(result.configurations) // columns)
    size = (3 * columns, 2.3 * rows)
    figure, axes = _panels(rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    for ax in axes.flat[len(result.configurations) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, result.configurations, strict=False):
        for i, optimizer in enumerate(OPTIMIZERS):
            run = result.runs[f"{name}/{optimizer}"]
            known = np.isfinite(run.final)
            for s, final in enumerate(run.final):
                ax.plot(run.rates[known[s]], final[known[s]], ".", ms=3, alpha=0.5, color=PALETTE[i])
            whole = known.all(axis=0)
            mean = run.final[:, whole].mean(axis=0)
            ax.plot(
                run.rates[whole],
                mean,
                ("o-", "s-")[i],
                lw=1.2,
                ms=3,
                color=PALETTE[i],
                label=NAMES[optimizer],
            )
        ax.set_xscale("log")
        ax.set_ylim(0, 3)
        ax.set_title(name, fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel("final loss")
    for ax in axes[-1]:
        ax.set_xlabel("learning rate")
    axes[0, 0].legend()
    return figure


def _ends(interval: tuple[float, float, float]) -> np.ndarray:
    """Lengths of both halves of a bar, (2, 1)."""
    mean, low, high = interval
    return np.nan_to_num(np.array([[mean - low], [high - mean]]), nan=0.0, posinf=0.0, neginf=0.0)


def _legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")


# --------------------------------------------------------------------------------------------------- captions


def summary(result: WhyAdam) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    gaps = {name: contrast(result.gaps([name])) for name in result.configurations}
    order = sorted(gaps, key=lambda name: -gaps[name][0])
    found: list[Line] = [
        (f"gap of {name}", f"{gaps[name][0]:+.3f}", f"95 % {words(gaps[name])}") for name in order
    ]
    found += [(claim.verdict, "", f"{claim.claim}: {claim.measured}") for claim in result.claims()]
    return [*found, *(("note", "", note) for note in result.notes)]


def opening(result: WhyAdam) -> str:
    """The range of gaps, and what ranks them."""
    means = {name: float(result.gap(name).mean()) for name in result.configurations}
    least, most = min(means, key=lambda name: means[name]), max(means, key=lambda name: means[name])
    return (
        f"After {result.steps} steps with tuned rates SGD's loss is {10 ** means[least]:.2f} ({least}) to "
        f"{10 ** means[most]:.2f} ({most}) times Adam's. {_verdicts(result)}"
    )


def captions(result: WhyAdam) -> dict[str, str]:
    """What each figure and table shows."""
    how = (
        f"Gap: log₁₀ (final loss with SGD / with Adam) after {result.steps} steps of {result.batch_size} "
        f"sums, a factor of {10:g} is 1. SGD has momentum {MOMENTUM:g}; neither has a schedule or weight "
        f"decay. The final loss is the mean of the last {LAST} looks at sums that are the same for all. "
        "The rate of a seed is the best one of the other seeds, on a grid that grows until it is inside"
    )
    ends = f"95 % intervals over {plural(result.num_seeds, 'seed')}"
    measures = "; ".join(f"{name}: {said}" for name, said in MEASURES.items())
    curvature = (
        f"Exact, from dense blocks of all weight matrices on {result.num_measured} sums. {measures}. "
        "Spectra are compared by their Jensen–Shannon divergence in bits"
    )
    return {
        "gap": f"{how}. Across: heterogeneity of the GGN before training. {curvature}. Bars are {ends}. "
        f"{_verdicts(result)} Correlation over configurations that were chosen, not cause.",
        "along": f"Heterogeneity of the GGN along the chosen runs. {curvature}. Bars are {ends}.",
        "tuning": f"Final loss against learning rate, means over seeds where all are "
        f"finite; a dot for every seed, losses above 3 are not shown. {how}.",
        "gaps": f"{how}. low and high: {ends}; lr: the rate that most seeds have.",
        "correlations": "Spearman's ρ of heterogeneity with the gap over configurations, of means over "
        f"seeds; interval: a bootstrap that draws configurations and seeds, {result.draws} draws. adam "
        "and sgd: means over checkpoints of the chosen runs.",
        "changes": "What changes in the gap and in heterogeneity at the start (GGN) between configurations "
        "that differ in one thing: mean over pairs and seeds; Student's 95 % interval over "
        "seeds for these networks, over pairs too for others.",
        "pairs": "The same of each pair, over seeds.",
        "heterogeneity": f"{curvature}. low and high: {ends}.",
        "blocks": "Mean |λ| of each block at the start, geometric mean over seeds.",
        "rates": f"All rates tried: mean final loss, runs that diverged, seeds that have it. {how}.",
    }


def _verdicts(result: WhyAdam) -> str:
    """What the figure decides, in a sentence."""
    found = [
        f"{one.measure} ρ = {one.found.words}, {above(one.found)}"
        for one in correlations(result)
        if one.when == "start" and one.among == "all"
    ]
    return f"That heterogeneity ranks the gap: {'; '.join(found)}."

"""Tables, claims, figures and captions of the study `why_adam`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.ranks import FEWEST, Correlation
from curvescope.core.number_format import plural
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Line, Tables
from curvescope.studies.common.statistics import OURS, Interval, above, below, contrast
from curvescope.studies.why_adam import analysis
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.why_adam.study import WhyAdam

SAID = {
    "sizes": "the spread of block sizes",
    "spectra": "the divergence of block spectra",
    "entries": "the spread of entries within blocks",
}
WHEN = {
    "start": "at the start (GGN)",
    "hessian": "at the start (Hessian)",
    "sgd": "along training with SGD (GGN)",
    "adam": "along training with Adam (GGN)",
}
AMONG = {
    "all": "",
    "transformer": ", among Transformers only",
    "norm": ", among networks with norms only",
    "bare": ", among networks without norms only",
}
"""Groups of configurations and their words in claims: a correlation over all may only separate two groups."""
SCOPES = {"for these networks": True, "in general": False}
"""True if a claim is only about the networks of the study, with an interval over seeds; else it is general.
"""
NARROWS = {  # the claim, and the sign of the change of the gap if the claim is true
    "merged": ("merging queries and keys narrows the gap", -1),
    "linear": ("attention without softmax narrows the gap", -1),
    "bare": ("norms narrow the gap", +1),
}


class RankedMeasure(NamedTuple):
    """A rank correlation of a measure with the gap."""

    measure: str
    when: str
    among: str  # a key of AMONG
    found: Correlation


def claims(result: WhyAdam) -> list[Claim]:
    """Claims on correlations, families and paired changes."""
    return [*map(_ranks, correlations(result)), *_families(result), *_factors(result), *_same_way(result)]


def correlations(result: WhyAdam) -> list[RankedMeasure]:
    """Rank correlations of every measure with the gap: over all configurations, at the start in groups."""
    groups = {name: result.group(name) for name in AMONG}
    smaller = [name for name, some in groups.items() if FEWEST <= len(some) < len(result.configurations)]
    choices = [("all", measure, when) for when in WHEN for measure in analysis.MEASURES]
    choices += [(name, measure, "start") for name in smaller for measure in analysis.MEASURES]
    return [
        RankedMeasure(
            measure,
            when,
            among,
            analysis.correlation(
                result.heterogeneity(measure, when, groups[among]),
                result.gaps(groups[among]),
                draws=result.draws,
                seed=result.seed,
            ),
        )
        for among, measure, when in choices
    ]


def _ranks(ranking: RankedMeasure) -> Claim:
    claim = f"{SAID[ranking.measure]} {WHEN[ranking.when]} ranks the gap{AMONG[ranking.among]}"
    measured = f"ρ = {ranking.found.words}, {ranking.found.groups} configurations"
    return Claim(claim, "ρ > 0", measured, above(ranking.found), *OURS)


def _families(result: WhyAdam) -> list[Claim]:
    groups = [result.group(name) for name in ("transformer", "mlp")]
    if not all(groups):
        return []
    claims = []
    for scope, fixed in SCOPES.items():
        difference = contrast(*(result.gaps(names) for names in groups), fixed=fixed)
        claim = f"Transformers have a larger gap than MLPs, {scope}"
        claims.append(
            Claim(claim, "larger", f"larger by {analysis.words(difference)}", above(difference), *OURS)
        )
    return claims


def changes(
    result: WhyAdam, pairs: list[tuple[str, str]], *, fixed: bool, tests: int = 1
) -> dict[str, Interval]:
    """Changes of the gap and of each measure at the start, from the first to the second of each pair.

    Args:
        fixed: True for a statement about these pairs only, with intervals over seeds; used for a single pair.
        tests: number of intervals that must hold simultaneously.
    """
    before, after = (list(names) for names in zip(*pairs, strict=True))

    def change(values: np.ndarray, others: np.ndarray) -> Interval:
        with np.errstate(invalid="ignore"):
            return contrast(values - others, fixed=fixed, tests=tests)

    measured = {"gap": change(result.gaps(after), result.gaps(before))}
    for measure in analysis.MEASURES:
        at = (result.heterogeneity(measure, "start", names) for names in (after, before))
        measured[measure] = change(*at)
    return measured


def _factors(result: WhyAdam) -> list[Claim]:
    claims = []
    for factor, (before, after) in analysis.FACTORS.items():
        matching = analysis.pairs(factor, result.configurations)
        for scope, fixed in SCOPES.items() if matching else ():
            claim, sign = NARROWS[factor]
            change = changes(result, matching, fixed=fixed)["gap"]
            decided = above(change) if sign > 0 else below(change)
            measured = f"{before} to {after}: gap {analysis.words(change)}, {len(matching)} pairs"
            claims.append(Claim(f"{claim}, {scope}", "narrower", measured, decided, *OURS))
    return claims


def _same_way(result: WhyAdam) -> list[Claim]:
    """Claims that a measure and the gap change in the same direction, over pairs that seeds decide.

    The intervals of all pairs hold simultaneously, because with so many pairs chance would decide some. A
    claim holds if all decided pairs agree, and fails if at least half of them disagree; it needs three.
    """
    all_pairs = [
        pair for factor in analysis.FACTORS for pair in analysis.pairs(factor, result.configurations)
    ]
    each = [changes(result, [pair], fixed=True, tests=len(all_pairs)) for pair in all_pairs]
    claims = []
    for measure in analysis.MEASURES if each else ():
        ways = [analysis.together(change["gap"], change[measure]) for change in each]
        same, other = ways.count(HOLDS), ways.count(FAILS)
        decided = same + other
        all_of = OPEN if decided < FEWEST else HOLDS if not other else FAILS if other >= same else OPEN
        measured = (
            f"same direction in {same}, opposite direction in {other} of {len(ways)} pairs; the rest is "
            "undecided"
        )
        claim = f"{SAID[measure]} at the start (GGN) and the gap change in the same direction"
        claims.append(Claim(claim, "same direction", measured, all_of, *OURS))
    return claims


def tables(result: WhyAdam) -> Tables:
    """Return every table by name."""
    return {
        "gaps": _gaps(result),
        "correlations": _correlations(result),
        "changes": _changes(result),
        "pairs": _pairs(result),
        "heterogeneity": _heterogeneity(result),
        "blocks": _blocks(result),
        "rates": _rates(result),
    }


def _named(interval: Interval, name: str = "mean") -> dict[str, float]:
    return dict(zip((name, "low", "high"), interval, strict=True))


def _gaps(result: WhyAdam) -> list[dict[str, Any]]:
    """One row for every configuration."""
    found = []
    for name in result.configurations:
        row: dict[str, Any] = {"configuration": name, "parameters": result.curvature[name].num_parameters}
        for optimizer in analysis.OPTIMIZERS:
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
    """One row per factor: its changes over all pairs."""
    return [
        {"from": before, "to": after, "of": of, "scope": scope, "pairs": len(found)}
        | _named(interval, "change")
        for factor, (before, after) in analysis.FACTORS.items()
        if (found := analysis.pairs(factor, result.configurations))
        for scope, fixed in SCOPES.items()
        for of, interval in changes(result, found, fixed=fixed).items()
    ]


def _pairs(result: WhyAdam) -> list[dict[str, Any]]:
    """One row per pair: its changes."""
    return [
        {"from": pair[0], "to": pair[1], "of": of} | _named(interval, "change")
        for factor in analysis.FACTORS
        for pair in analysis.pairs(factor, result.configurations)
        for of, interval in changes(result, [pair], fixed=True).items()
    ]


def _heterogeneity(result: WhyAdam) -> list[dict[str, Any]]:
    """One row per measure and moment."""
    return [
        {"configuration": name, "measure": measure, "matrix": "H" if when == "hessian" else "GGN",
         "when": "start" if when == "hessian" else when}
        | _named(contrast(result.heterogeneity(measure, when, [name])))
        for name in result.configurations
        for measure in analysis.MEASURES
        for when in ("hessian", *analysis.MOMENTS)
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
    """One row per learning rate that was tried."""
    found = []
    for name in result.configurations:
        for optimizer in analysis.OPTIMIZERS:
            run = result.runs[f"{name}/{optimizer}"]
            for r, rate in enumerate(run.rates):
                final = run.final[:, r]
                found.append(
                    {"configuration": name, "optimizer": optimizer, "lr": float(rate),
                     "loss": float(final.mean()), "diverged": int(np.isinf(final).sum()),
                     "chosen_by": int((run.chosen == r).sum())}
                )  # fmt: skip
    return found


KINDS = {"softmax": style.BLUE, "linear": style.ORANGE, "mlp": style.TEAL}
NAMES = {"adam": "Adam", "sgd": "SGD"}
LABELS = {
    "sizes": "sizes of blocks: spread of log₁₀ mean |λ|",
    "spectra": "spectra of blocks: mean divergence (bits)",
    "entries": "within blocks: spread of log₁₀ |diagonal|",
}


def figures(result: WhyAdam) -> dict[str, Figure]:
    """Return every figure by name."""
    return {"gap": _gap(result), "along": _along(result), "tuning": _tuning(result)}


def _style(name: str) -> dict[str, Any]:
    """Style of a configuration. Color: attention or MLP. Shape: merged or depth. Filled: with norms."""
    choice = analysis.CHOICES[name]
    mlp = choice.family == "mlp"
    color = KINDS["mlp" if mlp else choice.attention]
    shape = {1: "^", 3: "D"}[choice.hidden] if mlp else "s" if choice.merged else "o"
    return {"color": color, "marker": shape, "ms": 6, "mfc": color if choice.norm else "white", "mec": color}


def _gap(result: WhyAdam) -> Figure:
    figure, axes = style.subplots(1, 3, figsize=(12.5, 4.2), sharey=True)
    ranked = {
        one.measure: one.found for one in correlations(result) if (one.when, one.among) == ("start", "all")
    }
    for ax, measure in zip(axes, analysis.MEASURES, strict=True):
        for name in result.configurations:
            x, y = contrast(result.heterogeneity(measure, "start", [name])), contrast(result.gaps([name]))
            bars = {"xerr": _ends(x), "yerr": _ends(y), "lw": 0, "elinewidth": 0.9, "capsize": 2}
            ax.errorbar(x[0], y[0], **bars, **_style(name), label=name)
        rho = ranked[measure]
        ax.set_title(f"at the start: ρ = {rho.words}, {above(rho)}")
        ax.axhline(0, color="0.7", lw=0.8, zorder=0)
        ax.set_xlabel(LABELS[measure])
    axes[0].set_ylabel("gap: log₁₀ loss with SGD / with Adam")
    style.shared_legend(figure, axes[0], loc="outside right center")
    return figure


def _along(result: WhyAdam) -> Figure:
    figure, axes = style.subplots(2, 3, figsize=(12.5, 6.6), sharex=True, sharey="col")
    where = np.array([0.0, *(100 * share for share in analysis.CHECKPOINTS)])
    for row, optimizer in zip(axes, analysis.OPTIMIZERS, strict=True):
        moments = ["start", *(f"{optimizer} {share:.0%}" for share in analysis.CHECKPOINTS)]
        for ax, measure in zip(row, analysis.MEASURES, strict=True):
            for i, name in enumerate(result.configurations):
                each = [contrast(result.heterogeneity(measure, when, [name])) for when in moments]
                bars = np.hstack([_ends(one) for one in each])
                x = where + 0.9 * (i - len(result.configurations) / 2)
                look = _style(name) | {"ms": 4.5}
                ax.errorbar(x, [one[0] for one in each], bars, **look, lw=0.9, elinewidth=0.6, label=name)
            ax.set_title(f"{NAMES[optimizer]}, {LABELS[measure]}")
            ax.set_xticks(where, [f"{x:.0f}" for x in where])
    for ax in axes[-1]:
        ax.set_xlabel("share of the run (%)")
    style.shared_legend(figure, axes[0, 0], loc="outside right center")
    return figure


def _tuning(result: WhyAdam) -> Figure:
    figure, axes = style.panels(len(result.configurations), 4, (3, 2.3), sharex=True, sharey=True)
    for ax, name in zip(axes, result.configurations, strict=True):
        for i, optimizer in enumerate(analysis.OPTIMIZERS):
            run = result.runs[f"{name}/{optimizer}"]
            known = np.isfinite(run.final)
            for s, final in enumerate(run.final):
                ax.plot(run.rates[known[s]], final[known[s]], ".", ms=3, alpha=0.5, color=PALETTE[i])
            whole = known.all(axis=0)
            mean, look = run.final[:, whole].mean(axis=0), {"lw": 1.2, "ms": 3, "color": PALETTE[i]}
            ax.plot(run.rates[whole], mean, ("o-", "s-")[i], label=NAMES[optimizer], **look)
        ax.set(xscale="log", ylim=(0, 3), title=name)
    figure.supxlabel("learning rate")
    figure.supylabel("final loss")
    axes[0].legend()
    return figure


def _ends(interval: Interval) -> np.ndarray:
    """Lengths of both halves of an error bar: (2, 1)."""
    return style.error_bars(*interval)[:, None]


def summary(result: WhyAdam) -> list[Line]:
    """Return the main numbers, each with a label and an explanation."""
    gaps = {name: contrast(result.gaps([name])) for name in result.configurations}
    order = sorted(gaps, key=lambda name: -gaps[name][0])
    found: list[Line] = [
        (f"gap of {name}", f"{gaps[name][0]:+.3f}", f"95 % interval {analysis.words(gaps[name])}")
        for name in order
    ]
    found += [(claim.verdict, "", f"{claim.claim}: {claim.measured}") for claim in result.claims()]
    return [*found, *(("note", "", note) for note in result.notes)]


def opening(result: WhyAdam) -> str:
    """State the range of gaps and the correlations with heterogeneity."""
    means = {name: float(result.gap(name).mean()) for name in result.configurations}
    least, most = min(means, key=lambda name: means[name]), max(means, key=lambda name: means[name])
    return (
        f"After {result.steps} steps with tuned rates, SGD's loss is {10 ** means[least]:.2f} ({least}) "
        f"to {10 ** means[most]:.2f} ({most}) times that of Adam. {_verdicts(result)}"
    )


def captions(result: WhyAdam) -> dict[str, str]:
    """Return the caption of each figure and table."""
    how = (
        f"Gap: log₁₀ (final loss with SGD / with Adam) after {result.steps} steps of {result.batch_size} "
        f"sums; a factor of {10:g} is 1. SGD has momentum {analysis.MOMENTUM:g}; neither has a schedule "
        f"or weight decay. The final loss is the mean of the last {analysis.LAST} measurements, on the "
        "same sums for all runs. The rate of a seed is the best one of the other seeds, on a grid that "
        "grows until the best rate is inside"
    )
    ends = f"95 % intervals over {plural(result.num_seeds, 'seed')}"
    measures = "; ".join(f"{name}: {said}" for name, said in analysis.MEASURES.items())
    curvature = (
        f"Exact, from dense blocks of all weight matrices on {result.num_measured} sums. {measures}. "
        "Spectra are compared by their Jensen–Shannon divergence in bits"
    )
    return {
        "gap": f"{how}. Horizontal: heterogeneity of the GGN before training. {curvature}. Bars are {ends}. "
        f"{_verdicts(result)} The correlations are over selected configurations and do not imply a cause.",
        "along": f"Heterogeneity of the GGN along the chosen runs. {curvature}. Bars are {ends}.",
        "tuning": "Final loss against learning rate: means over seeds if all are finite, and one dot per "
        f"seed. Losses above 3 are not shown. {how}.",
        "gaps": f"{how}. low and high: {ends}; lr: the most frequent rate over seeds.",
        "correlations": "Spearman's ρ of heterogeneity with the gap over configurations, for means over "
        f"seeds. The interval is a bootstrap over configurations and seeds, {result.draws} samples. adam "
        "and sgd: means over checkpoints of the chosen runs.",
        "changes": "Change of the gap and of heterogeneity at the start (GGN) between configurations that "
        "differ in one factor: mean over pairs and seeds, with Student's 95 % interval over seeds (for "
        "these networks), or over pairs and seeds (in general).",
        "pairs": "Change of the gap and of heterogeneity at the start (GGN) in each pair, with intervals "
        "over seeds.",
        "heterogeneity": f"{curvature}. low and high: {ends}.",
        "blocks": "Mean |λ| of each block at the start, geometric mean over seeds.",
        "rates": "All rates tried: mean final loss, number of runs that diverged, number of seeds that use "
        f"the rate. {how}.",
    }


def _verdicts(result: WhyAdam) -> str:
    """State the correlations at the start with their verdicts in one sentence."""
    verdicts = [
        f"{one.measure} ρ = {one.found.words}, {above(one.found)}"
        for one in correlations(result)
        if one.when == "start" and one.among == "all"
    ]
    return f"Correlation of heterogeneity with the gap: {'; '.join(verdicts)}."

"""Tables, claims, figures and captions of the study `prune`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.core.number_format import plural
from curvescope.runs.study_result import Claim, Line, Tables
from curvescope.studies.common.statistics import (
    OURS,
    Interval,
    above,
    all_below,
    interval_columns,
    mean_interval,
)
from curvescope.studies.common.weight_changes import Effects, Part
from curvescope.studies.prune import analysis
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.style import around_zero
from curvescope.viz.trajectory import Marks, Names, name_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.prune.study import Pruned


def tables(result: Pruned) -> Tables:
    """Return every table by name."""
    tables = {"sets": _set_rows(result), "ranks": _rank_rows(result), "samples": _sample_rows(result)}
    if result.heads:
        tables["heads"] = _head_rows(result)
    return tables


def every_set(result: Pruned, key: str) -> list[analysis.RemovalSets]:
    """Return the removals of a block: with curvature measured once, and anew."""
    return [result.sets[key], *([result.rounds[key]] if key in result.rounds else [])]


def _set_rows(result: Pruned) -> list[dict[str, Any]]:
    rows = []
    for name in result.sets:
        for sets in every_set(result, name):
            for i, method in enumerate(sets.methods):
                effects = sets.at(method)
                for j, sparsity in enumerate(sets.sparsities):
                    rows.append(
                        {
                            "block": name,
                            "method": method,
                            "sparsity": sparsity,
                            "saliencies": sets.own[i, j],
                            "first_order": effects.first[j].mean(),
                            "second_order": effects.second[j].mean(),
                            "predicted": effects.predicted[j].mean(),
                            **interval_columns("measured", effects.interval("measured", j)),
                            **interval_columns("held_out", effects.interval("held_out", j)),
                            "residual": sets.residual[i, j],
                        }
                    )
    return rows


def _rank_rows(result: Pruned) -> list[dict[str, Any]]:
    return [
        {
            "removed": row.removed,
            "how": row.how,
            "predictor": row.predictor,
            "formula": analysis.PREDICTORS[row.predictor],
            **interval_columns("spearman", row.correlation),
            "removals": row.correlation.count,
        }
        for row in analysis.rows(result)
    ]


def _sample_rows(result: Pruned) -> list[dict[str, Any]]:
    rows = []
    for kind, samples in (("single weights", result.singles), ("random groups", result.groups)):
        for name, some in samples.items():
            for how in ("plain", "compensated"):
                effects, truth = analysis.of_effects(some, how), analysis.measured(some, how)
                for k in range(len(truth)):
                    rows.append(
                        {
                            "block": name,
                            "removed": kind,
                            "how": how,
                            "magnitude": some.magnitude[k],
                            "fisher": some.fisher[k],
                            "obd": some.obd[k],
                            "obs": some.obs[k],
                            "first_order": effects.first[k].mean(),
                            "second_order": effects.second[k].mean(),
                            "measured": truth[k],
                        }
                    )
    return rows


def _head_rows(result: Pruned) -> list[dict[str, Any]]:
    rows = []
    for heads in result.heads.values():
        for h in range(len(heads.obs)):
            row: dict[str, Any] = {"head": f"L{heads.layer}.h{h}", "fisher": heads.fisher[h]}
            row |= {"obd": heads.obd[h], "obs": heads.obs[h]}
            for how in ("plain", "compensated"):
                effects = analysis.of_effects(heads, how)
                row |= {
                    f"{how}_first_order": effects.first[h].mean(),
                    f"{how}_second_order": effects.second[h].mean(),
                    f"{how}_measured": effects.measured[h].mean(),
                    **interval_columns(f"{how}_held_out", effects.interval("held_out", h)),
                }
            rows.append(row | {"residual": heads.residual[h]})
    return rows


class RankClaim(NamedTuple):
    """A rank correlation, or the difference of two."""

    correlation: Correlation
    difference: bool


def claims(result: Pruned) -> list[Claim]:
    """Return claims on predictions, then claims that compare methods."""
    return [_above(words, ranking) for words, ranking in ranked(result).items()] + _methods(result)


def ranked(result: Pruned) -> dict[str, RankClaim]:
    """Return rank correlations by the claim that they are above zero."""
    correlations = {(row.removed, row.how, row.predictor): row.correlation for row in analysis.rows(result)}
    rankings = {}
    for kind in dict.fromkeys(removed for removed, _, _ in correlations):
        words = f"the saliency of OBS ranks removals by their measured increase: {kind}"
        rankings[words] = RankClaim(correlations[kind, "compensated", "obs"], False)
        words = f"first and second order together rank plain removals by their measured increase: {kind}"
        rankings[words] = RankClaim(correlations[kind, "plain", "both orders"], False)
        if not kind.startswith("random groups"):  # random groups all have nearly the same magnitude
            words = (
                f"the diagonal of the curvature (OBD) ranks plain removals better than the magnitude: {kind}"
            )
            rankings[words] = RankClaim(analysis.better(result, kind, "obd", "magnitude"), True)
    return rankings


def _above(words: str, ranking: RankClaim) -> Claim:
    correlation = ranking.correlation
    verdict = above(correlation)
    published, measured = ("better", "ρ larger by") if ranking.difference else ("ρ > 0", "ρ =")
    return Claim(words, published, f"{measured} {correlation.words}", verdict, *OURS)


# Data on which curvature was measured, or held-out data.
SEEN: dict[Part, str] = {"measured": "the curvature's", "held_out": "held-out"}
METHODS = (
    ("OBS beats magnitude at the same sparsity", "obs", "magnitude"),
    ("OBD beats magnitude at the same sparsity", "obd", "magnitude"),
    (
        "adjusting the remaining weights lowers the loss after magnitude pruning",
        "magnitude + obs",
        "magnitude",
    ),
    ("OBS selects better weights than magnitude, both compensated", "obs", "magnitude + obs"),
    ("removing weights one by one beats removing all at once", analysis.GREEDY, "obs"),
    ("measuring curvature anew beats measuring it once", "obs iterated", "obs"),
)


def _methods(result: Pruned) -> list[Claim]:
    """Claims on held-out data; for blocks at their minimum, also on the data of the curvature."""
    comparisons: list[tuple[str, list[Interval]]] = []
    for words, one, other in METHODS:
        comparisons.append((f"{words}, on held-out data", differences(result, one, other, "held_out", False)))
    for words, one, other in METHODS[:3]:
        for data, which in SEEN.items():
            comparisons.append(
                (f"{words}{analysis.PLACE}, on {which} data", differences(result, one, other, data, True))
            )
    return [_beats(words, intervals, result) for words, intervals in comparisons if intervals]


def differences(result: Pruned, one: str, other: str, data: Part, at_minimum: bool) -> list[Interval]:
    """Loss by one method minus loss by another at each sparsity: means over blocks, intervals over sequences.

    `data` is `measured` (the data of the curvature) or `held_out`. Returns an empty list if a method was not
    run.
    """
    keys = [key for key in result.sets if key.endswith(analysis.AT_MINIMUM) == at_minimum]
    every = [sets for key in keys for sets in every_set(result, key)]

    def changes(method: str) -> list[Effects]:
        return [sets.at(method) for sets in every if method in sets.methods]

    a, b = changes(one), changes(other)
    if not a or len(a) != len(b):
        return []
    means = [np.mean([getattr(each, data) for each in some], axis=0) for some in (a, b)]
    return [mean_interval(values, a[0].shares_of(data)) for values in means[0] - means[1]]


def _beats(words: str, intervals: list[Interval], result: Pruned) -> Claim:
    """Claim that holds if all intervals are below zero, and fails if one of them is above zero."""
    shares = next(iter(result.sets.values())).sparsities
    measured = ", ".join(
        f"{interval.words} at {100 * s:.0f} %" for interval, s in zip(intervals, shares, strict=True)
    )
    verdict = all_below(intervals)
    return Claim(words, "lower loss at every sparsity", f"difference of losses {measured}", verdict, *OURS)


PANELS = (
    ("compensated", "obs", "OBS: saliency"),
    ("compensated", "both orders", "OBS: gᵀδ + ½ δᵀHδ"),
    ("plain", "obd", "plain: OBD, ½ Σ G_qq w²"),
    ("plain", "both orders", "plain: gᵀδ + ½ δᵀHδ"),
)
PARTS: tuple[Part, Part] = ("measured", "held_out")
MARKS = "osD^vP*X"
TAKEN: tuple[Any, ...] = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))
"""Line style of measured values; predicted values are dotted."""
REACH = (4.5, 13.0, 24.0, 36.0, 50.0, 66.0)  # distances in points from a head's marker to its name


def figures(result: Pruned) -> dict[str, Figure]:
    """Return every figure by name."""
    panels = {"samples": _samples(result)}
    panels["sets"] = _sets(result)
    if result.heads:
        panels["heads"] = _heads(result)
    return panels


def _samples(result: Pruned) -> Figure:
    """Predicted against measured increase: one row per kind of removal, one column per predictor."""
    kinds = {kind: parts for kind, parts in analysis.removed_kinds(result).items() if kind != "heads"}
    size = (12.5, 2.8 * len(kinds) + 0.3)
    figure, axes = style.subplots(len(kinds), 4, figsize=size, squeeze=False)
    for row, (kind, parts) in zip(axes, kinds.items(), strict=True):
        for ax, (how, predictor, _) in zip(row, PANELS, strict=True):
            for i, (name, some) in enumerate(zip(result.how, parts, strict=True)):
                values = analysis.predicted(some, how, predictor), analysis.measured(some, how)
                look = {"ms": 4, "alpha": 0.7, "color": PALETTE[i % len(PALETTE)]}
                ax.plot(*values, MARKS[i % len(MARKS)], label=name, **look)
            style.line_of_agreement(ax)
        row[0].set_ylabel(f"{kind}\nmeasured increase")
    for ax, (_, _, title) in zip(axes[0], PANELS, strict=True):
        ax.set_title(f"{title}\n")
    for ax in axes[-1]:
        ax.set_xlabel("predicted")
    axes[0][0].legend()
    return figure


def _sets(result: Pruned) -> Figure:
    """Increase of the loss against sparsity: one line per method, one column per block."""
    count = len(result.sets)
    size = (1.9 + 4.2 * count, 6.4)
    figure, axes = style.subplots(2, count, figsize=size, squeeze=False, sharex=True)
    for column, name in zip(axes.T, result.sets, strict=True):
        lines = [(sets, method) for sets in every_set(result, name) for method in sets.methods]
        for i, (sets, method) in enumerate(lines):
            look = {"color": style.MANY[i % len(style.MANY)], "lw": 1.3}
            x = 100 * sets.sparsities + 0.6 * (i - (len(lines) - 1) / 2)
            effects = sets.at(method)
            for ax, part in zip(column, PARTS, strict=True):
                mean, low, high = np.array([effects.interval(part, j) for j in range(len(x))]).T
                ends = style.error_bars(mean, low, high)
                taken = {"marker": MARKS[i % len(MARKS)], "ls": TAKEN[i % len(TAKEN)], "ms": 5}
                ax.errorbar(x, mean, yerr=ends, label=method, **taken, **look)
            column[0].plot(x, effects.predicted.mean(1), ":", **look)
        for ax in column:
            ax.axhline(0, color="0.5", lw=0.6)
            around_zero(ax, 0.01)
        column[0].set_title(name)
        column[1].set_xlabel("sparsity (%)")
    axes[0][0].set_ylabel("increase of the loss, data of the curvature")
    axes[1][0].set_ylabel("on held-out data")
    handles, labels = axes[0][0].get_legend_handles_labels()
    handles = [*handles, *axes[0][0].plot([], [], ":", color="0.3", lw=1.1)]
    figure.legend(handles, [*labels, "predicted"], loc="outside right center")
    return figure


def _heads(result: Pruned) -> Figure:
    """Predicted against measured increase for named heads, plain and compensated."""
    panels = (("plain", "both orders", "plain"), ("compensated", "both orders", "other heads compensate"))
    figure, axes = style.subplots(1, 2, figsize=(10.4, 4.6))
    for ax, (how, predictor, title) in zip(axes, panels, strict=True):
        for heads in result.heads.values():
            x, y = analysis.predicted(heads, how, predictor), analysis.measured(heads, how)
            ax.plot(x, y, "o", ms=4, color=PALETTE[heads.layer % len(PALETTE)])
        style.line_of_agreement(ax)
        ax.set(title=f"{title}\n", xlabel="predicted, gᵀδ + ½ δᵀHδ")
    axes[0].set_ylabel("measured increase of the loss")
    figure.draw_without_rendering()  # computes the position of the axes
    for ax, (how, predictor, _) in zip(axes, panels, strict=True):
        _name_heads(ax, result, how, predictor)
    return figure


def _name_heads(ax: Axes, result: Pruned, how: str, predictor: str) -> None:
    """Write the name of every head next to its marker if it fits, away from the line."""
    groups = []
    for heads in result.heads.values():
        points = np.column_stack([analysis.predicted(heads, how, predictor), analysis.measured(heads, how)])
        names = [f"L{heads.layer}.h{h}" for h in range(len(points))]
        groups.append(Names(points, names, PALETTE[heads.layer % len(PALETTE)], 7))
    low, high = ax.get_xlim()
    line = np.repeat(np.linspace(low, high, 200)[:, None], 2, axis=1)
    shown = line[(line[:, 1] > ax.get_ylim()[0]) & (line[:, 1] < ax.get_ylim()[1])]
    marks = [*(Marks(group.points) for group in groups), Marks(shown, 0.5)]
    name_points(ax, groups, clear=marks, distances=REACH)


def summary(result: Pruned) -> list[Line]:
    """Return the main numbers, each with a label and an explanation."""
    norms = ", ".join(f"{value:.2g} in {name}" for name, value in result.gradient_norm.items())
    lines = [
        (
            "loss",
            f"{result.loss:.4f}",
            f"on the data of the curvature; {result.held_out_loss:.4f} on held-out data",
        ),
        ("‖g‖", "", f"{norms}; zero at a minimum. Saliencies ignore this first-order term"),
    ]
    for name, minimum in result.minima.items():
        (loss, least), (slope, flat) = minimum.loss, minimum.gradient_norm
        words = (
            f"loss after minimizing over {name}, before: {loss:.4f}; ‖g‖ {flat:.2g}, before: {slope:.2g}; "
        )
        lines.append(("minimum", f"{least:.4f}", f"{words}after {plural(minimum.evaluations, 'gradient')}"))
    shown = {("compensated", "obs"), ("plain", "obd"), ("plain", "both orders")}
    lines += [
        (
            f"{row.removed}",
            row.correlation.words,
            f"ρ of {row.predictor} with the measured increase, {row.how} removals",
        )
        for row in analysis.rows(result)
        if (row.how, row.predictor) in shown
    ]
    for name, sets in result.sets.items():
        for j, sparsity in enumerate(sets.sparsities):
            increases = ", ".join(
                f"{method} {sets.at(method).interval('held_out', j).value:+.3g}" for method in sets.methods
            )
            lines.append(
                (
                    f"{name}, {100 * sparsity:.0f} %",
                    f"increase of the loss on held-out data: {increases}",
                    f"increase of the loss on other data: {increases}",
                )
            )
    return [*lines, *(("note", "", note) for note in result.notes)]


def captions(result: Pruned) -> dict[str, str]:
    """Return the caption of each figure and table."""
    ways = {
        analysis.DENSE: "with the GGN of the block written out",
        analysis.PRODUCTS: "with saliencies from the K-FAC inverse and changes by conjugate gradients with "
        "the GGN",
    }
    how = "; ".join(f"{name} {ways[way]}" for name, way in result.how.items())
    sequences = next(iter(result.sets.values())).effects
    known, other = (
        plural(values.shape[1], "sequence") for values in (sequences.measured, sequences.held_out)
    )
    terms = (
        f"Curvature is measured on {known} of {result.data}; held-out data are {other} more. OBS: δ = "
        f"−H⁻¹_·Q ([H⁻¹]_QQ)⁻¹ w_Q with H = GGN + λ I, λ = {result.damping:g} of its mean diagonal; {how}"
    )
    if result.minima:
        terms += (
            ". `at its minimum`: after minimizing the loss over this block alone, with the losses and "
            "gradients in the first lines of the summary"
        )
    captions = {
        "sets": "Increase of the loss against the share of removed weights, by method. Weights of least "
        "saliency go first: all at once; greedy, one by one with one inverse; iterated, with curvature "
        "measured anew at each sparsity. Predicted is gᵀδ + ½ δᵀHδ with the Hessian (dotted); "
        "saliencies is the method's own prediction. `magnitude + obs` removes the smallest weights and "
        f"adjusts the others. {terms}. Intervals are Student's, over sequences.",
        "ranks": "Spearman's ρ between predicted and measured increase, over removals of all blocks, with "
        "95 % bootstrap intervals over removals.",
        "samples": "Removals that are independent of every method: single weights at equal steps of their "
        f"magnitude rank, and random groups, plain and compensated by the remaining weights. {terms}.",
    }
    if result.heads:
        captions["heads"] = (
            "Single heads removed by setting their rows of W_O to zero, plain and compensated by the "
            "layer's other heads. Predictions include every second-order term within W_O; the diagonal "
            "of `obd` is estimated. residual: relative residual of the conjugate gradients."
        )
    return captions

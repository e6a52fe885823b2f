"""Tables, claims, figures and captions of the study `prune`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.core.numbers import plural
from curvescope.runs.shown import Claim, Line, Origin
from curvescope.studies.common.statistics import Interval, above, all_below, mean_interval
from curvescope.studies.common.weight_changes import Effects, Part
from curvescope.studies.prune.analysis import (
    AT_MINIMUM,
    DENSE,
    GREEDY,
    PLACE,
    PREDICTORS,
    PRODUCTS,
    Sets,
    better,
    measured,
    of_effects,
    predicted,
    removed_kinds,
    rows,
)
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.style import around_zero
from curvescope.viz.trajectory import Marks, Names, name_points

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.prune.study import Pruned


def tables(result: Pruned) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    found = {"sets": _set_rows(result), "ranks": _rank_rows(result), "samples": _sample_rows(result)}
    if result.heads:
        found["heads"] = _head_rows(result)
    return {name: pd.DataFrame(values) for name, values in found.items()}


def every_set(result: Pruned, key: str) -> list[Sets]:
    """Those of a block, at once and iterated."""
    return [result.sets[key], *([result.rounds[key]] if key in result.rounds else [])]


def _set_rows(result: Pruned) -> list[dict[str, Any]]:
    found = []
    for name in result.sets:
        for sets in every_set(result, name):
            for i, method in enumerate(sets.methods):
                effects = sets.at(method)
                for j, sparsity in enumerate(sets.sparsities):
                    held, own = effects.interval("held_out", j), effects.interval("measured", j)
                    found.append(
                        {
                            "block": name,
                            "method": method,
                            "sparsity": sparsity,
                            "saliencies": sets.own[i, j],
                            "first_order": effects.first[j].mean(),
                            "second_order": effects.second[j].mean(),
                            "predicted": effects.predicted[j].mean(),
                            "measured": own.value,
                            "measured_low": own.low,
                            "measured_high": own.high,
                            "held_out": held.value,
                            "held_out_low": held.low,
                            "held_out_high": held.high,
                            "residual": sets.residual[i, j],
                        }
                    )
    return found


def _rank_rows(result: Pruned) -> list[dict[str, Any]]:
    return [
        {
            "removed": row.removed,
            "how": row.how,
            "predictor": row.predictor,
            "formula": PREDICTORS[row.predictor],
            "spearman": row.correlation.value,
            "spearman_low": row.correlation.low,
            "spearman_high": row.correlation.high,
            "removals": row.correlation.count,
        }
        for row in rows(result)
    ]


def _sample_rows(result: Pruned) -> list[dict[str, Any]]:
    found = []
    for kind, samples in (("single weights", result.singles), ("random groups", result.groups)):
        for name, some in samples.items():
            for how in ("plain", "compensated"):
                effects, truth = of_effects(some, how), measured(some, how)
                for k in range(len(truth)):
                    found.append(
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
    return found


def _head_rows(result: Pruned) -> list[dict[str, Any]]:
    found = []
    for heads in result.heads.values():
        for h in range(len(heads.obs)):
            row: dict[str, Any] = {"head": f"L{heads.layer}.h{h}", "fisher": heads.fisher[h]}
            row |= {"obd": heads.obd[h], "obs": heads.obs[h]}
            for how in ("plain", "compensated"):
                effects = of_effects(heads, how)
                held = effects.interval("held_out", h)
                row |= {
                    f"{how}_first_order": effects.first[h].mean(),
                    f"{how}_second_order": effects.second[h].mean(),
                    f"{how}_measured": effects.measured[h].mean(),
                    f"{how}_held_out": held.value,
                    f"{how}_held_out_low": held.low,
                    f"{how}_held_out_high": held.high,
                }
            found.append(row | {"residual": heads.residual[h]})
    return found


# ----------------------------------------------------------------------------------------------------- claims

OURS: Origin = ("ours", "ours")


class Said(NamedTuple):
    """A rank correlation, or the difference of two."""

    correlation: Correlation
    difference: bool


def claims(result: Pruned) -> list[Claim]:
    """Predictions first, then methods against each other."""
    return [_above(words, one) for words, one in ranked(result).items()] + _methods(result)


def ranked(result: Pruned) -> dict[str, Said]:
    """Rank correlations with measured increases, by what is said about them: that they are above zero."""
    found = {(row.removed, row.how, row.predictor): row.correlation for row in rows(result)}
    said = {}
    for kind in dict.fromkeys(removed for removed, _, _ in found):
        words = f"the saliency of OBS ranks the measured increase: {kind}"
        said[words] = Said(found[kind, "compensated", "obs"], False)
        words = f"first and second order together rank the measured increase of plain removals: {kind}"
        said[words] = Said(found[kind, "plain", "both orders"], False)
        if not kind.startswith("random groups"):  # which are alike
            words = f"the curvature's diagonal (OBD) ranks plain removals better than magnitudes do: {kind}"
            said[words] = Said(better(result, kind, "obd", "magnitude"), True)
    return said


def _above(words: str, said: Said) -> Claim:
    one = said.correlation
    verdict = above(one)
    published, measured = ("better", "ρ larger by") if said.difference else ("ρ > 0", "ρ =")
    return Claim(words, published, f"{measured} {one.words}", verdict, *OURS)


SEEN: dict[Part, str] = {"measured": "the same", "held_out": "other"}  # whether curvature has seen them
METHODS = (
    ("OBS beats magnitude at the same sparsity", "obs", "magnitude"),
    ("OBD beats magnitude at the same sparsity", "obd", "magnitude"),
    ("weights that stay make up for small ones that go", "magnitude + obs", "magnitude"),
    ("the choice of OBS is better than that of magnitudes, both made up for", "obs", "magnitude + obs"),
    ("one after the other is better than at once", GREEDY, "obs"),
    ("curvature measured anew is better than once", "obs iterated", "obs"),
)


def _methods(result: Pruned) -> list[Claim]:
    """On data that curvature has not seen; on those it has seen, for blocks at their minimum."""
    asked: list[tuple[str, list[Interval]]] = []
    for words, one, other in METHODS:
        asked.append((f"{words}, on other data", differences(result, one, other, "held_out", False)))
    for words, one, other in METHODS[:3]:
        for data, which in SEEN.items():
            asked.append((f"{words}{PLACE}, on {which} data", differences(result, one, other, data, True)))
    return [_beats(words, found, result) for words, found in asked if found]


def differences(result: Pruned, one: str, other: str, data: Part, at_minimum: bool) -> list[Interval]:
    """Loss by one method less that by another, at each sparsity: means over blocks, over sequences.

    `data` is `measured`, those that curvature has seen, or `held_out`. Empty where a method was left out.
    """
    keys = [key for key in result.sets if key.endswith(AT_MINIMUM) == at_minimum]
    every = [sets for key in keys for sets in every_set(result, key)]

    def changes(method: str) -> list[Effects]:
        return [sets.at(method) for sets in every if method in sets.methods]

    a, b = changes(one), changes(other)
    if not a or len(a) != len(b):
        return []
    means = [np.mean([getattr(each, data) for each in some], axis=0) for some in (a, b)]
    return [mean_interval(values, a[0].shares_of(data)) for values in means[0] - means[1]]


def _beats(words: str, found: list[Interval], result: Pruned) -> Claim:
    """It holds if the loss is lower at every sparsity, and fails if it is higher at one; by intervals."""
    shares = next(iter(result.sets.values())).sparsities
    said = ", ".join(f"{one.words} at {100 * s:.0f} %" for one, s in zip(found, shares, strict=True))
    verdict = all_below(found)
    return Claim(words, "lower loss at every sparsity", f"difference of losses {said}", verdict, *OURS)


# ---------------------------------------------------------------------------------------------------- figures

PANELS = (
    ("compensated", "obs", "OBS: its saliency"),
    ("compensated", "both orders", "OBS: gᵀδ + ½ δᵀHδ"),
    ("plain", "obd", "plain: OBD, ½ Σ G_qq w²"),
    ("plain", "both orders", "plain: gᵀδ + ½ δᵀHδ"),
)
PARTS: tuple[Part, Part] = ("measured", "held_out")
MARKS = "osD^vP*X"
TAKEN: tuple[Any, ...] = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))
"""Dashes of what was measured; dots are of what was predicted."""
REACH = (4.5, 13.0, 24.0, 36.0, 50.0, 66.0)  # points from a head to its name


def figures(result: Pruned) -> dict[str, Figure]:
    """By name."""
    found = {"samples": _samples(result)}
    found["sets"] = _sets(result)
    if result.heads:
        found["heads"] = _heads(result)
    return found


def _samples(result: Pruned) -> Figure:
    """Predicted against measured: a row for what is removed, a column for a predictor."""
    import matplotlib.pyplot as plt

    kinds = {kind: parts for kind, parts in removed_kinds(result).items() if kind != "heads"}
    size = (12.5, 2.8 * len(kinds) + 0.3)
    figure, axes = plt.subplots(len(kinds), 4, figsize=size, layout="constrained", squeeze=False)
    for row, (kind, parts) in zip(axes, kinds.items(), strict=True):
        for ax, (how, predictor, _) in zip(row, PANELS, strict=True):
            for i, (name, some) in enumerate(zip(result.how, parts, strict=True)):
                values = predicted(some, how, predictor), measured(some, how)
                look = {"ms": 4, "alpha": 0.7, "color": PALETTE[i % len(PALETTE)]}
                ax.plot(*values, MARKS[i % len(MARKS)], label=name, **look)
            _equal(ax)
        row[0].set_ylabel(f"{kind}\nmeasured increase", fontsize=8)
    for ax, (_, _, title) in zip(axes[0], PANELS, strict=True):
        ax.set_title(f"{title}\n", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("predicted", fontsize=8)
    axes[0][0].legend(fontsize=7)
    return figure


def _equal(ax: Axes) -> None:
    """The line where what was predicted came out, and few numbers on the axes."""
    low, high = ax.get_xlim()
    ax.axline((0, 0), slope=1, color="0.5", lw=0.7)
    ax.axhline(0, color="0.85", lw=0.6, zorder=0)
    ax.set_xlim(low, high)
    ax.locator_params(nbins=5)
    ax.ticklabel_format(style="sci", scilimits=(-2, 3), useMathText=True)
    ax.xaxis.get_offset_text().set_fontsize(7)
    ax.yaxis.get_offset_text().set_fontsize(7)
    ax.tick_params(labelsize=7)


def _sets(result: Pruned) -> Figure:
    """Increase of the loss against sparsity: a line for every method, a column for every block."""
    import matplotlib.pyplot as plt

    count = len(result.sets)
    size = (1.9 + 4.2 * count, 6.4)
    figure, axes = plt.subplots(2, count, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for column, name in zip(axes.T, result.sets, strict=True):
        lines = [(sets, method) for sets in every_set(result, name) for method in sets.methods]
        for i, (sets, method) in enumerate(lines):
            look = {"color": style.MANY[i % len(style.MANY)], "lw": 1.3}
            x = 100 * sets.sparsities + 0.6 * (i - (len(lines) - 1) / 2)
            effects = sets.at(method)
            for ax, part in zip(column, PARTS, strict=True):
                found = [effects.interval(part, j) for j in range(len(x))]
                mean = np.array([one.value for one in found])
                ends = np.abs(np.array([[one.low, one.high] for one in found]).T - mean)
                taken = {"marker": MARKS[i % len(MARKS)], "ls": TAKEN[i % len(TAKEN)], "ms": 5}
                ax.errorbar(x, mean, yerr=np.nan_to_num(ends), label=method, **taken, **look)
            column[0].plot(x, effects.predicted.mean(1), ":", **look)
        for ax in column:
            ax.axhline(0, color="0.5", lw=0.6)
            around_zero(ax, 0.01)
            ax.tick_params(labelsize=8)
        column[0].set_title(name, fontsize=9)
        column[1].set_xlabel("weights that go, %")
    axes[0][0].set_ylabel("increase of the loss on the data of curvature", fontsize=8)
    axes[1][0].set_ylabel("on other data", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    handles = [*handles, *axes[0][0].plot([], [], ":", color="0.3", lw=1.1)]
    look = {"fontsize": 8, "frameon": False, "loc": "outside right"}
    figure.legend(handles, [*labels, "predicted"], **look)
    return figure


def _heads(result: Pruned) -> Figure:
    """Heads by name, predicted against measured, plain and with the others' answer."""
    import matplotlib.pyplot as plt

    panels = (("plain", "both orders", "plain"), ("compensated", "both orders", "the other heads answer"))
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.6), layout="constrained")
    for ax, (how, predictor, title) in zip(axes, panels, strict=True):
        for heads in result.heads.values():
            x, y = predicted(heads, how, predictor), measured(heads, how)
            ax.plot(x, y, "o", ms=4, color=PALETTE[heads.layer % len(PALETTE)])
        _equal(ax)
        ax.set_title(f"{title}\n")
        ax.set_xlabel("predicted, gᵀδ + ½ δᵀHδ")
    axes[0].set_ylabel("measured increase of the loss")
    figure.draw_without_rendering()  # where the axes are
    for ax, (how, predictor, _) in zip(axes, panels, strict=True):
        _name_heads(ax, result, how, predictor)
    return figure


def _name_heads(ax: Axes, result: Pruned, how: str, predictor: str) -> None:
    """Every head by its name, where there is room for it, off the line."""
    groups = []
    for heads in result.heads.values():
        points = np.column_stack([predicted(heads, how, predictor), measured(heads, how)])
        names = [f"L{heads.layer}.h{h}" for h in range(len(points))]
        groups.append(Names(points, names, PALETTE[heads.layer % len(PALETTE)], 7))
    low, high = ax.get_xlim()
    line = np.repeat(np.linspace(low, high, 200)[:, None], 2, axis=1)
    shown = line[(line[:, 1] > ax.get_ylim()[0]) & (line[:, 1] < ax.get_ylim()[1])]
    marks = [*(Marks(group.points) for group in groups), Marks(shown, 0.5)]
    name_points(ax, groups, clear=marks, distances=REACH)


# --------------------------------------------------------------------------------------------------- captions


def summary(result: Pruned) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    norms = ", ".join(f"{value:.2g} in {name}" for name, value in result.gradient_norm.items())
    found = [
        ("loss", f"{result.loss:.4f}", f"on the data of curvature; {result.held_out_loss:.4f} on others"),
        ("‖g‖", "", f"{norms}: at a minimum it would be zero, and saliencies leave it out"),
    ]
    for name, one in result.minima.items():
        (loss, least), (slope, flat) = one.loss, one.gradient_norm
        words = f"loss of {name} at its minimum, from {loss:.4f}; ‖g‖ {flat:.2g}, from {slope:.2g}, "
        found.append(("minimum", f"{least:.4f}", f"{words}after {plural(one.evaluations, 'gradient')}"))
    shown = {("compensated", "obs"), ("plain", "obd"), ("plain", "both orders")}
    found += [
        (
            f"{row.removed}",
            row.correlation.words,
            f"ρ of {row.predictor} with the measured increase, {row.how}",
        )
        for row in rows(result)
        if (row.how, row.predictor) in shown
    ]
    for name, sets in result.sets.items():
        for j, sparsity in enumerate(sets.sparsities):
            said = ", ".join(
                f"{method} {sets.at(method).interval('held_out', j).value:+.3g}" for method in sets.methods
            )
            found.append(
                (f"{name}, {100 * sparsity:.0f} %", "", f"increase of the loss on other data: {said}")
            )
    return [*found, *(("note", "", note) for note in result.notes)]


def captions(result: Pruned) -> dict[str, str]:
    """What each figure and table shows."""
    ways = {
        DENSE: "with the GGN of the block written out",
        PRODUCTS: "with saliencies of K-FAC's inverse and changes by conjugate gradients with the GGN",
    }
    how = "; ".join(f"{name} {ways[way]}" for name, way in result.how.items())
    sequences = next(iter(result.sets.values())).effects
    known, other = (
        plural(values.shape[1], "sequence") for values in (sequences.measured, sequences.held_out)
    )
    terms = (
        f"Curvature from {known} of {result.data}, other data are {other} more. OBS: δ = −H⁻¹_·Q "
        f"([H⁻¹]_QQ)⁻¹ w_Q with H = GGN + λ I, λ = {result.damping:g} of its mean diagonal; {how}"
    )
    if result.minima:
        terms += "; `at its minimum`: after a descent over the block alone, as far as the first numbers say"
    found = {
        "sets": "Increase of the loss as the least weights of a block go, by method: at once; greedy, one "
        "after the other with one inverse; iterated, with curvature measured anew at each sparsity. "
        "Predicted is gᵀδ + ½ δᵀHδ with the Hessian (dotted), saliencies what the method itself says. "
        "`magnitude + obs` are the smallest weights, made up for. "
        f"{terms}. Intervals are Student's over sequences.",
        "ranks": "Spearman's ρ of predictions with the measured increase, over removals of all blocks, with "
        "95 % intervals by the bootstrap over removals.",
        "samples": "Removals that no method has chosen: single weights at equal steps of their magnitude's "
        f"rank, and groups at random, plain and with the answer of the weights that stay. {terms}.",
    }
    if result.heads:
        found["heads"] = (
            "Whole heads, their rows of W_O at zero, plain and with the answer of the layer's other heads. "
            "Predictions leave out nothing of the second order within W_O; the diagonal of `obd` is "
            "estimated. Residual: of the conjugate gradients."
        )
    return found

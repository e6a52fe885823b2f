"""Tables, figures and captions of the study `bounds`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.bounds import analysis
from curvescope.studies.bounds.analysis import (
    BLOCK,
    CLOSING,
    CLUSTERS,
    CORRECTED,
    DATA,
    DEPTH,
    HEAD,
    KEYLESS,
    NETWORK,
    NONE,
    PRINTED,
    REPAIRED,
    STACK,
    WEIGHTS,
    WHOLE,
    Comparisons,
)
from curvescope.viz.blocks import PALETTE
from curvescope.viz.style import plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.bounds.study import Bounds


def summary(result: Bounds) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    there = [name for name in PRINTED if name in result.bounds.bound]
    found = [_caption_line(name, result.bounds.chosen(bound=name)) for name in there]
    found += [
        _caption_line(name, result.bounds.chosen(bound=name))
        for name in CORRECTED
        if name in result.bounds.bound
    ]
    printed = [one for one in set(result.estimates.bound) if one not in (*CORRECTED, REPAIRED)]
    estimates = result.estimates.chosen(bound=printed)
    names = [
        q if b in PRINTED else f"{q} ({b})" for q, b in zip(estimates.quantity, estimates.bound, strict=True)
    ]
    violated = sorted({name for name, fails in zip(names, estimates.violated, strict=True) if fails})
    found.append(
        (
            "estimates that fail",
            f"{len(violated)} of {len(set(names))}",
            f"of what the printed proofs use: {', '.join(violated) or 'none'}",
        )
    )
    stack = result.bounds.chosen(bound=NONE, quantity=WHOLE)
    if len(stack.true):
        each = [f"{np.median(stack.true[stack.scale == n]):.3g} ({n:g})" for n in np.unique(stack.scale)]
        found.append(("‖H‖ by depth", ", ".join(each), "median over seeds, number of blocks in brackets"))
    return [*found, *(("note", "", note) for note in result.notes)]


def _caption_line(name: str, found: Comparisons) -> Line:
    """How often a bound is violated, and how far it is from the truth where it is not."""
    count, violated = len(found.true), int(found.violated.sum())
    ratio = found.ratio[found.true > 0]
    words = f"bound over truth: median {np.median(ratio):.3g}, from {ratio.min():.3g} to {ratio.max():.3g}"
    if violated:
        worst = int(np.argmin(np.where(found.true > 0, found.ratio, np.inf)))
        words += f"; worst: {found.instance[worst]}, {found.varied[worst]} {found.scale[worst]:g}"
    return (name, f"violated {violated} of {count}", words)


def captions(result: Bounds) -> dict[str, str]:
    """What each figure and table shows."""
    seeds = plural(result.num_seeds, "random instance")
    exact = "True norms are exact: of all eigenvalues of the Hessian, written out in closed form."
    ratio = "The slack is bound over truth: above 1 it holds, below 1 it is violated."
    return {
        "bounds": f"Every bound of every instance next to the true norm. {exact} Certified: from the "
        "matrices of one forward pass, block by block.",
        "slack": f"{ratio} Lines are medians over {seeds}, bands their range, the shaded part is violation; "
        f"over the scale of weights and of data. {exact}",
        "adversarial": f"{ratio} Without keys and at zero loss the printed bound does not see W_Q. Two "
        "tokens that share the attention exceed 1/L, and ‖Z_1‖ its estimate by as much. The estimate of ξ_21 "
        "vanishes with W_2, the derivative does not. Small weights make the precursor's bound smaller than "
        "the GGN of one layer, and than the Hessian of two.",
        "depth": f"Left: ‖H‖ of stacks of post-norm blocks, which no bound covers, and of the largest part "
        f"in one block. Right: slack of the bound of each block alone; {seeds}.",
        "estimates": f"{ratio} What the proofs of Theorems 1 and 6 estimate, printed and repaired: median "
        "and range over all instances in the figure, by kind of instance in the table.",
    }


# ---------------------------------------------------------------------------------------------------- figures

COLORS = {
    analysis.THEOREM_1: PALETTE[1],
    analysis.APPENDIX: PALETTE[4],
    analysis.THEOREM_6: PALETTE[1],
    analysis.LITERAL: PALETTE[4],
    analysis.PRECURSOR: PALETTE[1],
    analysis.PRIORI: PALETTE[3],
    analysis.NORMS: PALETTE[3],
    analysis.MEASURED: PALETTE[0],
    analysis.CERTIFIED: PALETTE[2],
    REPAIRED: PALETTE[0],
}
STYLES = ("-", "--")
LABELS = {
    WEIGHTS: "scale of the weights",
    DATA: "scale of the tokens",
    "W_Q": "scale of W_Q",
    "W_2": "what W_2 is multiplied by",
    "sharpness": "sharpness of the attention",
    DEPTH: "blocks",
}


def figures(result: Bounds) -> dict[str, Figure]:
    """All figures by name."""
    return {
        "slack": _slack(result),
        "adversarial": _adversarial(result),
        "depth": _depth(result),
        "estimates": _estimates(result),
    }


def _panels(rows: int, columns: int, *, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", **options)


def _slack(result: Bounds) -> Figure:
    figure, axes = _panels(2, 2, size=(10.5, 7.6), sharey="row")
    for row, instance in zip(axes, (HEAD, BLOCK), strict=True):
        for ax, varied in zip(row, (WEIGHTS, DATA), strict=True):
            _ratios(ax, result.bounds.chosen(instance=instance, varied=varied), varied)
            ax.set_title(f"{instance}, {LABELS[varied]}")
        row[0].legend()
        for ax in row:
            _frame(ax)
    figure.supylabel("bound / ‖H‖", fontsize=10)
    return figure


def _adversarial(result: Bounds) -> Figure:
    figure, axes = _panels(2, 2, size=(10.5, 7.6))
    _ratios(axes[0][0], result.bounds.chosen(instance=KEYLESS), "W_Q")
    axes[0][0].set_title("‖H‖ of a head with W_K = 0 at zero loss")
    _ratios(axes[0][1], result.estimates.chosen(instance=CLUSTERS, quantity="‖∂A/∂T‖"), "sharpness")
    axes[0][1].set_title("‖∂A/∂T‖ where two of 16 tokens share the attention")
    _ratios(axes[1][0], result.estimates.chosen(instance=CLOSING, quantity="‖ξ_21‖"), "W_2")
    axes[1][0].set_title("‖ξ_21‖, the derivative of ∂S/∂W_1 in W_2")
    _networks(axes[1][1], result.bounds)
    for ax in axes.flat:
        ax.legend()
        _frame(ax)
    figure.supylabel("bound / truth", fontsize=10)
    return figure


def _networks(ax: Axes, found: Comparisons) -> None:
    """One layer, where the GGN is all; and the Hessian of the next larger network."""
    names = list(dict.fromkeys(name for name in found.instance if name.startswith(NETWORK)))[:2]
    for name, style in zip(names, STYLES, strict=False):
        chosen = found.chosen(instance=name, quantity=analysis.WHOLE)
        layers = name.removeprefix(f"{NETWORK}, ")
        _ratios(ax, chosen, WEIGHTS, style=style, suffix=f", {layers}")
    ax.set_title("‖H‖ of fully connected ReLU networks")


def _ratios(ax: Axes, found: Comparisons, varied: str, *, style: str = "-", suffix: str = "") -> None:
    """Median and range of bound / truth over the scale; a line for each bound."""
    for bound in dict.fromkeys(found.bound):
        _figure_line(ax, found.chosen(bound=bound), COLORS[bound], style, f"{bound}{suffix}")
    ax.set_yscale("log")
    if varied != "sharpness":
        ax.set_xscale("log")
    else:
        ax.set_xticks(np.unique(found.scale))
    ax.set_xlabel(LABELS[varied])
    ax.grid(visible=True)


def _frame(ax: Axes) -> None:
    """When everything is drawn: a line at one, and the part below it shaded."""
    low, high = ax.get_ylim()
    low, high = min(low, 0.3) if low > 0 else 0.3, max(high, 3.0)
    ax.axhline(1, color="0.3", lw=0.8)
    ax.axhspan(low, 1, color=PALETTE[1], alpha=0.07, lw=0)
    ax.set_ylim(low, high)
    plain_numbers(ax)


def _figure_line(ax: Axes, found: Comparisons, color: str, style: str, label: str) -> None:
    scales, middle, low, high = _over_scales(found)
    drawn = (middle > 0) & np.isfinite(middle) & ((scales > 0) | (found.varied[0] == "sharpness"))
    ax.plot(scales[drawn], middle[drawn], f"{style}o", ms=3.5, lw=1.2, color=color, label=label)
    ax.fill_between(scales[drawn], low[drawn], high[drawn], color=color, alpha=0.15, lw=0)


def _over_scales(found: Comparisons) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scales, and median, least and largest ratio at each, where the truth is not zero."""
    there = found.true > 0
    scales = np.unique(found.scale[there])
    each = [found.ratio[there & (found.scale == scale)] for scale in scales]
    middle, low, high = (np.array([f(ratios) for ratios in each]) for f in (np.median, np.min, np.max))
    return scales, middle, low, high


def _depth(result: Bounds) -> Figure:
    figure, (left, right) = _panels(1, 2, size=(10.5, 4.2))
    stack = result.bounds.chosen(instance=STACK)
    whole, parts = stack.chosen(bound=analysis.NONE), stack.chosen(bound=analysis.MEASURED)
    _points(left, whole.scale, whole.true, PALETTE[0], "‖H‖ of the stack: no bound")
    pairs = sorted({*zip(parts.scale, parts.seed, strict=True)})
    here = [(parts.scale == depth) & (parts.seed == seed) for depth, seed in pairs]
    depths = np.array([depth for depth, _ in pairs])
    for values, color, label in (
        (parts.true, PALETTE[2], "largest part in one block"),
        (parts.value, PALETTE[3], "its largest bound"),
    ):
        _points(left, depths, np.array([values[chosen].max() for chosen in here]), color, label)
    for i, name in enumerate(dict.fromkeys(parts.quantity)):
        one = parts.chosen(quantity=name)
        _points(right, one.scale, one.ratio, PALETTE[i % len(PALETTE)], name)
    right.axhline(1, color="0.3", lw=0.8)
    left.set_title("norms")
    right.set_title("bound / truth, part of the Hessian in one block")
    for ax, place in ((left, "upper left"), (right, "lower left")):
        ax.set_yscale("log")
        ax.set_xlabel(LABELS[DEPTH])
        ax.set_xticks(np.unique(stack.scale), [f"{n:g}" for n in np.unique(stack.scale)])
        ax.legend(loc=place, ncols=1 if ax is left else 2)
        ax.grid(visible=True)
    right.set_ylim(bottom=0.3)  # room for the legend below one
    plain_numbers(right)
    return figure


def _points(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    """Every value, and a line through the medians."""
    scales = np.unique(x)
    ax.plot(x, y, "o", ms=3, color=color, alpha=0.5)
    ax.plot(scales, [np.median(y[x == one]) for one in scales], "-D", ms=5, lw=1.4, color=color, label=label)


def _estimates(result: Bounds) -> Figure:
    """A line for every estimate of a proof, from its least to its largest ratio over all instances."""
    found = result.estimates
    names = list(dict.fromkeys(zip(found.quantity, found.bound, strict=True)))
    figure, ax = _panels(1, 1, size=(9.5, 0.17 * len(names) + 1.2))
    for y, (quantity, bound) in enumerate(reversed(names)):
        one = found.chosen(quantity=quantity, bound=bound)
        ratio = one.ratio[one.true > 0]
        low, middle, high = np.maximum([ratio.min(), np.median(ratio), ratio.max()], 1e-3)
        color = PALETTE[1] if one.violated.any() else PALETTE[0]
        ax.plot([low, high], [y, y], "-", lw=1.6, color=color, alpha=0.7)
        ax.plot([middle], [y], "o", ms=3.5, color=color)
    ax.axvline(1, color="0.3", lw=0.8)
    ax.set_xscale("log")
    ax.set_xlim(8e-4, 1e8)
    ax.set_yticks(range(len(names)), [f"{one} · {bound}" for one, bound in names[::-1]], fontsize=6.5)
    ax.set_ylim(-1, len(names))
    ax.set_xlabel("bound / truth: median and range (red: violated somewhere; cut at 1e-3 and 1e8)")
    ax.grid(visible=True)
    return figure

"""Tables, figures and captions of the study `bounds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.number_format import plural
from curvescope.runs.study_result import Line
from curvescope.studies.bounds import analysis
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.style import plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.bounds.study import Bounds


def summary(result: Bounds) -> list[Line]:
    """Return the key numbers: label, value, explanation."""
    there = [name for name in analysis.PRINTED if name in result.bounds.bound]
    found = [_caption_line(name, result.bounds.chosen(bound=name)) for name in there]
    found += [
        _caption_line(name, result.bounds.chosen(bound=name))
        for name in analysis.CORRECTED
        if name in result.bounds.bound
    ]
    printed = [
        one for one in set(result.estimates.bound) if one not in (*analysis.CORRECTED, analysis.REPAIRED)
    ]
    estimates = result.estimates.chosen(bound=printed)
    names = [
        q if b in analysis.PRINTED else f"{q} ({b})"
        for q, b in zip(estimates.quantity, estimates.bound, strict=True)
    ]
    violated = sorted({name for name, fails in zip(names, estimates.violated, strict=True) if fails})
    found.append(
        (
            "estimates that fail",
            f"{len(violated)} of {len(set(names))}",
            f"estimates in the printed proofs that fail: {', '.join(violated) or 'none'}",
        )
    )
    stack = result.bounds.chosen(bound=analysis.NONE, quantity=analysis.WHOLE)
    if len(stack.true):
        each = [f"{np.median(stack.true[stack.scale == n]):.3g} ({n:g})" for n in np.unique(stack.scale)]
        found.append(("‖H‖ by depth", ", ".join(each), "median over seeds, number of blocks in brackets"))
    return [*found, *(("note", "", note) for note in result.notes)]


def _caption_line(name: str, found: analysis.Comparisons) -> Line:
    """Summarize how often a bound is violated and its ratios to the truth."""
    count, violated = len(found.true), int(found.violated.sum())
    ratio = found.ratio[found.true > 0]
    words = f"bound over truth: median {np.median(ratio):.3g}, from {ratio.min():.3g} to {ratio.max():.3g}"
    if violated:
        worst = int(np.argmin(np.where(found.true > 0, found.ratio, np.inf)))
        words += f"; worst: {found.instance[worst]}, {found.varied[worst]} {found.scale[worst]:g}"
    return (name, f"violated {violated} of {count}", words)


def captions(result: Bounds) -> dict[str, str]:
    """Return a caption for each figure and table."""
    seeds = plural(result.num_seeds, "random instance")
    exact = "True norms are exact: they come from all eigenvalues of the full Hessian in closed form."
    ratio = "The slack is bound / truth: the bound holds above 1 and is violated below 1."
    return {
        "bounds": f"Every bound of every instance next to the true norm. {exact} Certified: computed "
        "from the matrices of one forward pass, block by block.",
        "slack": f"{ratio} Lines are medians over {seeds}, bands are the range, and the shaded area "
        f"means violation; over the scale of weights and of data. {exact}",
        "adversarial": f"{ratio} Without keys and at zero loss the printed bound does not depend on W_Q. "
        "Two tokens that attend to each other exceed 1/L, and ‖Z_1‖ exceeds its estimate by the same "
        "factor. The estimate of ξ_21 vanishes with W_2, but the derivative does not. Small weights make "
        "the precursor's bound smaller than the GGN of one layer, and than the Hessian of two.",
        "depth": "Left: ‖H‖ of stacks of post-norm blocks, which no bound covers, and the largest norm of "
        f"the part of H in one block. Right: slack of the bound of each block alone; {seeds}.",
        "estimates": f"{ratio} Estimates in the proofs of Theorems 1 and 6, as printed and repaired. The "
        "figure shows median and range over all instances, the table each kind of instance.",
    }


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
    analysis.REPAIRED: PALETTE[0],
}
STYLES = ("-", "--")
LABELS = {
    analysis.WEIGHTS: "scale of the weights",
    analysis.DATA: "scale of the tokens",
    "W_Q": "scale of W_Q",
    "W_2": "factor of W_2",
    "sharpness": "sharpness of the attention",
    analysis.DEPTH: "blocks",
}


def figures(result: Bounds) -> dict[str, Figure]:
    """Return all figures by name."""
    return {
        "slack": _slack(result),
        "adversarial": _adversarial(result),
        "depth": _depth(result),
        "estimates": _estimates(result),
    }


def _slack(result: Bounds) -> Figure:
    figure, axes = style.subplots(2, 2, figsize=(10.5, 7.6), sharey="row")
    for row, instance in zip(axes, (analysis.HEAD, analysis.BLOCK), strict=True):
        for ax, varied in zip(row, (analysis.WEIGHTS, analysis.DATA), strict=True):
            _ratios(ax, result.bounds.chosen(instance=instance, varied=varied), varied)
            ax.set_title(f"{instance}, {LABELS[varied]}")
        row[0].legend()
        for ax in row:
            _frame(ax)
    figure.supylabel("bound / ‖H‖")
    return figure


def _adversarial(result: Bounds) -> Figure:
    figure, axes = style.subplots(2, 2, figsize=(10.5, 7.6))
    _ratios(axes[0][0], result.bounds.chosen(instance=analysis.KEYLESS), "W_Q")
    axes[0][0].set_title("‖H‖ of a head with W_K = 0 at zero loss")
    _ratios(axes[0][1], result.estimates.chosen(instance=analysis.CLUSTERS, quantity="‖∂A/∂T‖"), "sharpness")
    axes[0][1].set_title("‖∂A/∂T‖, two of 16 tokens attend to each other")
    _ratios(axes[1][0], result.estimates.chosen(instance=analysis.CLOSING, quantity="‖ξ_21‖"), "W_2")
    axes[1][0].set_title("‖ξ_21‖, the derivative of ∂S/∂W_1 in W_2")
    _networks(axes[1][1], result.bounds)
    for ax in axes.flat:
        ax.legend()
        _frame(ax)
    figure.supylabel("bound / truth")
    return figure


def _networks(ax: Axes, found: analysis.Comparisons) -> None:
    """Draw one layer, whose Hessian is its GGN, and the Hessian of the next larger network."""
    names = list(dict.fromkeys(name for name in found.instance if name.startswith(analysis.NETWORK)))[:2]
    for name, dash in zip(names, STYLES, strict=False):
        chosen = found.chosen(instance=name, quantity=analysis.WHOLE)
        layers = name.removeprefix(f"{analysis.NETWORK}, ")
        _ratios(ax, chosen, analysis.WEIGHTS, dash=dash, suffix=f", {layers}")
    ax.set_title("‖H‖ of fully connected ReLU networks")


def _ratios(ax: Axes, found: analysis.Comparisons, varied: str, *, dash: str = "-", suffix: str = "") -> None:
    """Draw median and range of bound / truth over the scale, one line for each bound."""
    for bound in dict.fromkeys(found.bound):
        _figure_line(ax, found.chosen(bound=bound), COLORS[bound], dash, f"{bound}{suffix}")
    ax.set_yscale("log")
    if varied != "sharpness":
        ax.set_xscale("log")
    else:
        ax.set_xticks(np.unique(found.scale))
    ax.set_xlabel(LABELS[varied])
    ax.grid(visible=True)


def _frame(ax: Axes) -> None:
    """Add the line at one, and shade the area below it."""
    low, high = ax.get_ylim()
    low, high = min(low, 0.3) if low > 0 else 0.3, max(high, 3.0)
    ax.axhline(1, color="0.3", lw=0.8)
    ax.axhspan(low, 1, color=PALETTE[1], alpha=0.07, lw=0)
    ax.set_ylim(low, high)
    plain_numbers(ax)


def _figure_line(ax: Axes, found: analysis.Comparisons, color: str, dash: str, label: str) -> None:
    scales, middle, low, high = _over_scales(found)
    drawn = (middle > 0) & np.isfinite(middle) & ((scales > 0) | (found.varied[0] == "sharpness"))
    ax.plot(scales[drawn], middle[drawn], f"{dash}o", ms=3.5, lw=1.2, color=color, label=label)
    ax.fill_between(scales[drawn], low[drawn], high[drawn], color=color, alpha=0.15, lw=0)


def _over_scales(found: analysis.Comparisons) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the scales, and median, minimum and maximum ratio at each, without zero truths."""
    there = found.true > 0
    scales = np.unique(found.scale[there])
    each = [found.ratio[there & (found.scale == scale)] for scale in scales]
    middle, low, high = (np.array([f(ratios) for ratios in each]) for f in (np.median, np.min, np.max))
    return scales, middle, low, high


def _depth(result: Bounds) -> Figure:
    figure, (left, right) = style.subplots(1, 2, figsize=(10.5, 4.2))
    stack = result.bounds.chosen(instance=analysis.STACK)
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
        ax.set(yscale="log", xlabel=LABELS[analysis.DEPTH])
        ax.set_xticks(np.unique(stack.scale), [f"{n:g}" for n in np.unique(stack.scale)])
        ax.legend(loc=place, ncols=1 if ax is left else 2)
        ax.grid(visible=True)
    right.set_ylim(bottom=0.3)  # space for the legend below one
    plain_numbers(right)
    return figure


def _points(ax: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    """Draw every value, and a line through the medians."""
    scales = np.unique(x)
    ax.plot(x, y, "o", ms=3, color=color, alpha=0.5)
    ax.plot(scales, [np.median(y[x == one]) for one in scales], "-D", ms=5, lw=1.4, color=color, label=label)


def _estimates(result: Bounds) -> Figure:
    """Draw a line for every estimate of a proof, from its smallest to its largest ratio."""
    found = result.estimates
    names = list(dict.fromkeys(zip(found.quantity, found.bound, strict=True)))
    figure, ax = style.subplots(1, 1, figsize=(9.5, 0.17 * len(names) + 1.2))
    for y, (quantity, bound) in enumerate(reversed(names)):
        one = found.chosen(quantity=quantity, bound=bound)
        ratio = one.ratio[one.true > 0]
        low, middle, high = np.maximum([ratio.min(), np.median(ratio), ratio.max()], 1e-3)
        color = PALETTE[1] if one.violated.any() else PALETTE[0]
        ax.plot([low, high], [y, y], "-", lw=1.6, color=color, alpha=0.7)
        ax.plot([middle], [y], "o", ms=3.5, color=color)
    ax.axvline(1, color="0.3", lw=0.8)
    ax.set(xscale="log", xlim=(8e-4, 1e8))
    ax.set_yticks(range(len(names)), [f"{one} · {bound}" for one, bound in names[::-1]])
    ax.set(
        ylim=(-1, len(names)),
        xlabel="bound / truth: median and range (red: violated at least once; clipped to 1e-3 … 1e8)",
    )
    ax.grid(visible=True)
    return figure

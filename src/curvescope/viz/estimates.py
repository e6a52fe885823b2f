"""Figures of single estimates: samples around their mean, extreme eigenvalues, entries of a diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.hessian_terms import MATRICES
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 2000  # of a sorted curve: more are not visible on a screen


@style.in_style
def samples(
    ax: Axes | None, found: np.ndarray, value: float, interval: tuple[float, float], *, label: str
) -> Axes:
    """Draw one point per probe, a line at the estimate and a band over its interval, where it is finite."""
    ax = _axes(ax)
    low, high = interval
    if np.isfinite(low) and np.isfinite(high):
        ax.axhspan(low, high, alpha=0.2, color=style.BLUE, lw=0, label="95 % interval")
    ax.axhline(value, color=style.BLUE, lw=1.2, label="estimate")
    ax.plot(np.arange(1, len(found) + 1), found, "o", ms=3.5, color="0.35", label="one probe")
    ax.set(xlabel="probe", ylabel=label)
    ax.locator_params(axis="x", integer=True)
    ax.legend()
    return ax


@style.in_style
def eigenvalues(ax: Axes | None, values: np.ndarray, errors: np.ndarray, converged: np.ndarray) -> Axes:
    """Draw eigenvalues by number with their residuals; those that are not converged are hollow."""
    ax = _axes(ax)
    numbers = np.arange(1, len(values) + 1)
    ax.axhline(0, color="0.6", lw=0.6)
    for shown, fill, words in ((converged, style.BLUE, "converged"), (~converged, "none", "not converged")):
        if shown.any():
            look = {"fmt": "o", "ms": 4.5, "lw": 1, "color": style.BLUE, "mfc": fill, "label": words}
            ax.errorbar(numbers[shown], values[shown], yerr=errors[shown], **look)
    ax.set(xlabel="number", ylabel="eigenvalue λ")
    ax.locator_params(axis="x", integer=True)
    ax.legend()
    return ax


@style.in_style
def entries(ax: Axes | None, values: np.ndarray, *, label: str) -> Axes:
    """Draw entries from the largest to the smallest against their share; both signs on a symlog axis."""
    ax = _axes(ax)
    share = np.linspace(0, 100, min(len(values), POINTS))
    curve = np.sort(values)[::-1][np.round(np.linspace(0, len(values) - 1, len(share))).astype(int)]
    top = float(np.abs(curve).max(initial=0.0))
    ax.plot(share, curve, lw=1.4)
    if top > 1e-200:  # below it a logarithmic axis overflows
        ax.set_yscale("symlog", linthresh=1e-4 * top)
    ax.axhline(0, color="0.6", lw=0.6)
    ax.set(xlabel="share of the entries, largest first (%)", ylabel=label)
    return ax


def _axes(ax: Axes | None) -> Axes:
    return style.axes((5, 3.2)) if ax is None else ax


OURS, OTHERS = style.BLUE, "0.72"
_OWN = ("gradient", *MATRICES)


@style.in_style
def bars(
    names: Sequence[str], ratios: Sequence[tuple[float, float, float]], memory: Sequence[float] | None
) -> Figure:
    """Draw horizontal bars of time in gradients (median, with a line from minimum to maximum), and of
    peak GiB. Names of our own methods begin with gradient or the name of a matrix. Unknown memory (nan)
    has no bar.
    """
    size = (8, 0.45 * len(names) + 1.4)
    columns = 1 if memory is None else 2
    figure, axes = style.subplots(1, columns, figsize=size, sharey=True, squeeze=False, layout="tight")
    colors = [OURS if name.replace(",", "").split()[0] in _OWN else OTHERS for name in names]
    rows = range(len(names))
    left = axes[0, 0]
    left.barh(rows, [m for m, _, _ in ratios], color=colors)
    left.hlines(rows, [low for _, low, _ in ratios], [high for _, _, high in ratios], color="black", lw=1)
    left.set_yticks(rows, names)
    left.invert_yaxis()
    left.set_xlabel("time of one product, in gradients")
    left.axvline(1, color="black", lw=0.6, ls=":")
    for row, (median, _, high) in zip(rows, ratios, strict=True):
        left.annotate(
            f"{median:.2f}", (max(median, high), row), (4, 0), textcoords="offset points", va="center"
        )
    left.margins(x=0.12)
    if memory is not None:
        right = axes[0, 1]
        right.barh(rows, memory, color=colors)
        right.set_xlabel("peak memory, GiB")
        right.margins(x=0.15)
        for row, amount in zip(rows, memory, strict=True):
            if amount == amount:
                right.annotate(
                    f"{amount:.1f}", (amount, row), (4, 0), textcoords="offset points", va="center"
                )
    return figure


@style.in_style
def quality(
    layers: Sequence[str],
    methods: Sequence[str],
    error: np.ndarray,
    lambda_max: np.ndarray,
    cosine: np.ndarray,
    cosine_gradient: np.ndarray,
) -> Figure:
    """Draw relative error, ratio of the largest eigenvalues and cosine of the steps: (methods, layers) each.

    Args:
        layers: Their names.
        methods: Their names.
        error: ‖K − H_o‖ / ‖H_o‖.
        lambda_max: λ_max(K) / λ_max(H_o).
        cosine: Cosine of the preconditioned gradients.
        cosine_gradient: (layers,) cosine of the plain gradient, as gray lines.
    """
    width = max(2.0 + 0.22 * len(layers), 5.5)
    fig, axes = style.subplots(3, 1, figsize=(width, 6.4), sharex=True)
    x, step = np.arange(len(layers)), 0.6 / max(len(methods), 1)
    labels = ("‖K − H_o‖ / ‖H_o‖", "λ_max(K) / λ_max(H_o)", "cosine with (H_o + δ)⁻¹ g")
    for ax, values, label in zip(axes, (error, lambda_max, cosine), labels, strict=True):
        for i, method in enumerate(methods):
            shift = step * (i - (len(methods) - 1) / 2)
            ax.plot(x + shift, values[i], "o", ms=4, color=PALETTE[i % len(PALETTE)], label=method)
        ax.set_ylabel(label)
        ax.grid(axis="y", lw=0.3, color="0.9")
    axes[1].axhline(1.0, color="0.6", lw=0.6)
    axes[2].plot(x, cosine_gradient, "_", ms=28, color="0.5", label="gradient itself")
    axes[2].set_xticks(x, layers, rotation=90 if len(layers) > 6 else 0)
    style.shared_legend(fig, axes[2], loc="outside upper center", ncols=3)
    return fig

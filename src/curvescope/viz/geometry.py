"""Figures of embeddings, heads and norms: distributions, spectra, coverage, composition, ellipsoids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.trajectory import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from matplotlib.typing import ColorType

SPREAD = "viridis"


@style.in_style
def extremes_histogram(
    ax: Axes,
    values: np.ndarray,
    *,
    title: str,
    top: Sequence[tuple[str, float]] = (),
    bottom: Sequence[tuple[str, float]] = (),
) -> Axes:
    """Draw the distribution of one score over the vocabulary, its extreme tokens named at both ends."""
    ax.hist(values, bins=min(60, max(10, len(values) // 12)), color=PALETTE[0], alpha=0.75)
    ax.set_yscale("symlog", linthresh=1)
    ax.set_ylim(0, ax.get_ylim()[1] * 60)  # space for the names
    for tokens, side, color in ((bottom, 0.02, PALETTE[1]), (top, 0.98, PALETTE[2])):
        words = "\n".join(f"{short(t)}  {v:.3g}" for t, v in tokens)
        ax.text(
            side, 0.97, words, transform=ax.transAxes, va="top", ha="left" if side < 0.5 else "right",
            color=color, linespacing=1.15,
        )  # fmt: skip
        ax.plot([v for _, v in tokens], np.zeros(len(tokens)), "|", color=color, ms=9, mew=1.5, clip_on=False)
    ax.set_title(title)
    return ax


@style.in_style
def spectra(
    ax: Axes, values: np.ndarray, *, title: str, label: str = "singular value", log: bool = True
) -> Axes:
    """Draw the singular values (H, r) of all heads, one line each; rows may end in NaN."""
    for color, row, head in zip(_colors(len(values)), values, range(len(values)), strict=True):
        ax.plot(np.arange(1, len(row) + 1), row, color=color, lw=1.3, label=f"h{head}")
    if log and np.nanmin(values) > 0 and np.nanmax(values) > 20 * np.nanmin(values):
        ax.set_yscale("log")
    _finish(ax, title, "number of the singular value", label, len(values))
    return ax


@style.in_style
def coverage(ax: Axes, share: np.ndarray, *, title: str, num_99: np.ndarray, of: str) -> Axes:
    """Draw the share (H, r) of the first singular values in their sum; dots are the first above 99 %."""
    for color, row, first, head in zip(_colors(len(share)), share, num_99, range(len(share)), strict=True):
        x, y = np.arange(len(row) + 1), np.concatenate([[0.0], 100 * row])
        ax.plot(x, y, color=color, lw=1.3, label=f"h{head}")
        if 0 < first <= len(row):
            ax.plot(first, 100 * row[int(first) - 1], "o", color=color, ms=4)
    ax.axhline(99, color="0.6", lw=0.8, ls="--")
    _finish(ax, title, "number of singular values", f"share of {of} (%)", len(share))
    return ax


@style.in_style
def composition_map(
    ax: Axes, z: np.ndarray, senders: Sequence[str], receivers: Sequence[str], *, title: str, limit: float
) -> AxesImage:
    """Draw how far composition scores are above chance, in its standard deviations, colors up to ± limit."""
    from matplotlib.colors import SymLogNorm

    norm = SymLogNorm(linthresh=2.0, vmin=-limit, vmax=limit)
    image = ax.imshow(np.ma.masked_invalid(z), cmap=style.SIGNED, norm=norm, interpolation="nearest")
    ax.set_xticks(range(len(receivers)), list(receivers), rotation=90, **style.fitting(len(receivers)))
    ax.set_yticks(range(len(senders)), list(senders), **style.fitting(len(senders)))
    ax.set_facecolor("0.93")
    ax.tick_params(length=0)
    ax.set(xlabel="to", ylabel="from", title=title)
    return image


@style.in_style
def head_map(
    ax: Axes,
    values: np.ndarray,
    layers: Sequence[int],
    *,
    title: str,
    limits: tuple[float, float] | None = None,
) -> Axes:
    """Draw one number per layer (rows) and head (columns), written into its cell."""
    low, high = limits or (float(np.nanmin(values)), float(np.nanmax(values)))
    two_sided = low < 0
    image = ax.imshow(
        values, cmap=style.SIGNED if two_sided else style.MAP, vmin=low, vmax=high, aspect="auto"
    )
    style.write_cells(ax, "{:.2g}".format, size=7)
    ax.set_xticks(range(values.shape[1]), [f"h{j}" for j in range(values.shape[1])])
    ax.set_yticks(range(len(layers)), [f"L{i}" for i in layers])
    ax.tick_params(length=0)
    ax.set_title(title)
    ax.figure.colorbar(image, ax=ax, pad=0.02)
    return ax


@style.in_style
def four_panels(axes: Sequence[Axes], *, seed: int = 0) -> Sequence[Axes]:
    """Draw in the plane what a norm and a matrix do: sphere, ellipsoid, translated ellipsoid, its image."""
    random = np.random.default_rng(seed)
    turn = np.linspace(0, 2 * np.pi, 200)
    marks = np.sort(random.uniform(0, 2 * np.pi, 20))
    W = np.array([[0.8, -0.5], [0.3, 0.9]])
    shift, axes_of = np.array([3.0, 2.0]), np.array([4.0, 2.0])
    circle, dots = (np.stack([np.cos(t), np.sin(t)], 1) for t in (turn, marks))
    shown = (("Layer normalization\nx → n(x), the sphere", 3 * circle, 3 * dots),
             ("scaling γ\nn → γ ∘ n, an ellipsoid", circle * axes_of, dots * axes_of),
             ("shift β\n→ γ ∘ n + β, moved", circle * axes_of + shift, dots * axes_of + shift),
             ("matrix W\n→ (γ ∘ n + β) W", circle * axes_of + shift, dots * axes_of + shift))  # fmt: skip
    for i, (ax, (title, curve, points)) in enumerate(zip(axes, shown, strict=True)):
        last = i == 3
        ax.plot(*curve.T, color="black" if last else PALETTE[0], lw=1.6)
        ax.scatter(*points.T, s=14, color="black" if last else PALETTE[0], zorder=3)
        if last:
            ax.plot(*(curve @ W).T, color=PALETTE[1], lw=1.6)
            ax.scatter(*(points @ W).T, s=14, color=PALETTE[1], zorder=3)
        if i == 1:
            for end in ((axes_of[0], 0.0), (0.0, axes_of[1])):
                _arrow(ax, (0.0, 0.0), end, PALETTE[3])
        if i == 2:
            _arrow(ax, (0.0, 0.0), tuple(shift), PALETTE[2])
        ax.plot(0, 0, "+", color="0.5", ms=7)
        ax.set(xlim=(-5, 8), ylim=(-5.5, 7.5), aspect="equal", xticks=[], yticks=[])
        ax.set_title(title)
        for side in ax.spines.values():
            side.set_color("0.85")
    return axes


@style.in_style
def semi_axes(ax: Axes, lengths: Mapping[str, np.ndarray], *, radius: float, title: str) -> Axes:
    """Draw the semi-axes of ellipsoids, longest first, logarithmic; dashed is the sphere of radius √d."""
    for color, (name, values) in zip(_colors(len(lengths)), lengths.items(), strict=True):
        ax.plot(np.arange(1, len(values) + 1), values, color=color, lw=1.3, label=name)
    ax.axhline(radius, color="0.5", lw=0.8, ls="--")
    ax.set_yscale("log")
    _finish(ax, title, "number of the axis", "length of the semi-axis", len(lengths))
    return ax


@style.in_style
def ellipsoid_shadow(ax: Axes, points: np.ndarray, first: float, second: float, *, title: str) -> Axes:
    """Draw states (n, 2) in the plane of an ellipsoid's two longest semi-axes, with its outline."""
    turn = np.linspace(0, 2 * np.pi, 200)
    ax.plot(first * np.cos(turn), second * np.sin(turn), color=PALETTE[0], lw=1.2)
    ax.scatter(*points.T, s=4, color=PALETTE[1], alpha=0.45, lw=0)
    ax.set_title(title)
    ax.set_aspect("equal")
    return ax


@style.in_style
def share_per_name(
    ax: Axes,
    names: Sequence[str],
    share: np.ndarray,
    *,
    title: str,
    label: str,
    most: float,
    part: tuple[str, np.ndarray] | None = None,
) -> Axes:
    """Draw one bar per name, in %, with its number; `most` is the largest share of all panels.

    Args:
        part: words and shares of what is drawn paler, at the foot of each bar.
    """
    x = np.arange(len(names))
    ax.bar(x, 100 * share, color=PALETTE[0], width=0.7)
    if part is not None and part[1].any():
        ax.bar(x, 100 * part[1], color="white", alpha=0.6, width=0.7, hatch="///", edgecolor=PALETTE[0], lw=0)
        ax.bar([0], [0], color="white", hatch="///", edgecolor=PALETTE[0], lw=0.5, label=part[0])
        ax.legend(loc="upper right")
    for i, value in enumerate(share):
        ax.text(i, 100 * value, f"{100 * value:.0f}", ha="center", va="bottom")
    ax.set_xticks(x, list(names), rotation=90, **style.fitting(len(names)))
    ax.set(ylim=(0, max(12.0, 115 * most)), ylabel=label, title=title)
    return ax


@style.in_style
def box_per_head(
    ax: Axes, values: Sequence[np.ndarray], names: Sequence[str], *, title: str, label: str
) -> Axes:
    """Draw the distribution of a number over words, one box per head."""
    kept = [v[np.isfinite(v)] for v in values]
    ax.boxplot(
        kept, showfliers=False, widths=0.6, medianprops={"color": PALETTE[1]}, boxprops={"color": PALETTE[0]},
        whiskerprops={"color": PALETTE[0]}, capprops={"color": PALETTE[0]},
    )  # fmt: skip
    ax.set_xticks(range(1, len(names) + 1), list(names), **style.fitting(len(names)))
    ax.axhline(0, color="0.7", lw=0.6)
    ax.set(ylabel=label, title=title)
    return ax


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, ...], color: str) -> None:
    style = {"arrowstyle": "->", "color": color, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=(end[0], end[1]), xytext=start, arrowprops=style)


def _colors(count: int) -> list[ColorType]:
    import matplotlib

    if count <= len(PALETTE):
        return list(PALETTE[:count])
    return list(matplotlib.colormaps[SPREAD](np.linspace(0, 0.92, count)))


def _finish(ax: Axes, title: str, x: str, y: str, count: int) -> None:
    ax.set(title=title, xlabel=x, ylabel=y)
    if count <= 16:
        ax.legend(ncols=2 if count > 6 else 1)

"""Figures of the study `embeddings`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.embeddings.study import WORDS, Embeddings
from curvescope.viz import geometry as viz
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.trajectory import short
from curvescope.viz.writers import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHOWN = ("original", "scale", "bias", "bias_and_scale", "max_logit", "min_logit")
NAMED = 5  # tokens named at each end of a histogram
NAMED_POINTS = 24  # directions whose farthest token is named in the plane of β·u and reach


def figures(result: Embeddings) -> dict[str, Figure]:
    """Draw distances, distributions of scores, and components of the logits."""
    found = {"distances": _distances(result), "scores": _scores(result)}
    if "reach" in result.scores.scores:
        moved = np.ptp(result.scores.scores["shift"]) > 0
        found["reach"] = _reach(result) if moved or result.counts is None else _reach_by_count(result)
    return found


def _distances(result: Embeddings) -> Figure:
    d = result.distances
    figure, axes = style.subplots(1, 2, figsize=(9, 3))
    panels = (("|form − n(e)|", d.l2_mean, d.l2_std), ("1 − cos(form, n(e))", d.cosine_mean, d.cosine_std))
    for ax, (words, mean, std) in zip(axes, panels, strict=True):
        bars = (np.clip(mean, 0, std), std)
        ax.bar(range(len(mean)), mean, yerr=bars, color=PALETTE[0], width=0.65, ecolor="0.3", capsize=3)
        for i, value in enumerate(mean):
            ax.text(i, value + std[i], f" {value:.3g}", ha="center", va="bottom")
        ax.set_xticks(range(len(mean)), [s.replace(" & ", "\n& ") for s in d.settings])
        ax.set_title(words)
        ax.margins(y=0.15)
    return figure


def _scores(result: Embeddings) -> Figure:
    s = result.scores
    names = [name for name in SHOWN if name in s.scores]
    if np.array_equal(s.scores["original"], s.scores["bias"]):  # no β
        names = [name for name in names if name not in ("bias", "bias_and_scale")]
    figure, axes = style.panels(len(names), 3 if len(names) > 4 else 2, (4.3, 2.9))
    for ax, name in zip(axes, names, strict=True):
        values = s.scores[name]
        order = np.argsort(values, kind="stable")
        top = [(label(s.text[i], s.bytes[i]), float(values[i])) for i in order[::-1][:NAMED]]
        bottom = [(label(s.text[i], s.bytes[i]), float(values[i])) for i in order[:NAMED]]
        viz.extremes_histogram(ax, values, title=WORDS[name], top=top, bottom=bottom)
    figure.supylabel("tokens")
    return figure


def _reach(result: Embeddings) -> Figure:
    """Draw β·u against √d |P(γ ∘ u)|, colored by count."""
    s = result.scores.scores
    x, y = s["shift"], (s["max_logit"] - s["min_logit"]) / 2
    figure, ax = style.subplots(figsize=(8, 4.6))
    if result.counts is None:
        ax.scatter(x, y, s=8, color=PALETTE[0], alpha=0.6, lw=0)
    else:
        order = np.argsort(result.counts.counts, kind="stable")
        color = np.log10(1 + result.counts.counts)[order]
        image = ax.scatter(x[order], y[order], c=color, s=9, cmap="viridis", lw=0)
        figure.colorbar(image, ax=ax, label="log₁₀(1 + count in the text)")
    _name_outermost(ax, result, x, y)
    ax.set(xlabel="β·u, same for every state", ylabel="√d |P(γ ∘ u)|, in the best state")
    return figure


def _reach_by_count(result: Embeddings) -> Figure:
    """Draw √d |P(γ ∘ u)| against the count of the token, for a norm without β."""
    assert result.counts is not None
    s = result.scores.scores
    x, y = np.log10(1.0 + result.counts.counts), (s["max_logit"] - s["min_logit"]) / 2
    figure, ax = style.subplots(figsize=(8, 4.6))
    ax.scatter(x, y, s=6, color=PALETTE[0], alpha=0.5, lw=0)
    _name_outermost(ax, result, x, y)
    ax.set(xlabel="log₁₀(1 + count in the text)", ylabel="√d |P(γ ∘ u)|, in the best state")
    return figure


def _name_outermost(ax: Axes, result: Embeddings, x: np.ndarray, y: np.ndarray) -> None:
    """Write the tokens that lie farthest out, in directions all around."""
    turn = np.linspace(0, 2 * np.pi, NAMED_POINTS, endpoint=False)
    plane = np.stack([(v - v.mean()) / (v.std() or 1.0) for v in (x, y)])
    for i in dict.fromkeys((np.stack([np.cos(turn), np.sin(turn)], 1) @ plane).argmax(1).tolist()):
        name = short(label(result.scores.text[i], result.scores.bytes[i]))
        ax.annotate(name, (x[i], y[i]), xytext=(4, 3), textcoords="offset points")

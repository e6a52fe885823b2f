"""The figures of the study `causal`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import activations as viz

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.causal.study import Causal

MOST = 48  # parts that are drawn, the largest of them


def draw(result: Causal) -> dict[str, Figure]:
    """Predicted against found, logits, and the parts of logits where there are some."""
    found = {"predicted": _predicted(result), "logits": _logits(result)}
    return found | ({"attribution": _attribution(result)} if result.parts.names else {})


def _kinds(result: Causal) -> list[str]:
    return [kind for layer in result.layers for kind in layer.kinds]


def _predicted(result: Causal) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    found, errors = result.stacked("loss_change")[:, :-1], {}
    for ax, order, words in zip(axes, (1, 2), ("first order", "second order"), strict=False):
        predicted = result.predicted(order)[:, :-1]
        viz.agreement(
            ax, predicted, found, _kinds(result), x=f"predicted, {words}", y="change of the loss, found"
        )
        share = np.abs(predicted - found) / np.maximum(np.abs(found), 1e-300)
        sizes = np.unique(np.abs(result.alphas))
        errors[words] = [float(np.median(share[:, np.abs(result.alphas) == a])) for a in sizes]
    viz.errors(axes[2], np.unique(np.abs(result.alphas)), errors)
    return figure


def _logits(result: Causal) -> Figure:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5.4, 4.4), layout="constrained")
    direct = np.outer(result.stacked("logit_direct"), result.alphas)
    found = result.stacked("logit_change")
    viz.agreement(ax, direct, found, _kinds(result), x="on the direct path", y="change of the logits, found")
    return figure


def _attribution(result: Causal) -> Figure:
    import matplotlib.pyplot as plt

    p = result.parts
    shown = np.sort(np.argsort(-np.abs(p.mean))[:MOST])
    figure, ax = plt.subplots(figsize=(max(6.0, 1.2 + 0.24 * len(shown)), 3.6), layout="constrained")
    viz.part_bars(ax, [p.names[i] for i in shown], p.mean[shown], p.stderr[shown])
    return figure

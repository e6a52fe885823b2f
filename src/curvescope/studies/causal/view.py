"""Tables, figures and captions of the study `causal`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.runs.study_result import Tables
from curvescope.viz import activations as viz
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.causal.study import Causal, Directions


def tables(result: Causal) -> Tables:
    """Return every direction at every strength, and the parts of the logits."""
    rows = [row for layer in result.layers for d in range(len(layer.names)) for row in _rows(layer, d)]
    found: Tables = {"directions": rows}
    p = result.parts
    if p.names:
        columns = {"part": p.names, "mean": p.mean, "stderr": p.stderr, "root mean square": p.size}
        found["attribution"] = columns
    return found


def _rows(layer: Directions, d: int) -> list[dict[str, object]]:
    """Return the rows of one direction: its strengths, then the ablation."""
    first, second = layer.predicted(1)[d], layer.predicted(2)[d]
    found = []
    for a in range(len(layer.alphas) + 1):
        steered = a < len(layer.alphas)
        alpha = layer.alphas[a] if steered else np.nan
        found.append(
            {
                "direction": layer.names[d],
                "kind": layer.kinds[d],
                "point": layer.at[d],
                "s": layer.singular_value[d],
                "σ": layer.sigma[d],
                "do": "steer" if steered else "ablate",
                "α": alpha,
                "loss change": layer.loss_change[d, a],
                "first order": first[a],
                "second order": second[a],
                "KL": layer.kl[d, a],
                "logits found": layer.logit_change[d, a] if steered else np.nan,
                "logits direct": alpha * layer.logit_direct[d],
                "tokens": layer.tokens[d],
            }
        )
    return found


MOST = 48  # maximum number of parts drawn, the largest first


def figures(result: Causal) -> dict[str, Figure]:
    """Draw predicted and measured changes, logits, and the parts of the logits if available."""
    found = {"predicted": _predicted(result), "logits": _logits(result)}
    return found | ({"attribution": _attribution(result)} if result.parts.names else {})


def _kinds(result: Causal) -> list[str]:
    return [kind for layer in result.layers for kind in layer.kinds]


def _predicted(result: Causal) -> Figure:
    figure, axes = style.subplots(1, 3, figsize=(13.5, 4.2))
    found, errors = result.stacked("loss_change")[:, :-1], {}
    for ax, order, words in zip(axes, (1, 2), ("first order", "second order"), strict=False):
        predicted = result.predicted(order)[:, :-1]
        viz.agreement(
            ax, predicted, found, _kinds(result), x=f"predicted, {words}", y="change of the loss, measured"
        )
        share = np.abs(predicted - found) / np.maximum(np.abs(found), 1e-300)
        sizes = np.unique(np.abs(result.alphas))
        errors[words] = [float(np.median(share[:, np.abs(result.alphas) == a])) for a in sizes]
    viz.errors(axes[2], np.unique(np.abs(result.alphas)), errors)
    return figure


def _logits(result: Causal) -> Figure:
    figure, ax = style.subplots(figsize=(5.4, 4.4))
    direct = np.outer(result.stacked("logit_direct"), result.alphas)
    found = result.stacked("logit_change")
    viz.agreement(
        ax,
        direct,
        found,
        _kinds(result),
        x="predicted on the direct path",
        y="change of the logits, measured",
    )
    return figure


def _attribution(result: Causal) -> Figure:
    p = result.parts
    shown = np.sort(np.argsort(-np.abs(p.mean))[:MOST])
    figure, ax = style.subplots(figsize=(max(6.0, 1.2 + 0.24 * len(shown)), 3.6))
    viz.part_bars(ax, [p.names[i] for i in shown], p.mean[shown], p.stderr[shown])
    return figure


def captions(result: Causal) -> dict[str, str]:
    """Return a caption for each figure and table."""
    steps = ", ".join(f"{a:g}" for a in result.alphas)
    return {
        "predicted": "Change of the loss when the activations of all tokens move along a direction by α "
        f"= {steps} of their standard deviations, against its prediction by the gradient alone (left) "
        "and with the Hessian in these activations (middle). On the dashed line they agree. Right: "
        "median error over directions of both predictions, relative to the measured change.",
        "logits": "Mean change of the logits of the tokens that a direction is decoded into, minus the mean "
        "over the vocabulary, against the direct path to the unembedding with the scale of the last norm "
        "held fixed. Points off the dashed line show the effect of the other layers.",
        "attribution": "Contribution of every head, feed-forward network and bias to the logit of the "
        "target token, minus the mean logit: means over tokens, with standard errors over sequences. "
        f"The contributions sum to the logit, {result.parts.logit:.2f}.",
        "directions": "One row for each direction and intervention. A step is α σ along the direction, "
        "where σ is the standard deviation of the activations; an ablation removes the component along it. "
        "First and second order: the predicted change of the loss. KL: of the outputs, in nats per token. "
        "tokens: tokens that the direction raises on the direct path, with the mean change of their logits, "
        "measured and direct.",
    }

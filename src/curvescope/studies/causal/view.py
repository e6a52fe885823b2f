"""Tables, figures and captions of the study `causal`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import activations as viz

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from curvescope.studies.causal.analysis import Directions
    from curvescope.studies.causal.study import Causal


def tables(result: Causal) -> dict[str, pd.DataFrame]:
    """Every direction with every strength, and the parts of the logits."""
    import pandas as pd

    rows = [row for layer in result.layers for d in range(len(layer.names)) for row in _rows(layer, d)]
    found = {"directions": pd.DataFrame(rows)}
    p = result.parts
    if p.names:
        columns = {"part": p.names, "mean": p.mean, "±": p.stderr, "root mean square": p.size}
        found["attribution"] = pd.DataFrame(columns)
    return found


def _rows(layer: Directions, d: int) -> list[dict[str, object]]:
    """One direction: its strengths, then the ablation."""
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


# ---------------------------------------------------------------------------------------------------- figures

MOST = 48  # parts that are drawn, the largest of them


def figures(result: Causal) -> dict[str, Figure]:
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


# --------------------------------------------------------------------------------------------------- captions


def captions(result: Causal) -> dict[str, str]:
    """What each figure and table shows."""
    steps = ", ".join(f"{a:g}" for a in result.alphas)
    return {
        "predicted": "Change of the loss when the activations of all tokens are moved along a direction by "
        f"α = {steps} standard deviations of what is there, against its prediction: the gradient alone "
        "(left), and with the Hessian in these activations (middle). On the dashed line they agree. Right: "
        "median over directions of the error of both, as a share of the change found.",
        "logits": "Mean change of the logits of the tokens that a direction is decoded into, less the mean "
        "over the vocabulary, against the direct path from there to the unembedding with the last norm's "
        "scale held fixed: what lies off the dashed line is what other layers make of the step.",
        "attribution": "What every head, every feed-forward network and every bias adds to the logit of the "
        "right token, less the mean logit, in the mean over tokens, with standard errors over sequences. The "
        f"parts add up to the logit, {result.parts.logit:.2f}.",
        "directions": "One row for each direction and intervention. A step is α σ along the direction, σ the "
        "standard deviation of the activations there; an ablation takes the whole part along it out. first "
        "and second order: the predicted change of the loss. KL: of the outputs, in nats per token. tokens: "
        "those that the direction raises on the direct path; their logits' mean change, found and direct.",
    }

"""Figures of Kronecker-factored approximations: their distance from the exact matrices, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz.blocks import LABEL, PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def quality(
    layers: Sequence[str],
    methods: Sequence[str],
    error: np.ndarray,
    lambda_max: np.ndarray,
    cosine: np.ndarray,
    cosine_gradient: np.ndarray,
) -> Figure:
    """Relative error, ratio of the largest eigenvalues and cosine of the steps: (methods, layers) each.

    Args:
        layers: Their names.
        methods: Their names.
        error: ‖K − G‖ / ‖G‖.
        lambda_max: λ_max(K) / λ_max(G).
        cosine: Of the preconditioned gradients.
        cosine_gradient: (layers,) of the plain gradient, in grey.
    """
    import matplotlib.pyplot as plt

    width = 2.0 + 0.22 * len(layers)
    fig, axes = plt.subplots(3, 1, figsize=(max(width, 5.0), 7.0), sharex=True, layout="constrained")
    x = np.arange(len(layers))
    labels = ("‖K − G‖ / ‖G‖", "λ_max(K) / λ_max(G)", "cosine with (G + δ)⁻¹ g")
    for ax, values, label in zip(axes, (error, lambda_max, cosine), labels, strict=True):
        for i, method in enumerate(methods):
            ax.plot(x, values[i], "o-", ms=3.5, lw=0.8, color=PALETTE[i % len(PALETTE)], label=method)
        ax.set_ylabel(label, fontsize=LABEL)
        ax.tick_params(labelsize=LABEL)
    axes[1].axhline(1.0, color="0.6", lw=0.6)
    axes[1].set_yscale("log")
    axes[2].plot(x, cosine_gradient, "o--", ms=3, lw=0.8, color="0.6", label="gradient")
    axes[2].set_xticks(x, layers, rotation=90)
    axes[2].legend(fontsize=LABEL, ncols=3)
    return fig

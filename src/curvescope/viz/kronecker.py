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
        error: ‖K − H_o‖ / ‖H_o‖.
        lambda_max: λ_max(K) / λ_max(H_o).
        cosine: Of the preconditioned gradients.
        cosine_gradient: (layers,) of the plain gradient, as gray lines.
    """
    import matplotlib.pyplot as plt

    width = max(2.0 + 0.22 * len(layers), 5.5)
    fig, axes = plt.subplots(3, 1, figsize=(width, 6.4), sharex=True, layout="constrained")
    x, step = np.arange(len(layers)), 0.6 / max(len(methods), 1)
    labels = ("‖K − H_o‖ / ‖H_o‖", "λ_max(K) / λ_max(H_o)", "cosine with (H_o + δ)⁻¹ g")
    for ax, values, label in zip(axes, (error, lambda_max, cosine), labels, strict=True):
        for i, method in enumerate(methods):
            shift = step * (i - (len(methods) - 1) / 2)
            ax.plot(x + shift, values[i], "o", ms=4, color=PALETTE[i % len(PALETTE)], label=method)
        ax.set_ylabel(label, fontsize=LABEL)
        ax.tick_params(labelsize=LABEL)
        ax.grid(axis="y", lw=0.3, color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].axhline(1.0, color="0.6", lw=0.6)
    axes[2].plot(x, cosine_gradient, "_", ms=28, color="0.5", label="gradient itself")
    axes[2].set_xticks(x, layers, rotation=90 if len(layers) > 6 else 0)
    handles, names = axes[2].get_legend_handles_labels()
    fig.legend(handles, names, fontsize=LABEL, ncols=3, loc="outside upper center", frameon=False)
    return fig

"""The figures of the sweeps: from their arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.models.zoo.names import REVISIONS
from curvescope.papers.petrov2025.propagation.variants import COMPONENTS, NORMS, SIGMAS
from curvescope.studies.propagation.shares import HESSIAN, OUTER, Number
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.papers.petrov2025.propagation.study import Sweeps
    from curvescope.studies.propagation import Propagation

KINDS = ("ln1", "attention", "ln2", "ffn", "ln_f", "rest")


def draw(result: Sweeps) -> dict[str, Figure]:
    """Depth, the scale of a norm, components, training."""
    return {
        "depth": _depth(result),
        "sigma": _sigma(result),
        "components": _components(result),
        "training": _training(result),
    }


def _depth(result: Sweeps) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    for i, norm in enumerate(NORMS):
        for seed in range(result.seeds):
            models = [result.measured[f"depth.{norm}.{d}.{seed}"] for d in result.depths]
            sizes = [m.shares.norm(HESSIAN) for m in models]
            style = {"fmt": "-o", "ms": 3.5, "lw": 1, "color": PALETTE[i]}
            label = f"norms {norm}" if norm != "none" else "no norms"
            values = np.array([s.value for s in sizes])
            errors = np.maximum([[s.value - s.low for s in sizes], [s.high - s.value for s in sizes]], 0.0)
            axes[0].errorbar(
                result.depths, values, yerr=np.nan_to_num(errors), label=label if not seed else None, **style
            )
            ends = np.array([m.ends_of(HESSIAN) for m in models])
            axes[1].errorbar(result.depths, ends[:, 0], yerr=ends[:, 1], **style)
    for ax, title in zip(axes, ("‖H‖", "λ_max", ""), strict=True):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(result.depths, [str(d) for d in result.depths])
        ax.set_xlabel("layers")
        ax.set_title(title, fontsize=10, loc="left")
        _plain(ax)
    axes[0].legend(fontsize=8, frameon=False)
    _kinds_over_depth(axes[2], result)
    return figure


def _kinds_over_depth(ax: Axes, result: Sweeps) -> None:
    """Shares of ‖H‖² by kind of source, pre-norm, mean over seeds."""
    ax.set_yscale("linear")
    for i, kind in enumerate((OUTER, *KINDS)):
        found = [
            [_share(result.measured[f"depth.pre.{d}.{seed}"], kind) for seed in range(result.seeds)]
            for d in result.depths
        ]
        shares = [np.mean([n.value for n in some]) for some in found]
        halves = [np.sqrt(np.mean([((n.high - n.low) / 2) ** 2 for n in some]) / len(some)) for some in found]
        color = "0.3" if kind == OUTER else PALETTE[(i - 1) % len(PALETTE)]
        style = {"ms": 3.5, "lw": 1, "color": color, "label": kind}
        ax.errorbar(result.depths, shares, yerr=np.nan_to_num(halves), fmt="--o" if i > 5 else "-o", **style)
    ax.axhline(0, color="0.6", lw=0.6)
    ax.set_title("shares of ‖H‖², pre-norm: together 1", fontsize=10, loc="left")
    ax.legend(fontsize=7, frameon=False, ncols=2)


def _share(one: Propagation, kind: str) -> Number:
    """Of all sources of a kind together."""
    names = [name for name in one.shares.names if name == kind or name.rpartition(".")[2] == kind]
    return one.shares.share(*names)


def _sigma(result: Sweeps) -> Figure:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for seed in range(result.seeds):
        sizes = [result.measured[f"sigma.{s:g}.{seed}"].shares.norm("L0.ln1").value for s in SIGMAS]
        ax.plot(SIGMAS, sizes, "o", ms=4, color=PALETTE[0], label="source L0.ln1" if not seed else None)
    first = result.measured[f"sigma.{SIGMAS[0]:g}.0"].shares.norm("L0.ln1").value
    ax.plot(SIGMAS, [first / s**2 for s in SIGMAS], lw=1, color="0.5", label="1/σ²")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("standard deviation σ of the embeddings")
    ax.set_ylabel("Frobenius norm")
    ax.legend(fontsize=8, frameon=False)
    _plain(ax)
    return figure


def _components(result: Sweeps) -> Figure:
    import matplotlib.pyplot as plt

    table = result.tables()["components"]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained", sharey=True)
    y = np.arange(len(COMPONENTS))[::-1]
    for ax, (column, title) in zip(
        axes, {"lambda_max": "λ_max", "condition": "condition", "trace": "trace"}.items(), strict=True
    ):
        for i, steps in enumerate((0, result.steps)):
            rows = table[table["trained_steps"] == steps]
            label = f"after {steps} steps" if steps else "at initialization"
            ax.plot(rows[column], y + 0.12 - 0.24 * i, "o", ms=5, color=PALETTE[i], label=label)
        ax.set_xscale("log" if min(table[column]) > 0 else "symlog")
        ax.set_title(title, fontsize=10, loc="left")
        _plain(ax)
    axes[0].set_yticks(y, list(COMPONENTS), fontsize=9)
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def _training(result: Sweeps) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    models = [result.measured[f"training.{name}"] for name in REVISIONS]
    x = np.arange(len(REVISIONS))
    for i, kind in enumerate(KINDS):
        sizes = [
            float(
                np.sqrt(sum(m.shares.norm(n).value ** 2 for n in m.sources if n.rpartition(".")[2] == kind))
            )
            for m in models
        ]
        style = {"ms": 3.5, "lw": 1, "color": PALETTE[i % len(PALETTE)], "label": kind}
        axes[0].plot(x, sizes, "--o" if i > 4 else "-o", **style)
    for name, style in ((HESSIAN, "-"), (OUTER, "--")):
        axes[0].plot(x, [m.shares.norm(name).value for m in models], style, lw=1.2, color="0.4", label=name)
    axes[0].set_yscale("log")
    axes[0].set_title("Frobenius norm, sources of a kind in quadrature", fontsize=10, loc="left")
    axes[0].legend(fontsize=7, frameon=False, ncols=2)
    ends = np.array([m.ends_of(HESSIAN) for m in models])
    axes[1].errorbar(x, ends[:, 0], yerr=ends[:, 1], fmt="-o", ms=4, lw=1, color=PALETTE[1], label="λ_max")
    axes[1].errorbar(x, -ends[:, 2], yerr=ends[:, 3], fmt="-o", ms=4, lw=1, color=PALETTE[0], label="−λ_min")
    axes[1].set_yscale("log")
    axes[1].set_title("extreme eigenvalues of H", fontsize=10, loc="left")
    axes[1].legend(fontsize=8, frameon=False)
    for ax in axes:
        ax.set_xticks(x, REVISIONS)
        _plain(ax)
    return figure


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")

"""The figures of the study `spectrum`: from its arrays, nothing computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.parts import MATRIX_SYMBOLS, TITLES
from curvescope.viz import blocks, spectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.spectrum.study import Spectrum


def draw(result: Spectrum) -> dict[str, Figure]:
    """Densities, block maps, traces and norms, by name."""
    return {
        "density": _densities(result),
        "block_maps": _maps(result),
        "traces": _traces(result),
        "norms": _norms(result),
    }


def _densities(result: Spectrum) -> Figure:
    """Above, densities as a kernel shows them; below, cumulative distributions between their bounds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained")
    for (upper, lower), color, (name, part) in zip(
        axes.T, blocks.PALETTE, result.parts.items(), strict=False
    ):
        d = replace(part.density, psd=name == "ggn")  # older results do not say
        upper.set_prop_cycle(color=[color])
        spectrum.density(upper, *d.band(), nodes=part.extremes.values, log_y=True)
        upper.set_title(TITLES[name], fontsize=11)
        upper.axvline(0, color="0.6", lw=0.6)
        upper.locator_params(axis="x", nbins=5)
        d.plot_cumulative(lower, color=color)
        lower.set_title(d.words, fontsize=8, color="0.3")
    return figure


def _maps(result: Spectrum) -> Figure:
    import matplotlib.pyplot as plt

    maps = {name: part.map for name, part in result.parts.items()}
    scaled = {
        name: m.frobenius / np.sqrt(np.outer(m.sizes, m.sizes)) for name, m in maps.items()
    }  # root mean square entry: comparable between blocks of different size
    positive = np.concatenate([values[values > 0] for values in scaled.values()])
    top = float(positive.max(initial=1e-300))
    limits = (max(top * 1e-6, float(positive.min(initial=top))), top)
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 4.2), layout="constrained", sharey=True)
    for ax, (name, values) in zip(axes, scaled.items(), strict=True):
        blocks.heat_map(ax, maps[name].names, values, limits=limits, color_bar=False)
        ax.set_title(TITLES[name], fontsize=11)
    figure.colorbar(axes[0].images[0], ax=axes, label="root mean square entry", shrink=0.9)
    return figure


def _traces(result: Spectrum) -> Figure:
    """The blocks of the map; the table has all of them."""
    names = result.parts["hessian"].traces.names
    shown = [i for i, name in enumerate(names) if name in result.parts["hessian"].map.names]
    series = {
        f"tr {MATRIX_SYMBOLS[n]}": (
            p.traces.values[shown],
            p.traces.interval[0][shown],
            p.traces.interval[1][shown],
        )
        for n, p in result.parts.items()
    }
    return _bars([names[i] for i in shown], series, "trace of the block")


def _norms(result: Spectrum) -> Figure:
    names = result.parts["hessian"].map.names
    series = {
        f"‖{MATRIX_SYMBOLS[n]}‖": (
            np.diag(p.map.frobenius),
            np.diag(p.map.interval[0]),
            np.diag(p.map.interval[1]),
        )
        for n, p in result.parts.items()
    }
    return _bars(names, series, "Frobenius norm of the block")


def _bars(
    names: list[str], series: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], label: str
) -> Figure:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(12, 3.6), layout="constrained")
    blocks.bars(ax, names, series, label=label)
    return figure

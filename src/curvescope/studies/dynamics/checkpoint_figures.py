"""The figures and scenes of a sequence of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.viz import style
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, Curve, curves, grid_map, said, switched
from curvescope.viz.scenes.curves import over
from curvescope.viz.scenes.parts import axis
from curvescope.viz.style import LOOKS, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.dynamics.sequence import Sequence

TALL = 60  # blocks of which every name is written
QUANTITIES = {
    "lambda_max": ("λ_max", "lambda_max_error"),
    "lambda_min": ("λ_min", "lambda_min_error"),
    "trace": ("trace", "trace_stderr"),
    "loss": ("loss", None),
}
SWITCH = {title: (name, error) for name, (title, error) in QUANTITIES.items()}
OF_BLOCKS = {"λ_max": ("lambda_max", "lambda_max_error"), "trace": ("trace", "trace_stderr")}
BLOCK_MAP = (
    "of every block that was measured, at every checkpoint. Colors are logarithmic, on both sides of zero "
    "where there are both signs."
)


def panels(rows: int, columns: int, **options: Any) -> Any:
    """Figure and (rows, columns) axes."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, layout="constrained", squeeze=False, **options)


def plain(ax: Axes, title: str = "") -> None:
    """Two spines, a light grid, a title on the left."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")
    if title:
        ax.set_title(title, fontsize=10, loc="left")


def draw(sequence: Sequence) -> dict[str, Figure]:
    """Numbers over checkpoints, and λ_max of single blocks."""
    found = {"over_checkpoints": _course(sequence)}
    blocks, values = sequence.block_map()
    if blocks and np.isfinite(values).any():
        found["block_map"] = _map(sequence, blocks, values)
    return found


def _course(sequence: Sequence) -> Figure:
    figure, axes = panels(1, len(QUANTITIES), figsize=(13.2, 3.4))
    x = np.arange(len(sequence.names))
    for i, (ax, (name, (title, error))) in enumerate(zip(axes[0], QUANTITIES.items(), strict=True)):
        errors = None if error is None else np.nan_to_num(sequence.column(error))
        ax.errorbar(
            x, sequence.column(name), yerr=errors, fmt="-o", ms=4, lw=1.3, color=PALETTE[i % len(PALETTE)]
        )
        ax.set_xticks(x, sequence.names, fontsize=8, rotation=30 if len(x) > 4 else 0)
        plain(ax, title)
    return figure


def _map(sequence: Sequence, blocks: list[str], values: np.ndarray) -> Figure:
    from matplotlib.colors import LogNorm

    figure, axes = panels(1, 1, figsize=(3 + 0.8 * len(sequence.names), 1.5 + 0.17 * min(len(blocks), 120)))
    ax = axes[0][0]
    known = np.ma.masked_less_equal(np.ma.masked_invalid(values), 0)
    look = {"norm": LogNorm()} if known.count() else {}
    image = ax.imshow(known, aspect="auto", cmap=style.MAP, interpolation="nearest", **look)
    ax.set_xticks(range(len(sequence.names)), sequence.names, fontsize=8, rotation=30)
    stride = max(1, -(-len(blocks) // TALL))
    ax.set_yticks(range(0, len(blocks), stride), blocks[::stride], fontsize=7)
    ax.tick_params(length=0)
    ax.set_title("λ_max of single blocks", fontsize=10, loc="left")
    figure.colorbar(image, ax=ax, shrink=0.6)
    return figure


def scenes(sequence: Sequence) -> dict[str, Scene]:
    """Numbers over checkpoints, and a map of blocks."""
    found = {"over_checkpoints": switched({"quantity": list(SWITCH)}, lambda q: _course_scene(sequence, q))}
    known = [q for q, (name, _) in OF_BLOCKS.items() if np.isfinite(sequence.block_map(name)[1]).any()]
    if known:
        made = switched({"quantity": known}, lambda q: _map_scene(sequence, q))
        found["block_map"] = made | {"caption": f"{' or '.join(known)} {BLOCK_MAP}"}
    return found


def _course_scene(sequence: Sequence, quantity: str) -> Scene:
    name, error = SWITCH[quantity]
    values = sequence.column(name)
    errors = np.full(len(values), np.nan) if error is None else sequence.column(error)
    words = [
        f"<b>{point}</b><br>{quantity}: {said(value, e)}"
        for point, value, e in zip(sequence.names, values.tolist(), errors.tolist(), strict=True)
    ]
    look = LOOKS["loss" if quantity == "loss" else "hessian"]
    x = np.arange(len(values), dtype=float)
    curve = Curve(quantity, x, values, words, values - errors, values + errors, look=look)
    title = quantity if quantity == "loss" else f"{quantity} of H"
    scene = curves([curve], x=over(sequence.names, "checkpoint"), y=axis(title))
    return {**scene, "layout": {**scene["layout"], "showlegend": False}}


def _map_scene(sequence: Sequence, quantity: str) -> Scene:
    name, error = OF_BLOCKS[quantity]
    blocks, values = sequence.block_map(name)
    errors = dict(zip(*sequence.block_map(error), strict=True))
    unknown = np.full(len(sequence.names), np.nan)
    cells = [
        [
            Cell(value, f"<b>{block}</b>, {point}<br>{quantity}: {said(value, e)}")
            for point, value, e in zip(sequence.names, row, errors.get(block, unknown).tolist(), strict=True)
        ]
        for block, row in zip(blocks, values.tolist(), strict=True)
    ]
    label = f"{quantity} of the block"
    return grid_map(blocks, sequence.names, cells, label=label, colors="signed")

"""The figures and scenes of what a monitor has seen: from its arrays, nothing computed but ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.monitor.messages import ceiling, is_near
from curvescope.viz.history import line, panels, positive, step_map
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, Curve, curves, grid_map, said, switched
from curvescope.viz.scenes.curves import axis, log_axis
from curvescope.viz.style import GRAY, LOOKS, PALETTE, Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.monitor.result import Monitored

BLUE, RED, GREEN, PURPLE, OCHRE = PALETTE
COURSES = {
    "λ_max": ("lambda_max", "lambda_max_error"),
    "λ_min": ("lambda_min", "lambda_min_error"),
    "trace": ("trace", "trace_stderr"),
    "loss": ("loss", None),
    "‖∇L‖": ("grad_norm", None),
}
BLOCKS = {
    "blocks_lambda_max": ("lambda_max", "lambda_max_error", "λ_max"),
    "blocks_trace": ("trace", "trace_stderr", "trace"),
}
CEILING = Look(GRAY, "--", "D")


def draw(result: Monitored) -> dict[str, Figure]:
    """Those that there is something to show of."""
    if not len(result.history["step"]):
        return {}
    figures = {
        "stability": _stability(result),
        "training": _training(result),
        "curvature": _curvature(result),
    }
    names, _, values = result.block_map("lambda_max")
    if names and np.isfinite(values).any():
        figures["blocks_lambda_max"] = _blocks(result, "lambda_max", "λ_max")
    names, _, values = result.block_map("trace")
    if names and np.isfinite(values).any():
        figures["blocks_trace"] = _blocks(result, "trace", "trace")
    return figures


def _stability(result: Monitored) -> Figure:
    """λ_max below its ceiling, and what the optimizer sees below its own."""
    h = result.history
    seen = np.isfinite(h["sharpness"]).any()
    figure, axes = panels(2 if seen else 1)
    line(axes[0], h["step"], h["lambda_max"], h["lambda_max_error"], label="λ_max", color=BLUE)
    limit, near = ceiling(h), is_near(h)
    if near:
        words = _ceiling(h["threshold"][np.isfinite(limit)][-1])
        line(axes[0], h["step"], limit, label=words, color=RED, style="--")
    positive(axes[0], h["lambda_max"], limit if near else h["lambda_max"])
    axes[0].set_title("λ_max and its ceiling" if near else "λ_max", fontsize=10, loc="left")
    axes[0].legend(fontsize=8, frameon=False)
    if seen:
        ratio, error = (
            h["lr"] * h[key] / h["sharpness_threshold"] for key in ("sharpness", "sharpness_error")
        )
        line(axes[1], h["step"], ratio, error, label="as the optimizer sees it", color=GREEN)
        plain = h["lr_lambda_max"] / h["threshold"]
        line(axes[1], h["step"], plain, label="without its diagonal", color=BLUE)
        axes[1].axhline(1, color=RED, ls="--", lw=1.2)
        positive(axes[1], ratio, plain)
        axes[1].set_title("η λ_max / threshold: unstable above 1", fontsize=10, loc="left")
        axes[1].legend(fontsize=8, frameon=False)
    return figure


def _ceiling(threshold: float) -> str:
    return "2 / η" if threshold == 2 else f"{threshold:.3g} / η"


def _training(result: Monitored) -> Figure:
    """Loss and gradient norm on the probe batches."""
    h = result.history
    figure, axes = panels(2)
    line(axes[0], h["step"], h["loss"], label="loss", color=BLUE)
    line(axes[1], h["step"], h["grad_norm"], label="‖∇L‖", color=PURPLE)
    for ax, title, name in zip(axes, ("loss", "gradient norm"), ("loss", "grad_norm"), strict=True):
        ax.set_title(f"{title} on the probe batches", fontsize=10, loc="left")
        positive(ax, h[name])
    return figure


def _curvature(result: Monitored) -> Figure:
    """Trace, smallest eigenvalue, the GGN, and where the gradient lies."""
    h = result.history
    figure, axes = panels(3)
    line(axes[0], h["step"], h["trace"], h["trace_stderr"], label="trace", color=BLUE)
    axes[0].set_title("trace ± its standard error", fontsize=10, loc="left")
    line(axes[1], h["step"], h["lambda_min"], h["lambda_min_error"], label="λ_min", color=PURPLE)
    axes[1].axhline(0, color="0.6", lw=0.6)
    axes[1].set_title("λ_min", fontsize=10, loc="left")
    line(axes[2], h["step"], h["overlap"], label="overlap with the last eigenspace", color=BLUE)
    line(axes[2], h["step"], h["grad_share"], label="gradient in the top eigenspace", color=OCHRE)
    line(axes[2], h["step"], h["ggn_gap"], h["ggn_gap_stderr"], label="‖H − H_o‖ / ‖H‖", color=RED)
    axes[2].set_ylim(bottom=0)
    axes[2].set_title("shares", fontsize=10, loc="left")
    if axes[2].has_data():
        axes[2].legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return figure


def _blocks(result: Monitored, column: str, label: str) -> Figure:
    names, steps, values = result.block_map(column)
    figure, (ax,) = panels(1, height=1.5 + 0.16 * min(len(names), 44))
    figure.set_figwidth(6.5)
    step_map(ax, steps, names, values, label=label)
    return figure


def scenes(result: Monitored) -> dict[str, Scene]:
    """Draw numbers over the steps, and maps of blocks, if there are finite values."""
    known = [q for q, (name, _) in COURSES.items() if np.isfinite(result.history[name]).any()]
    scenes = {"course": switched({"quantity": known}, lambda q: _course(result, q))} if known else {}
    for name, (column, error, label) in BLOCKS.items():
        if np.isfinite(result.block_map(column)[2]).any():
            scenes[name] = _map(result, column, error, label)
    return scenes


def _course(result: Monitored, quantity: str) -> Scene:
    h = result.history
    name, error = COURSES[quantity]
    errors = np.full(len(h["step"]), np.nan) if error is None else h[error]
    look = LOOKS["loss" if quantity == "loss" else "hessian"]
    drawn = [_curve(quantity, h["step"], h[name], errors, look)]
    if quantity == "λ_max":
        limit = ceiling(h)
        if np.isfinite(limit).any():
            drawn.append(_curve("ceiling of the learning rate", h["step"], limit, np.nan * limit, CEILING))
    values = np.concatenate([curve.y for curve in drawn])
    far = values.max() > 10 * values.min() > 0
    return curves(drawn, x=axis("step"), y=log_axis(quantity, values) if far else axis(quantity))


def _curve(name: str, steps: np.ndarray, values: np.ndarray, errors: np.ndarray, look: Look) -> Curve:
    known = np.isfinite(values)
    x, y, e = (np.asarray(part, dtype=float)[known] for part in (steps, values, errors))
    words = [
        f"step {step:g}<br>{name}: {said(value, error)}" for step, value, error in zip(x, y, e, strict=True)
    ]
    return Curve(name, x, y, words, y - e, y + e, look=look, band=True)


def _map(result: Monitored, column: str, error: str, label: str) -> Scene:
    names, steps, values = result.block_map(column)
    errors = result.block_map(error)[2]
    cells = [
        [
            Cell(value, f"<b>{block}</b>, step {step:g}<br>{label}: {said(value, e)}")
            for step, value, e in zip(steps, row, of_row, strict=True)
        ]
        for block, row, of_row in zip(names, values.tolist(), errors.tolist(), strict=True)
    ]
    columns = [f"{step:g}" for step in steps]
    label = f"{label} of the block, as last measured"
    return grid_map(names, columns, cells, label=label, colors="signed", titles=("step", ""))

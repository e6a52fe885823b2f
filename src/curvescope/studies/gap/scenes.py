"""The scenes of the study `gap`: from its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.gap.pair import Number
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, Curve, curves, grid_map, said, switched
from curvescope.viz.scenes.curves import over
from curvescope.viz.scenes.parts import axis, log_axis
from curvescope.viz.style import GRAY, LOOKS, Look

if TYPE_CHECKING:
    from curvescope.studies.gap.study import Gap

SHARE, TOP, DISTANCE = "functional share", "λ_max", "distance of spectra"
MISSED = "λ_max missed by the GGN"


def scenes(result: Gap) -> dict[str, Scene]:
    """Over the checkpoints, and block by block."""
    measured = any(result.pair(name).distance is not None for name in result.checkpoints)
    choices = [SHARE, TOP, *([DISTANCE] if measured else [])]
    over_training = switched({"quantity": choices}, lambda chosen: _course(result, chosen))
    blocks = switched({"quantity": [MISSED, SHARE]}, lambda chosen: _blocks(result, chosen))
    return {"over_training": over_training, "blocks": blocks}


def _course(result: Gap, quantity: str) -> Scene:
    pairs = [result.pair(name) for name in result.checkpoints]
    if quantity == SHARE:
        found = [
            _curve(block, [result.pair(name, block).share() for name in result.checkpoints], result)
            for block in result.blocks
        ]
        y = axis("functional share ‖H_f‖ / ‖H‖", rangemode="tozero")
    elif quantity == TOP:
        found = [
            _curve(title, [pair.top(part) for pair in pairs], result, LOOKS[part])
            for part, title in (("hessian", "Hessian"), ("ggn", "GGN"))
        ]
        y = log_axis("λ_max of the whole model", [curve.y for curve in found])
    else:
        gray = Look(GRAY, ":", "D")
        found = [
            _curve("W₁ of the spectra of H and GGN", [p.wasserstein() for p in pairs], result, LOOKS["ggn"]),
            _curve("its bound, the functional share", [p.share() for p in pairs], result, gray),
        ]
        y = axis("distance, in units of ‖H‖ / √n", rangemode="tozero")
    return curves(found, x=over(result.checkpoints, "checkpoint"), y=y)


def _curve(name: str, found: list[Number], result: Gap, look: Look | None = None) -> Curve:
    values, errors = (np.array([getattr(n, key) for n in found]) for key in ("value", "error"))
    losses = [result.pair(checkpoint).loss for checkpoint in result.checkpoints]
    words = [
        f"<b>{name}</b>, {checkpoint}<br>{said(*number)}<br>loss {loss:.3f}"
        for checkpoint, number, loss in zip(result.checkpoints, found, losses, strict=True)
    ]
    x = np.arange(len(found), dtype=float)
    return Curve(name, x, values, words, values - errors, values + errors, look=look)


def _blocks(result: Gap, quantity: str) -> Scene:
    def cell(block: str, checkpoint: str) -> Cell:
        pair = result.pair(checkpoint, block)
        if quantity == SHARE:
            number, unit = pair.share(), ""
        else:
            number, unit = Number(*(100 * part for part in pair.gap())), " %"
        return Cell(number.value, f"<b>{block}</b>, {checkpoint}<br>{quantity}: {said(*number)}{unit}")

    cells = [[cell(block, name) for name in result.checkpoints] for block in result.blocks]
    label = "functional share ‖H_f‖ / ‖H‖" if quantity == SHARE else "λ_max that the GGN misses, %"
    colors = "linear" if quantity == SHARE else "signed linear"
    return grid_map(result.blocks, result.checkpoints, cells, label=label, colors=colors)

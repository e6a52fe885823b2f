"""The scene of the study `propagation`: its sources over the layers, from its arrays."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import between
from curvescope.studies.propagation.shares import HESSIAN, OUTER
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Curve, curves, said, switched
from curvescope.viz.scenes.curves import over
from curvescope.viz.scenes.parts import SignedLog, axis, log_axis
from curvescope.viz.style import GRAY, Look

if TYPE_CHECKING:
    from curvescope.studies.propagation.study import Propagation

LAYER = re.compile(r"L(\d+)\.(.+)")
QUANTITIES = {
    "norm": "Frobenius norm of the source",
    "share": "share of ‖H‖², together 1",
    "λ_max": "λ_max of the source",
    "λ_min": "λ_min of the source",
}
DECADES = 4


def scenes(result: Propagation) -> dict[str, Scene]:
    """Sources by layer; without Lanczos steps there are no eigenvalues to switch to."""
    known = [q for q in QUANTITIES if any(math.isfinite(_number(result, s, q)[0]) for s in result.sources)]
    return {"by_layer": switched({"quantity": known}, lambda quantity: _by_layer(result, quantity))}


def _number(result: Propagation, name: str, quantity: str) -> tuple[float, float, float, float]:
    """Value, error, and the ends of its interval."""
    if quantity in ("norm", "share"):
        found = getattr(result.shares, quantity)(name)
        return found.value, found.stderr, found.low, found.high
    top, _, low, _ = result.ends_of(name)
    least, most = result.bounds_of(name)
    return (top, math.nan, top, most) if quantity == "λ_max" else (low, math.nan, least, low)


def _by_layer(result: Propagation, quantity: str) -> Scene:
    """A curve for every kind of source; H, the GGN and what is in no layer stand behind the last layer."""
    inside = {name: match for name in result.sources if (match := LAYER.fullmatch(name))}
    layers = sorted({int(match[1]) for match in inside.values()})
    whole = [OUTER] if quantity == "share" else [HESSIAN, OUTER]
    behind = [*whole, *(name for name in result.sources if name not in inside)]
    places = [*(f"L{layer}" for layer in layers), *behind]
    groups = {
        kind: {name: layers.index(int(m[1])) for name, m in inside.items() if m[2] == kind}
        for kind in dict.fromkeys(match[2] for match in inside.values())
    }
    found = [_curve(result, quantity, kind, group) for kind, group in groups.items()]
    rest = {name: len(layers) + i for i, name in enumerate(behind)}
    found.append(_curve(result, quantity, "all layers, or none", rest, apart=True))
    if quantity == "norm":
        y = log_axis(QUANTITIES[quantity], np.concatenate([curve.y for curve in found]))
    elif quantity == "share":
        y = axis(QUANTITIES[quantity], zeroline=True)
    else:
        values = np.concatenate([curve.y for curve in found])
        size = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
        scale = SignedLog(size * 10.0**-DECADES)
        y = axis(QUANTITIES[quantity], **scale.ticks(-size, size))
        found = [_moved(curve, scale) for curve in found]
    return curves(found, x=over(places, "layer of the source", most=40), y=y)


def _curve(
    result: Propagation, quantity: str, name: str, places: dict[str, int], *, apart: bool = False
) -> Curve:
    numbers = np.array([_number(result, source, quantity) for source in places]).reshape(-1, 4)
    words = [
        f"<b>{source}</b><br>{quantity}: {between(*ends) if math.isnan(error) else said(value, error)}"
        for source, (value, error, *ends) in zip(places, numbers.tolist(), strict=True)
    ]
    x = np.array(list(places.values()), dtype=float)
    look = Look(GRAY, "-", "D") if apart else None
    return Curve(name, x, numbers[:, 0], words, numbers[:, 2], numbers[:, 3], look=look, line=not apart)


def _moved(curve: Curve, scale: SignedLog) -> Curve:
    """On an axis that is logarithmic on both sides of zero."""
    ends = {name: scale.of(getattr(curve, name)) for name in ("y", "low", "high")}
    return Curve(**{**vars(curve), **ends})

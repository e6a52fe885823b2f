"""The scenes of the study `taylor`: from its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.operators.taylor.expansion import NAMES
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Curve, curves, switched
from curvescope.viz.scenes.parts import axis
from curvescope.viz.scenes.planes import plane
from curvescope.viz.style import LOOKS

if TYPE_CHECKING:
    from curvescope.operators import LossLine, LossPlane
    from curvescope.studies.taylor.study import Taylor

POINTS = 101  # of a prediction
ROOM = 0.12  # of the range of losses, left above and below
PLANE = (
    "The plane of the top eigenvector and the gradient, both of length one and at right angles: the loss, "
    "the quadratic in the same colors, or their difference. Lines are of equal height; the cross is θ."
)
LOSS, QUADRATIC, DIFFERENCE = "loss", "quadratic", "difference"


def scenes(result: Taylor) -> dict[str, Scene]:
    """Lines, one direction at a time, and the plane."""
    found = {}
    if result.lines:
        lines = result.lines
        found["slices"] = switched({"direction": list(lines)}, lambda name: _slice(name, lines[name]))
    p = result.plane
    if p is not None:
        shown = [LOSS, QUADRATIC, DIFFERENCE]
        found["plane"] = switched({"shown": shown}, lambda chosen: _plane(p, chosen)) | {"caption": PLANE}
    return found


def _slice(name: str, one: LossLine) -> Scene:
    """The loss with its predictions; the range is that of the loss."""
    words = f"t = %{{x:.4g}}<br>{LOSS}: %{{y:.6g}}"
    found = [Curve(LOSS, one.t, one.loss, words, look=LOOKS[LOSS])]
    dense = np.linspace(float(one.t[0]), float(one.t[-1]), POINTS)
    for order in one.orders:
        kind = NAMES[order]
        values = one.expansion.predicted(dense, order)
        reach = ", ".join(
            f"{r.value:.3g} {side}" for side, r in one.radii[kind].items() if r.value == r.value
        )
        words = f"t = %{{x:.4g}}<br>{kind}: %{{y:.6g}}<br>holds up to |t| = {reach}"
        found.append(Curve(kind, dense, values, words, look=LOOKS[kind], marks=False))
    finite = one.loss[np.isfinite(one.loss)]
    low, high = (float(f(finite)) for f in (np.min, np.max)) if finite.size else (0.0, 1.0)
    room = ROOM * ((high - low) or abs(high) or 1.0)
    x = axis(f"t along {name}, in units of ‖d‖ = {one.length:.3g}")
    return curves(found, x=x, y=axis("loss L(θ + t d)", range=[low - room, high + room]))


def _plane(p: LossPlane, shown: str) -> Scene:
    """Loss and quadratic in the same colors, cut off where only a few points are higher."""
    titles = ("top eigenvector", "−∇L, orthogonal to it")
    if shown == DIFFERENCE:
        label = "loss − quadratic"
        return plane(p.a, p.b, p.loss - p.quadratic, label=label, titles=titles, colors="signed linear")
    finite = p.loss[np.isfinite(p.loss)]
    limits = (float(finite.min()), float(np.percentile(finite, 95))) if finite.size else None
    return plane(
        p.a, p.b, p.loss if shown == LOSS else p.quadratic, label=shown, titles=titles, limits=limits
    )

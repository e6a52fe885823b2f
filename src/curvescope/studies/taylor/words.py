"""The words of the study `taylor`: summary and captions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import rounded, with_error
from curvescope.operators.taylor.expansion import NAMES
from curvescope.studies.taylor.descent import WITHIN

if TYPE_CHECKING:
    from curvescope.algorithms import QuadraticDescent
    from curvescope.operators import LossLine
    from curvescope.runs.shown import Line as Said
    from curvescope.studies.taylor.descent import Descent
    from curvescope.studies.taylor.study import SettledPart, Taylor


def summary(found: Taylor) -> list[Said]:
    """The numbers to look at first."""
    top, residual = float(found.sharpest[0]), float(found.residuals[0])
    lines = [
        ("loss", f"{found.loss:.4f}", f"{found.loss_name} of {found.model} on {found.data}"),
        ("λ_max", with_error(top, residual), "the largest eigenvalue of the Hessian, ± its residual"),
    ]
    if top > 0:
        lines.append(
            (
                "ceiling 2/λ_max",
                f"{2 / top:.3g}",
                "of the learning rate of gradient descent, on the quadratic",
            )
        )
    lines += [_radius(name, one) for name, one in found.lines.items()]
    lines += [_better(found)]
    if found.predicted is not None:
        changes = found.predicted.change
        lines += [_descent(one, changes[i]) for i, one in enumerate(found.descents)]
        lines.append(_seen(found.predicted))
    if found.settled is not None:
        lines += _settled(found.settled)
    return [*lines, *(("note", "", note) for note in found.notes)]


def opening(found: Taylor) -> str:
    """How far the quadratic carries along the shortest and the longest direction, and the ceiling."""
    top = float(found.sharpest[0])
    far = {name: one.distance() for name, one in found.lines.items() if math.isfinite(one.distance())}
    said = []
    if far:
        short, long = (pick(far, key=far.__getitem__) for pick in (min, max))
        tolerance = found.lines[short].agreement.tolerance
        reach = f"The quadratic predicts the loss within {tolerance:.0%} up to a distance of {far[short]:.2g}"
        more = f" along {short}, and {far[long]:.2g} along {long}" if long != short else f" along {short}"
        said.append(f"{reach}{more}.")
    if top > 0:
        said.append(
            f"With λ_max {with_error(top, float(found.residuals[0]))} the ceiling of a learning rate of "
            f"gradient descent is {2 / top:.2g}."
        )
    return " ".join(said)


def _radius(name: str, one: LossLine) -> Said:
    """Distances on both sides of both predictions."""
    said = []
    for order in one.orders:
        sides = one.radii[NAMES[order]]
        each = [f"{side} {radius.words()}" for side, radius in sides.items() if radius.limit > 0]
        said.append(f"{NAMES[order]}: {', '.join(each)}")
    relative = f", {one.distance() / one.theta_length:.2g} of ‖θ‖" if one.theta_length else ""
    words = f"distance up to which the quadratic holds within {one.agreement.tolerance:.0%}{relative}; in t, "
    return (f"radius, {name}", f"{one.distance():.3g}", words + "; ".join(said))


def _better(found: Taylor) -> Said:
    """Along how many sides the cubic holds farther than the quadratic."""
    pairs = [
        (one.radii["quadratic"][side], one.radii["cubic"][side])
        for one in found.lines.values()
        if "cubic" in one.radii
        for side in ("ahead", "behind")
    ]
    known = [(q.value, c.value) for q, c in pairs if not math.isnan(q.value + c.value)]
    farther = sum(c > q for q, c in known)
    words = "sides of directions along which the cubic holds farther than the quadratic"
    return ("cubic farther", f"{farther} of {len(known)}", words)


def _descent(one: Descent, predicted: np.ndarray) -> Said:
    """What descent did at the model, beside what the quadratic said."""
    K, last = len(one.change) - 1, one.num_finite - 1
    went = "fell" if one.change[last] < 0 else "rose"
    how = f"in {last} steps the loss {went} by {abs(one.change[last]):.3g}"
    how = f"it diverged after {last} steps" if one.diverged else how
    after = f"; λ_max there is {one.sharpness:.4g}" if math.isfinite(one.sharpness) else ""
    within = one.steps_within(predicted)
    above = (
        " although above the ceiling" if one.share > 1 and not one.diverged and one.change[last] < 0 else ""
    )
    words = f"of {K} steps predicted within {WITHIN:.0%} at {one.share:g} · 2/λ_max; {how}{above}{after}"
    return (f"descent, {one.share:g}", str(within), words)


def _seen(predicted: QuadraticDescent) -> Said:
    """Which curvatures the gradient reaches: where they are negative, the quadratic has no lowest point."""
    low, high = float(predicted.nodes.min()), float(predicted.nodes.max())
    down = "so the quadratic falls without end along it" if low < 0 else "so the quadratic has a lowest point"
    words = f"the least Ritz value in the Krylov space of the gradient, {down}; the largest is {high:.4g}"
    return ("least curvature", f"{low:.4g}", words)


def _settled(own: SettledPart) -> list[Said]:
    """Descent next to a point that fits the data."""
    how = "" if own.reached else ", not the goal"
    found = [
        (
            "settled",
            rounded(own.loss),
            f"loss after {len(own.losses) - 1} steps of Adam{how}; λ_max there is "
            f"{with_error(own.sharpest, own.residual)}",
        )
    ]
    for i, one in enumerate(own.descents):
        K, last = len(one.change) - 1, one.num_finite - 1
        grown = abs(one.along[last] / one.along[0]) if one.along[0] else math.nan
        wanted = abs(1 - 2 * one.share) ** K
        verdict = "grew" if grown > 1 else "shrank"
        words = (
            f"times: the gradient along the top eigenvector {verdict} over {last} steps at {one.share:g} · "
            f"2/λ_max, |1 − ηλ|^k says {wanted:.3g}; loss predicted within {WITHIN:.0%} for "
            f"{one.steps_within(own.predicted.change[i])} of {K} steps"
        )
        found.append((f"settled, {one.share:g}", f"{grown:.3g}", words))
    return found


def captions(found: Taylor) -> dict[str, str]:
    """What each figure and table shows."""
    share = f"{next(iter(found.lines.values())).agreement.tolerance:.0%}"
    holds = (
        f"A prediction holds where its error is at most {share} of |t gᵀd| + ½ t² |dᵀHd|, and the rounding "
        "of the loss could not have made the difference"
    )
    said = {
        "radii": f"How far each prediction holds, on each side of θ. {holds}: it does at t_low, fails at "
        "t_high and at no point before that was looked at; t is the middle, distance is t ‖d‖. Along the "
        "gradient and the update t is a learning rate; on the way to a checkpoint, t = 1 is there.",
        "lines": "Every point of every line: the loss, its predictions, their errors and what is allowed.",
        "slices": "The loss along a direction, with what its derivatives at t = 0 predict.",
        "reach": f"Distances t ‖d‖ up to which the predictions hold, ahead and behind. {holds}. A triangle: "
        "up to the end of what was looked at, and perhaps beyond.",
    }
    for name in found.lines:
        said[key(name)] = (
            f"The loss along a line, {name}, with what derivatives at t = 0 predict. Bars below: how far a "
            "prediction holds. Right: errors against |t|, filled ahead of θ and hollow behind it, and what "
            "is allowed; gray: rounding of the loss."
        )
    if found.plane is not None:
        said["plane"] = (
            "The loss on the plane of the top eigenvector and the gradient, both of length one and at right "
            "angles. White lines: equal loss. Dashed: the quadratic, at the same heights. Dots: where it "
            "holds. The cross is θ."
        )
    return said | (_descent_captions(found) if found.predicted is not None else {})


def _descent_captions(found: Taylor) -> dict[str, str]:
    said = {
        "descent": "Every step of gradient descent, taken, and as the quadratic has it, from one Lanczos "
        "run; error is that of the predicted change of the loss, over the largest change so far. Settled: "
        "on the loss without its slope, next to a point that fits the data.",
        "ceiling": "How gradient descent went at shares of 2/λ_max. along_top: the gradient along the top "
        "eigenvector at the end over that at the start; predicted is |1 − ηλ|^k. λ_max_after is measured "
        "where it ended.",
        "trajectories": "Gradient descent from the model as it is, at shares of the ceiling 2/λ_max: the "
        "loss and the norm of its gradient, taken (solid) and predicted from the quadratic (dashed). A "
        "dashed line ends where it leaves the picture.",
    }
    if found.settled is not None:
        said["critical"] = (
            "Descent that begins next to a point that fits the data, on the loss without its slope there. "
            "Left: the gradient along the top eigenvector, over that at the start, and |1 − ηλ|^k (dotted). "
            "Right: the change of the loss, taken and predicted (dotted), on an axis that is linear around "
            "zero."
        )
    return said


def key(name: str) -> str:
    """The name of a line's figure."""
    return "line_" + name.lower().replace("'s", "").replace(" ", "_")

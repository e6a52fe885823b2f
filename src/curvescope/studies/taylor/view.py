"""Tables, figures and captions of the study `taylor`, made from the arrays of its result."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.number_format import rounded, with_error
from curvescope.operators.taylor.expansion import NAMES
from curvescope.studies.taylor.analysis import WITHIN
from curvescope.viz import slices, style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Curve, curves, switched
from curvescope.viz.scenes.curves import axis
from curvescope.viz.scenes.maps import plane
from curvescope.viz.style import LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.algorithms import QuadraticDescent
    from curvescope.operators import LossLine, LossPlane
    from curvescope.runs.study_result import Line as Said
    from curvescope.runs.study_result import Tables
    from curvescope.studies.taylor.analysis import DescentRun
    from curvescope.studies.taylor.study import SettledPart, Taylor


def tables(result: Taylor) -> Tables:
    """Return every table by name."""
    lines = [one.to_frame().assign(direction=name) for name, one in result.lines.items()]
    tables: Tables = {"radii": radii(result), "lines": lines}
    if result.plane is not None:
        tables["plane"] = result.plane.to_frame()
    if result.predicted is not None:
        rows = steps("the model", result.predicted, result.descents)
        own = result.settled
        rows += steps("settled", own.predicted, own.descents) if own is not None else []
        tables["descent"] = rows
        tables["ceiling"] = ceiling(result)
    return tables


def radii(result: Taylor) -> list[dict[str, Any]]:
    """One row per direction, prediction and side."""
    return [row for name, one in result.lines.items() for row in _radii(name, one)]


def _radii(name: str, one: LossLine) -> list[dict[str, Any]]:
    e, rows = one.expansion, []
    for order in one.orders:
        for side, radius in one.radii[NAMES[order]].items():
            t = radius.value * (1 if side == "ahead" else -1)
            rows.append(
                {
                    "direction": name,
                    "prediction": NAMES[order],
                    "side": side,
                    "holds": radius.words(),
                    "t": radius.value,
                    "t_low": radius.low,
                    "t_high": radius.high,
                    "distance": radius.value * one.length,
                    "distance/|theta|": radius.value * one.length / one.theta_length
                    if one.theta_length
                    else np.nan,
                    "predicted_change": float(e.predicted(np.array(t), order)) - e.loss,
                    "slope": e.slope,
                    "curvature": e.curvature,
                    "third": e.third,
                    "|d|": one.length,
                    "rounding": one.agreement.rounding,
                }
            )
    return rows


def steps(where: str, predicted: QuadraticDescent, descents: list[DescentRun]) -> list[dict[str, Any]]:
    """One row per learning rate and step."""
    rows = []
    for i, one in enumerate(descents):
        errors = one.errors(predicted.change[i])
        for k in range(len(one.change)):
            rows.append(
                {
                    "where": where,
                    "share": one.share,
                    "learning_rate": one.learning_rate,
                    "step": k,
                    "change": one.change[k],
                    "change_predicted": predicted.change[i, k],
                    "error": errors[k],
                    "gradient_norm": one.gradient_norm[k],
                    "gradient_norm_predicted": predicted.gradient_norm[i, k],
                    "along_top": one.along[k],
                }
            )
    return rows


def ceiling(result: Taylor) -> list[dict[str, Any]]:
    """One row per start and learning rate: measured and predicted descent."""
    rows = []
    places = [("the model", result.predicted, result.descents, float(result.sharpest[0]))]
    if result.settled is not None:
        own = result.settled
        places.append(("settled", own.predicted, own.descents, own.sharpest))
    for where, predicted, descents, top in places:
        assert predicted is not None
        for i, one in enumerate(descents):
            K, last = len(one.change) - 1, one.num_finite - 1
            rows.append(
                {
                    "where": where,
                    "share": one.share,
                    "learning_rate": one.learning_rate,
                    "λ_max": top,
                    "steps": last,
                    "along_top": abs(one.along[last] / one.along[0]) if one.along[0] else np.nan,
                    "along_top_predicted": abs(1 - 2 * one.share) ** K,
                    "change": one.change[last],
                    "change_predicted": predicted.change[i, K],
                    "steps_within_5%": one.steps_within(predicted.change[i]),
                    "diverged": one.diverged,
                    "λ_max_after": one.sharpness,
                }
            )
    return rows


POINTS = 101  # points of a predicted curve
SCENE_ROOM = 0.12  # free space above and below, as a share of the range of losses
PLANE = (
    "The plane of the top eigenvector and the gradient, which are orthogonal unit vectors: the loss, "
    "its quadratic approximation in the same colors, or their difference. Lines connect points of equal "
    "height; the cross is θ."
)
LOSS, QUADRATIC, DIFFERENCE = "loss", "quadratic", "difference"


def scenes(result: Taylor) -> dict[str, Scene]:
    """Return interactive figures: the loss along one direction at a time, and the plane."""
    found = {}
    if result.lines:
        lines = result.lines
        found["slices"] = switched({"direction": list(lines)}, lambda name: _slice(name, lines[name]))
    p = result.plane
    if p is not None:
        shown = [LOSS, QUADRATIC, DIFFERENCE]
        found["plane"] = switched({"shown": shown}, lambda chosen: _scene_plane(p, chosen)) | {
            "caption": PLANE
        }
    return found


def _slice(name: str, one: LossLine) -> Scene:
    """Draw the loss with its predictions; the axis shows the range of the loss."""
    words = f"t = %{{x:.4g}}<br>{LOSS}: %{{y:.6g}}"
    drawn = [Curve(LOSS, one.t, one.loss, words, look=LOOKS[LOSS])]
    dense = np.linspace(float(one.t[0]), float(one.t[-1]), POINTS)
    for order in one.orders:
        kind = NAMES[order]
        values = one.expansion.predicted(dense, order)
        reach = ", ".join(
            f"{r.value:.3g} {side}" for side, r in one.radii[kind].items() if r.value == r.value
        )
        words = f"t = %{{x:.4g}}<br>{kind}: %{{y:.6g}}<br>holds up to |t| = {reach}"
        drawn.append(Curve(kind, dense, values, words, look=LOOKS[kind], marks=False))
    finite = one.loss[np.isfinite(one.loss)]
    low, high = (float(f(finite)) for f in (np.min, np.max)) if finite.size else (0.0, 1.0)
    room = SCENE_ROOM * ((high - low) or abs(high) or 1.0)
    x = axis(f"t along {name}, in units of ‖d‖ = {one.length:.3g}")
    return curves(drawn, x=x, y=axis("loss L(θ + t d)", range=[low - room, high + room]))


def _scene_plane(p: LossPlane, shown: str) -> Scene:
    """Draw loss or quadratic in the same colors, cut off above the 95th percentile of the loss."""
    titles = ("top eigenvector", "−∇L, orthogonal to it")
    if shown == DIFFERENCE:
        label = "loss − quadratic"
        return plane(p.a, p.b, p.loss - p.quadratic, label=label, titles=titles, colors="signed linear")
    finite = p.loss[np.isfinite(p.loss)]
    limits = (float(finite.min()), float(np.percentile(finite, 95))) if finite.size else None
    return plane(
        p.a, p.b, p.loss if shown == LOSS else p.quadratic, label=shown, titles=titles, limits=limits
    )


def summary(result: Taylor) -> list[Said]:
    """Return the main numbers, each with a label and an explanation."""
    top, residual = float(result.sharpest[0]), float(result.residuals[0])
    lines = [
        ("loss", f"{result.loss:.4f}", f"{result.loss_name} of {result.model} on {result.data}"),
        ("λ_max", with_error(top, residual), "largest eigenvalue of the Hessian, ± its residual"),
    ]
    if top > 0:
        words = "of the learning rate of gradient descent, according to the quadratic"
        lines.append(("ceiling 2/λ_max", f"{2 / top:.3g}", words))
    lines += [_radius(name, one) for name, one in result.lines.items()]
    lines += [_better(result)]
    if result.predicted is not None:
        changes = result.predicted.change
        lines += [_descent(one, changes[i]) for i, one in enumerate(result.descents)]
        lines.append(_least_curvature(result.predicted))
    if result.settled is not None:
        lines += _settled(result.settled)
    return [*lines, *(("note", "", note) for note in result.notes)]


def opening(result: Taylor) -> str:
    """State the range of the quadratic along the two extreme directions, and the largest learning rate."""
    top = float(result.sharpest[0])
    far = {name: one.distance() for name, one in result.lines.items() if math.isfinite(one.distance())}
    said = []
    if far:
        short, long = (pick(far, key=far.__getitem__) for pick in (min, max))
        tolerance = result.lines[short].agreement.tolerance
        reach = (
            f"The quadratic approximation predicts the loss within {tolerance:.0%} up to a distance of "
            f"{far[short]:.2g}"
        )
        more = (
            f" along {short}, and up to {far[long]:.2g} along {long}" if long != short else f" along {short}"
        )
        said.append(f"{reach}{more}.")
    if top > 0:
        said.append(
            f"With λ_max = {with_error(top, float(result.residuals[0]))}, the learning rate of gradient "
            f"descent must stay below {2 / top:.2g}."
        )
    return " ".join(said)


def _radius(name: str, one: LossLine) -> Said:
    """Distances on both sides up to which each prediction holds."""
    said = []
    for order in one.orders:
        sides = one.radii[NAMES[order]]
        each = [f"{side} {radius.words()}" for side, radius in sides.items() if radius.limit > 0]
        said.append(f"{NAMES[order]}: {', '.join(each)}")
    relative = f", {one.distance() / one.theta_length:.2g} of ‖θ‖" if one.theta_length else ""
    words = (
        f"distance up to which the quadratic holds within {one.agreement.tolerance:.0%}{relative}; "
        "values of t: "
    )
    return (f"radius, {name}", f"{one.distance():.3g}", words + "; ".join(said))


def _better(result: Taylor) -> Said:
    """Count the sides on which the cubic holds farther than the quadratic."""
    pairs = [
        (one.radii["quadratic"][side], one.radii["cubic"][side])
        for one in result.lines.values()
        if "cubic" in one.radii
        for side in ("ahead", "behind")
    ]
    known = [(q.value, c.value) for q, c in pairs if not math.isnan(q.value + c.value)]
    farther = sum(c > q for q, c in known)
    words = "sides of all directions on which the cubic holds farther than the quadratic"
    return ("cubic farther", f"{farther} of {len(known)}", words)


def _descent(one: DescentRun, predicted: np.ndarray) -> Said:
    """Measured descent at the model, next to the prediction of the quadratic."""
    K, last = len(one.change) - 1, one.num_finite - 1
    went = "fell" if one.change[last] < 0 else "rose"
    how = f"in {last} steps the loss {went} by {abs(one.change[last]):.3g}"
    how = f"it diverged after {last} steps" if one.diverged else how
    after = f"; final λ_max is {one.sharpness:.4g}" if math.isfinite(one.sharpness) else ""
    within = one.steps_within(predicted)
    above = (
        " although the learning rate is above the ceiling"
        if one.share > 1 and not one.diverged and one.change[last] < 0
        else ""
    )
    words = f"of {K} steps predicted within {WITHIN:.0%} at {one.share:g} · 2/λ_max; {how}{above}{after}"
    return (f"descent, {one.share:g}", str(within), words)


def _least_curvature(predicted: QuadraticDescent) -> Said:
    """Smallest curvature that the gradient reaches; if it is negative, the quadratic has no minimum."""
    low, high = float(predicted.nodes.min()), float(predicted.nodes.max())
    down = (
        "so the quadratic decreases without bound along it" if low < 0 else "so the quadratic has a minimum"
    )
    words = f"smallest Ritz value in the Krylov space of the gradient, {down}; the largest is {high:.4g}"
    return ("least curvature", f"{low:.4g}", words)


def _settled(own: SettledPart) -> list[Said]:
    """Measured descent next to a point that fits the data."""
    how = "" if own.reached else "; the goal was not reached"
    words = f"loss after {len(own.losses) - 1} steps of Adam{how}; λ_max at this point is "
    rows = [("settled", rounded(own.loss), words + with_error(own.sharpest, own.residual))]
    for i, one in enumerate(own.descents):
        K, last = len(one.change) - 1, one.num_finite - 1
        grown = abs(one.along[last] / one.along[0]) if one.along[0] else math.nan
        wanted = abs(1 - 2 * one.share) ** K
        verdict = "grew" if grown > 1 else "shrank"
        words = (
            f"times: the gradient along the top eigenvector {verdict} over {last} steps at {one.share:g} "
            f"· 2/λ_max; |1 − ηλ|^k predicts {wanted:.3g}. Loss predicted within {WITHIN:.0%} for "
            f"{one.steps_within(own.predicted.change[i])} of {K} steps"
        )
        rows.append((f"settled, {one.share:g}", f"{grown:.3g}", words))
    return rows


def captions(result: Taylor) -> dict[str, str]:
    """Return the caption of each figure and table."""
    share = f"{next(iter(result.lines.values())).agreement.tolerance:.0%}"
    holds = (
        f"A prediction holds if its error is at most {share} of |t gᵀd| + ½ t² |dᵀHd| and cannot be "
        "explained by rounding of the loss"
    )
    said = {
        "radii": f"Range of each prediction on each side of θ. {holds}. It holds at t_low and fails at "
        "t_high; no point in between was measured. t is the middle, distance is t ‖d‖. Along the "
        "gradient and the update, t is a learning rate; on the line to a checkpoint, t = 1 is the "
        "checkpoint.",
        "lines": "Every point of every line: the loss, its predictions, their errors and the allowed error.",
        "slices": "Loss along a direction, with the predictions of its derivatives at t = 0.",
        "reach": f"Distances t ‖d‖ up to which the predictions hold, ahead and behind. {holds}. A triangle: "
        "the prediction holds up to the end of the measured line, and perhaps beyond.",
    }
    for name in result.lines:
        said[key(name)] = (
            f"Loss along a line, {name}, with the predictions of its derivatives at t = 0. Bars below: "
            "range of each prediction. Right: errors against |t|, filled ahead of θ and hollow behind "
            "it, and the allowed error; gray: rounding of the loss."
        )
    if result.plane is not None:
        said["plane"] = (
            "Loss on the plane of the top eigenvector and the gradient, which are orthogonal unit "
            "vectors. White lines: equal loss. Dashed: the quadratic, at the same heights. Dots: the "
            "quadratic holds. The cross is θ."
        )
    return said | (_descent_captions(result) if result.predicted is not None else {})


def _descent_captions(result: Taylor) -> dict[str, str]:
    said = {
        "descent": "Every step of gradient descent: measured, and predicted by the quadratic from one "
        "Lanczos run. error is the error of the predicted change of the loss, relative to the largest "
        "change so far. Settled: descent on the loss without its slope, next to a point that fits the "
        "data.",
        "ceiling": "Gradient descent at shares of 2/λ_max. along_top: final over initial gradient along the "
        "top eigenvector, predicted as |1 − ηλ|^k. λ_max_after is measured at the final point.",
        "trajectories": "Gradient descent from the model at shares of the ceiling 2/λ_max: the loss and the "
        "norm of its gradient, measured (solid) and predicted by the quadratic (dashed). A dashed line "
        "ends at the edge of the figure.",
    }
    if result.settled is not None:
        said["critical"] = (
            "Descent that starts next to a point that fits the data, on the loss without its slope "
            "there. Left: gradient along the top eigenvector relative to the start, and |1 − ηλ|^k "
            "(dotted). Right: change of the loss, measured and predicted (dotted), on an axis that is "
            "linear around zero."
        )
    return said


def key(name: str) -> str:
    """File name of the figure of a line."""
    return "line_" + name.lower().replace("'s", "").replace(" ", "_")


# How far a prediction may leave the measured range before its line ends, as a share of this range.
FIGURE_ROOM = 0.35


def figures(result: Taylor) -> dict[str, Figure]:
    """Return a figure for every line, all radii, the plane, and the descents."""
    figures = {"reach": _reach(result)}
    figures |= {key(name): _line(name, one) for name, one in result.lines.items()}
    if result.plane is not None:
        figures["plane"] = _figure_plane(result)
    if result.predicted is not None:
        figures["trajectories"] = _trajectories(result)
    if result.settled is not None:
        figures["critical"] = _critical(result.settled)
    return figures


def _line(name: str, one: LossLine) -> Figure:
    figure, (left, right) = style.subplots(1, 2, figsize=(10.5, 3.9))
    one.plot(left)
    left.set(title=f"loss along a line: {name}", xlabel=f"t, in units of ‖d‖ = {one.length:.3g}")
    differences = {NAMES[order]: one.loss - one.expansion.predicted(one.t, order) for order in one.orders}
    allowed = one.agreement.tolerance * one.expansion.terms(one.t)
    slices.errors(right, one.t, differences, allowed, one.agreement.rounding)
    return figure


def _reach(result: Taylor) -> Figure:
    """Draw a row per direction and prediction; markers ahead are filled, behind hollow."""
    from matplotlib.lines import Line2D

    names = list(result.lines)
    figure, ax = style.subplots(figsize=(8.0, 1.5 + 0.5 * len(names)))
    for i, one in enumerate(result.lines.values()):
        for j, order in enumerate(one.orders):
            y, color = i + 0.22 * (j - 0.5) * (len(one.orders) > 1), slices.COLORS[NAMES[order]]
            for side, radius in one.radii[NAMES[order]].items():
                at = radius.value * one.length
                if not np.isfinite(at):
                    continue
                beyond = np.isinf(radius.high)
                inside = color if side == "ahead" else "white"
                ax.plot(at, y, ">" if beyond else "o", color=color, mfc=inside, ms=6)
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x", color="0.92")
    ax.set_axisbelow(True)
    ax.set_xlabel("distance up to which the prediction holds")
    handles = [
        Line2D([], [], ls="", marker="o", color=slices.COLORS[n], mfc=m, label=f"{n}, {s}")
        for n in {NAMES[o]: 0 for one in result.lines.values() for o in one.orders}
        for s, m in (("ahead", slices.COLORS[n]), ("behind", "white"))
    ]
    figure.legend(handles=handles, ncols=4, loc="outside upper center")
    return figure


def _figure_plane(result: Taylor) -> Figure:
    p = result.plane
    assert p is not None
    figure, ax = style.subplots(figsize=(6.6, 5.2))
    p.plot(ax, ("top eigenvector", "−∇L, orthogonal to it"))
    return figure


def _trajectories(result: Taylor) -> Figure:
    figure, (left, right) = style.subplots(1, 2, figsize=(10.5, 3.9))
    predicted = result.predicted
    assert predicted is not None
    losses = [result.loss + d.change for d in result.descents]
    _pairs(left, result.descents, losses, result.loss + predicted.change)
    _pairs(right, result.descents, [d.gradient_norm for d in result.descents], predicted.gradient_norm)
    left.plot([], [], "--", color="0.4", lw=1.1, label="predicted")
    left.set_title("loss")
    right.set_title("norm of the gradient")
    left.legend(title="learning rate / (2/λ_max)")
    return figure


def _pairs(ax: Axes, descents: list[DescentRun], taken: list[np.ndarray], predicted: np.ndarray) -> None:
    """Draw measured curves (solid) and predictions (dashed); the axis shows the measured range."""
    values = np.concatenate([x[np.isfinite(x)] for x in taken])
    room = FIGURE_ROOM * ((values.max() - values.min()) or 1.0)
    low, high = values.min() - room, values.max() + room
    low = max(low, 0.0) if values.min() >= 0 else low
    for i, one in enumerate(descents):
        color = PALETTE[i % len(PALETTE)]
        ax.plot(taken[i], color=color, lw=1.4, label=f"{one.share:g}")
        ax.plot(predicted[i], "--", color=color, lw=1.1)
    ax.set(ylim=(low, high), xlabel="step")


def _critical(own: SettledPart) -> Figure:
    figure, (left, right) = style.subplots(1, 2, figsize=(10.5, 3.9))
    for i, one in enumerate(own.descents):
        color, k = PALETTE[i % len(PALETTE)], np.arange(len(one.change))
        label = f"{one.share:g}"
        left.plot(np.abs(one.along / one.along[0]), color=color, lw=2.2, label=label)
        left.plot(np.abs(1.0 - 2 * one.share) ** k, ":", color="0.1", lw=1.1)
        right.plot(one.change, color=color, lw=2.2, label=label)
        right.plot(own.predicted.change[i], ":", color="0.1", lw=1.1)
    left.plot([], [], ":", color="0.1", lw=1.1, label="predicted")
    left.set_yscale("log")
    left.set_ylim(bottom=max(float(left.get_ylim()[0]), 1e-9))
    _signed_decades(right, [one.change for one in own.descents])
    left.set_title("gradient along the top eigenvector, relative to the start")
    right.set_title("change of the loss without its slope")
    left.legend(title="learning rate / (2/λ_max)")
    for ax in (left, right):
        ax.set_xlabel("step")
    return figure


def _signed_decades(ax: Axes, curves: list[np.ndarray]) -> None:
    """Set a logarithmic axis for both signs, linear up to the power of ten above the smallest curve."""
    sizes = [float(np.nanmax(np.abs(curve))) for curve in curves]
    known = [size for size in sizes if size > 0]
    if not known:
        return
    first, last = (int(np.ceil(np.log10(f(known)))) for f in (min, max))
    ax.set_yscale("symlog", linthresh=10.0**first)
    powers = [10.0**e for e in range(first, last + 1)]
    falls = [-p for p in powers if any(float(np.nanmin(curve)) < -p / 10 for curve in curves)]
    ticks = [*falls[::-1], 0.0, *powers]
    ax.set_yticks(ticks, [f"{tick:.0e}" if tick else "0" for tick in ticks], minor=False)
    ax.set_yticks([], minor=True)

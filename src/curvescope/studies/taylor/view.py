"""Tables, figures and captions of the study `taylor`, made from the arrays of its result."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.numbers import rounded, with_error
from curvescope.operators.taylor.expansion import NAMES
from curvescope.studies.taylor.analysis import WITHIN
from curvescope.viz import slices
from curvescope.viz.blocks import PALETTE
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Curve, curves, switched
from curvescope.viz.scenes.curves import axis
from curvescope.viz.scenes.maps import plane
from curvescope.viz.style import LOOKS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.algorithms import QuadraticDescent
    from curvescope.operators import LossLine, LossPlane
    from curvescope.runs.shown import Line as Said
    from curvescope.studies.taylor.analysis import Descent
    from curvescope.studies.taylor.study import SettledPart, Taylor


def tables(found: Taylor) -> dict[str, pd.DataFrame]:
    """Every table by name."""
    import pandas as pd

    lines = [one.to_frame().assign(direction=name) for name, one in found.lines.items()]
    tables = {
        "radii": pd.DataFrame(radii(found)),
        "lines": pd.concat(lines, ignore_index=True),
    }
    if found.plane is not None:
        tables["plane"] = found.plane.to_frame()
    if found.predicted is not None:
        rows = steps("the model", found.predicted, found.descents)
        own = found.settled
        rows += steps("settled", own.predicted, own.descents) if own is not None else []
        tables["descent"] = pd.DataFrame(rows)
        tables["ceiling"] = pd.DataFrame(ceiling(found))
    return tables


def radii(found: Taylor) -> list[dict[str, Any]]:
    """One row per direction, prediction and side."""
    return [row for name, one in found.lines.items() for row in _radii(name, one)]


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


def steps(where: str, predicted: QuadraticDescent, descents: list[Descent]) -> list[dict[str, Any]]:
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


def ceiling(found: Taylor) -> list[dict[str, Any]]:
    """One row per place and learning rate: how descent went, and how it was predicted to go."""
    rows = []
    places = [("the model", found.predicted, found.descents, float(found.sharpest[0]))]
    if found.settled is not None:
        own = found.settled
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


# ----------------------------------------------------------------------------------------------------- scenes

POINTS = 101  # of a prediction
SCENE_ROOM = 0.12  # of the range of losses, left above and below
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
        found["plane"] = switched({"shown": shown}, lambda chosen: _scene_plane(p, chosen)) | {
            "caption": PLANE
        }
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
    room = SCENE_ROOM * ((high - low) or abs(high) or 1.0)
    x = axis(f"t along {name}, in units of ‖d‖ = {one.length:.3g}")
    return curves(found, x=x, y=axis("loss L(θ + t d)", range=[low - room, high + room]))


def _scene_plane(p: LossPlane, shown: str) -> Scene:
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


# --------------------------------------------------------------------------------------------------- captions


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


# ---------------------------------------------------------------------------------------------------- figures

FIGURE_ROOM = 0.35  # of the range of what was taken, that a prediction may leave it by before its line ends


def figures(found: Taylor) -> dict[str, Figure]:
    """A figure for every line, all radii, the plane, and the descents."""
    figures = {"reach": _reach(found)}
    figures |= {key(name): _line(name, one) for name, one in found.lines.items()}
    if found.plane is not None:
        figures["plane"] = _figure_plane(found)
    if found.predicted is not None:
        figures["trajectories"] = _trajectories(found)
    if found.settled is not None:
        figures["critical"] = _critical(found.settled)
    return figures


def _panels(count: int, width: float = 10.5, height: float = 3.9) -> tuple[Figure, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(1, count, figsize=(width, height), layout="constrained", squeeze=False)


def _line(name: str, one: LossLine) -> Figure:
    figure, axes = _panels(2)
    left, right = axes[0]
    one.plot(left)
    left.set_title(f"loss along a line: {name}")
    left.set_xlabel(f"t, in units of ‖d‖ = {one.length:.3g}")
    differences = {NAMES[order]: one.loss - one.expansion.predicted(one.t, order) for order in one.orders}
    allowed = one.agreement.tolerance * one.expansion.terms(one.t)
    slices.errors(right, one.t, differences, allowed, one.agreement.rounding)
    return figure


def _reach(found: Taylor) -> Figure:
    """A row per direction and prediction; ahead filled, behind hollow."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    names = list(found.lines)
    figure, ax = plt.subplots(figsize=(8.0, 1.5 + 0.5 * len(names)), layout="constrained")
    for i, one in enumerate(found.lines.values()):
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
    ax.set_yticks(range(len(names)), names, fontsize=9)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x", color="0.92")
    ax.set_axisbelow(True)
    ax.set_xlabel("distance up to which the prediction holds")
    handles = [
        Line2D([], [], ls="", marker="o", color=slices.COLORS[n], mfc=m, label=f"{n}, {s}")
        for n in {NAMES[o]: 0 for one in found.lines.values() for o in one.orders}
        for s, m in (("ahead", slices.COLORS[n]), ("behind", "white"))
    ]
    figure.legend(handles=handles, ncols=4, loc="outside upper center")
    return figure


def _figure_plane(found: Taylor) -> Figure:
    p = found.plane
    assert p is not None
    figure, axes = _panels(1, 6.6, 5.2)
    names = ("top eigenvector", "−∇L, orthogonal to it")
    p.plot(axes[0][0], names)
    return figure


def _trajectories(found: Taylor) -> Figure:
    figure, axes = _panels(2)
    predicted = found.predicted
    assert predicted is not None
    left, right = axes[0]
    _pairs(
        left, found.descents, [found.loss + d.change for d in found.descents], found.loss + predicted.change
    )
    _pairs(right, found.descents, [d.gradient_norm for d in found.descents], predicted.gradient_norm)
    left.plot([], [], "--", color="0.4", lw=1.1, label="predicted")
    left.set_title("loss")
    right.set_title("norm of the gradient")
    left.legend(title="learning rate / (2/λ_max)", title_fontsize=8)
    return figure


def _pairs(ax: Axes, descents: list[Descent], taken: list[np.ndarray], predicted: np.ndarray) -> None:
    """Solid lines, dashed ones of the same color; the range is that of what was taken."""
    values = np.concatenate([x[np.isfinite(x)] for x in taken])
    room = FIGURE_ROOM * ((values.max() - values.min()) or 1.0)
    low, high = values.min() - room, values.max() + room
    low = max(low, 0.0) if values.min() >= 0 else low
    for i, one in enumerate(descents):
        color = PALETTE[i % len(PALETTE)]
        ax.plot(taken[i], color=color, lw=1.4, label=f"{one.share:g}")
        ax.plot(predicted[i], "--", color=color, lw=1.1)
    ax.set_ylim(low, high)
    ax.set_xlabel("step")


def _critical(own: SettledPart) -> Figure:
    figure, axes = _panels(2)
    left, right = axes[0]
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
    left.set_title("gradient along the top eigenvector, over its start")
    right.set_title("change of the loss without its slope")
    left.legend(title="learning rate / (2/λ_max)", title_fontsize=8)
    for ax in (left, right):
        ax.set_xlabel("step")
    return figure


def _signed_decades(ax: Axes, curves: list[np.ndarray]) -> None:
    """A logarithmic axis for both signs, linear up to the power of ten above the smallest curve."""
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

"""Figures and captions of the study `propagation`, made from the arrays of its result."""

from __future__ import annotations

import math
import re
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.intervals import may_be_largest
from curvescope.core.number_format import LIES_BETWEEN, between, one_of, plural, rounded, with_error
from curvescope.models.curvature_sources import REST
from curvescope.runs.study_result import Line, Tables
from curvescope.studies.propagation.study import HESSIAN, OUTER, SourceEstimate
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE, cell_text
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Curve, curves, said, switched
from curvescope.viz.scenes.curves import SignedLog, axis, log_axis, over
from curvescope.viz.style import GRAY, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.propagation.study import Propagation


def tables(result: Propagation) -> Tables:
    """Return the table of H, the GGN and the sources, and the table of couplings."""
    found = {"sources": [row(result, name) for name in result.shares.names]}
    return found | ({"coupling": result.coupling.to_frame()} if result.coupling is not None else {})


LAYER = re.compile(r"L(\d+)\.(.+)")
DECADES = 4  # decades of the color scale below the largest value
MOST_OUTSIDE = 4  # most blocks that are named with the rest


def figures(result: Propagation) -> dict[str, Figure]:
    """Return a figure by layer with four panels, and a map of layers and kinds."""
    return {"flow": _flow(result), "norms": _norms(result)}


def kinds_of(result: Propagation) -> list[str]:
    """Return the kinds of sources inside layers: ln1, attention, …"""
    found = [match[2] for name in result.sources if (match := LAYER.fullmatch(name))]
    return list(dict.fromkeys(found))


def _layers(result: Propagation) -> list[int]:
    return sorted({int(match[1]) for name in result.sources if (match := LAYER.fullmatch(name))})


def _flow(result: Propagation) -> Figure:
    figure, axes = style.subplots(2, 2, figsize=(11.5, 7.6))
    _figure_by_layer(axes[0][0], result)
    _shares(axes[0][1], result)
    _eigenvalues(axes[1][0], result)
    _coupling(axes[1][1], result)
    figure.suptitle(f"Where the curvature of {result.model} comes from")
    return figure


def _figure_by_layer(ax: Axes, result: Propagation) -> None:
    """Draw Frobenius norms by layer, one curve per kind, with H and the GGN as horizontal lines."""
    layers = _layers(result)
    for i, kind in enumerate(kinds_of(result)):
        at = [layer for layer in layers if f"L{layer}.{kind}" in result.sources]
        found = [result.shares.norm(f"L{layer}.{kind}") for layer in at]
        _points(ax, np.array(at, dtype=float), found, style.look(i), label=kind)
    for name, dash in ((HESSIAN, "-"), (OUTER, "--")):
        ax.axhline(result.shares.norm(name).value, color="0.45", lw=1, ls=dash, label=name)
    outside = [name for name in result.sources if not LAYER.fullmatch(name)]
    for i, name in enumerate(outside):
        place = np.array([max(layers, default=-1) + 1.0 + i])
        _points(ax, place, [result.shares.norm(name)], style.Look("0.2", "", "o"))
    ticks = [*layers, *(max(layers, default=-1) + 1 + i for i in range(len(outside)))]
    every = max(1, len(layers) // 12)
    names = [f"L{layer}" if layer % every == 0 else "" for layer in layers] + outside
    ax.set_xticks(ticks, names, rotation=90 if len(ticks) > 8 else 0)
    ax.set(yscale="log", title="Frobenius norm of each source")
    ax.legend(ncols=2)
    ax.grid(visible=True)


def _points(
    ax: Axes, x: np.ndarray, found: list[SourceEstimate], look: style.Look, *, label: str = ""
) -> None:
    values = np.array([n.value for n in found])
    low, high = np.array([n.low for n in found]), np.array([n.high for n in found])
    errors = style.error_bars(values, low, high)
    drawn = {"color": look.color, "ls": look.dash, "marker": look.mark, "ms": 3.5, "lw": 1}
    ax.errorbar(x, values, yerr=errors, label=label or None, **drawn)


def _shares(ax: Axes, result: Propagation) -> None:
    names = [OUTER, *result.sources]
    y = np.arange(len(names))[::-1]
    found = [result.shares.share(name) for name in names]
    values = np.array([n.value for n in found])
    errors = style.error_bars(values, [n.low for n in found], [n.high for n in found])
    colors = [PALETTE[0] if value >= 0 else PALETTE[1] for value in values]
    ax.barh(y, values, xerr=errors, color=colors, height=0.7, error_kw={"lw": 0.8, "ecolor": "0.3"})
    ax.set_yticks(y, [_named(result, name) for name in names], **style.fitting(len(names)))
    ax.axvline(0, color="0.4", lw=0.6)
    ax.set_title("share of ‖H‖² (sum 1; negative: cancels others)")
    ax.grid(visible=True)


def _eigenvalues(ax: Axes, result: Propagation) -> None:
    names = [name for name in result.shares.names if not math.isnan(result.ends_of(name)[0])]
    ends = np.array([result.ends_of(name) for name in names])
    bounds = np.array([result.bounds_of(name) for name in names])
    x = np.arange(len(names))
    if not names:
        ax.text(0.5, 0.5, "no Lanczos steps", ha="center", transform=ax.transAxes)
        ax.set_axis_off()
        return
    nothing, look = np.zeros(len(names)), {"fmt": "o", "ms": 3.5, "lw": 1}
    up, down = np.maximum(bounds[:, 1] - ends[:, 0], 0), np.maximum(ends[:, 2] - bounds[:, 0], 0)
    ax.errorbar(x, ends[:, 0], yerr=[nothing, up], color=PALETTE[1], label="λ max", **look)
    ax.errorbar(x, ends[:, 2], yerr=[down, nothing], color=PALETTE[0], label="λ min", **look)
    ax.axhline(0, color="0.4", lw=0.6)
    top = float(np.nanmax(np.abs(ends[:, [0, 2]]))) or 1.0
    ax.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(top * 1e-3)))
    ax.set_ylim(-3 * top, 3 * top)
    ax.set_xticks(x, names, rotation=90, **style.fitting(len(names)))
    ax.set_title("extreme eigenvalues of each source")
    ax.legend()
    ax.grid(visible=True)


def _coupling(ax: Axes, result: Propagation) -> None:
    """Draw ‖H_lm‖ over the geometric mean of the diagonal blocks; it is one on the diagonal."""
    m = result.coupling
    if m is None:
        ax.text(0.5, 0.5, "no map (num_coupling = 0)", ha="center", transform=ax.transAxes)
        ax.set_axis_off()
        return
    own = np.sqrt(np.maximum(np.diag(m.frobenius), np.finfo(float).tiny))
    # H_lm and its transpose are estimated with different probes.
    both = np.sqrt((m.frobenius**2 + m.frobenius.T**2) / 2)
    values = both / np.outer(own, own)
    image = ax.imshow(values, cmap=style.MAP, vmin=0)
    if len(m.names) <= 8:
        style.write_cells(ax, "{:.2f}".format, size=7)
    size = style.fitting(len(m.names))
    ax.set_xticks(range(len(m.names)), [fill(name, 10) for name in m.names], rotation=90, **size)
    ax.set_yticks(range(len(m.names)), m.names, **size)
    ax.figure.colorbar(image, ax=ax, shrink=0.8)
    ax.set_title("coupling of layers, ‖H_lm‖ / √(‖H_ll‖ ‖H_mm‖)")


def _norms(result: Propagation) -> Figure:
    """Draw norms of layers × kinds, with numbers."""
    from matplotlib.colors import LogNorm

    layers, kinds = _layers(result), kinds_of(result)
    outside = [name for name in result.sources if not LAYER.fullmatch(name)]
    rows = [[f"L{layer}.{kind}" for kind in kinds] for layer in layers] or [outside]
    columns = kinds if layers else outside
    values = np.array([[_value(result, name) for name in row] for row in rows])
    top = float(np.nanmax(values)) or 1.0
    size = (2.6 + 0.95 * len(columns), 1.2 + 0.3 * max(len(rows), 3))
    figure, ax = style.subplots(figsize=size)
    norm = LogNorm(vmin=top * 10.0**-DECADES, vmax=top, clip=True)
    image = ax.imshow(np.ma.masked_invalid(values), norm=norm, cmap=style.MAP, aspect="auto")
    style.write_cells(ax, cell_text)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), [f"L{layer}" for layer in layers] or [""])
    figure.colorbar(image, ax=ax, label="Frobenius norm of the source")
    return figure


def _named(result: Propagation, name: str) -> str:
    """Return the name of a source; for the rest, add its blocks if they are few."""
    few = 0 < len(result.outside) <= MOST_OUTSIDE
    return f"{name}: {', '.join(result.outside)}" if name == REST and few else name


def _value(result: Propagation, name: str) -> float:
    return result.shares.norm(name).value if name in result.sources else np.nan


QUANTITIES = {
    "norm": "Frobenius norm of the source",
    "share": "share of ‖H‖² (sum 1)",
    "λ_max": "λ_max of the source",
    "λ_min": "λ_min of the source",
}


def scenes(result: Propagation) -> dict[str, Scene]:
    """Return interactive figures of the sources by layer; eigenvalues only if Lanczos steps were run."""
    known = [q for q in QUANTITIES if any(math.isfinite(_number(result, s, q)[0]) for s in result.sources)]
    return {"by_layer": switched({"quantity": known}, lambda quantity: _scene_by_layer(result, quantity))}


def _number(result: Propagation, name: str, quantity: str) -> tuple[float, float, float, float]:
    """Return value, error, and the ends of its interval."""
    if quantity in ("norm", "share"):
        found = getattr(result.shares, quantity)(name)
        return found.value, found.stderr, found.low, found.high
    top, _, low, _ = result.ends_of(name)
    least, most = result.bounds_of(name)
    return (top, math.nan, top, most) if quantity == "λ_max" else (low, math.nan, least, low)


def _scene_by_layer(result: Propagation, quantity: str) -> Scene:
    """Draw a curve for every kind of source; H, the GGN and sources outside of layers come last."""
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
        found = [_on_signed_log(curve, scale) for curve in found]
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


def _on_signed_log(curve: Curve, scale: SignedLog) -> Curve:
    """Transform a curve to an axis that is logarithmic on both sides of zero."""
    ends = {name: scale.of(getattr(curve, name)) for name in ("y", "low", "high")}
    return Curve(**{**vars(curve), **ends})


NAMED = 3  # most sources that a line names
LIES = "the Lanczos estimate and an outer bound with 95 % confidence"
REST_WORDS = (
    "Rest: the part of the Hessian from second derivatives of all modules outside of these parts{}, "
    "such as the head, whose logits are bilinear in the last state and U."
)


def summary(result: Propagation) -> list[Line]:
    """Return the main numbers, each with a label and an explanation."""
    shares = result.shares
    found = [
        (
            "loss",
            f"{result.loss:.4f}",
            f"{result.loss_name}, mean over {result.num_terms:g} terms of {result.data}",
        )
    ]
    found += _ends(result)
    norm = shares.norm(HESSIAN)
    outer = shares.share(OUTER)
    found += [
        ("‖H‖", with_error(norm.value, norm.stderr), "Frobenius norm; ± is a standard error"),
        (
            "share of the GGN",
            with_error(outer.value, outer.stderr),
            "of ‖H‖²: ⟨GGN, H⟩ / ‖H‖². The other sources have the rest; a negative share cancels a part "
            "of the others",
        ),
        _strongest(result),
        (
            "error of the sum",
            f"{shares.residual:.1e}",
            f"‖H v − GGN v − Σ sources‖ / ‖H v‖ over {plural(len(shares.forms), 'vector')}; 0 for an "
            "exact sum",
        ),
    ]
    return [*found, *(("note", "", note) for note in result.notes)]


def _ends(result: Propagation) -> list[Line]:
    """Bounds of both ends of the spectrum of H."""
    top, _, low, _ = result.ends_of(HESSIAN)
    if math.isnan(top):
        return []
    least, most = result.bounds_of(HESSIAN)
    value, words = between(top, most), f"λ_min {between(least, low)}"
    words += f"; {LIES_BETWEEN}" if " to " in value + words else ""
    return [("λ_max, H", value, words)]


def opening(result: Propagation) -> str:
    """State the GGN's share of the Hessian and the strongest other source."""
    shares = result.shares
    outer = shares.share(OUTER)
    share = f"The GGN makes up {with_error(100 * outer.value, 100 * outer.stderr)} % of ‖H‖²"
    if all(shares.is_zero(name) for name in result.sources):
        return f"{share}; all sources are zero."
    first, whole = strongest(result), shares.norm(HESSIAN)
    count = plural(len(result.sources), "other source")
    if len(first) > 1:
        names = one_of([f"{name} ({_norm(result, name)})" for name in first], NAMED)
        return f"{share}. The strongest of {count} is {names}; their intervals overlap."
    of = f", {rounded(shares.norm(first[0]).value / whole.value, 2)} of ‖H‖" if whole.value else ""
    return f"{share}. The strongest of {count} is {first[0]}, with norm {_norm(result, first[0])}{of}."


def strongest(result: Propagation) -> list[str]:
    """Return the sources that may have the largest norm: one if the intervals decide."""
    norms = [result.shares.norm(name) for name in result.sources]
    values, low, high = (np.array([getattr(n, what) for n in norms]) for what in ("value", "low", "high"))
    return [result.sources[i] for i in may_be_largest(values, low, high)]


def _norm(result: Propagation, name: str) -> str:
    norm = result.shares.norm(name)
    return with_error(norm.value, norm.stderr)


def _strongest(result: Propagation) -> Line:
    """Name the sources with the largest norms."""
    order = sorted(result.sources, key=lambda name: -result.shares.norm(name).value)[: NAMED + 1]
    words = f"‖{order[0]}‖ = {_norm(result, order[0])}"
    then = ", ".join(f"{name} {_norm(result, name)}" for name in order[1:])
    words += f", then {then}" if then else ""
    first = strongest(result)
    words += f"; {len(first)} have overlapping intervals" if len(first) > 1 else ""
    value = one_of(first) if len(first) <= NAMED else "not decided"
    return ("strongest source", value, f"{words}; norms do not add up if sources cancel")


def row(result: Propagation, name: str) -> dict[str, Any]:
    """Return one table row with all numbers of H, the GGN or one source."""
    trace, norm, share = (f(name) for f in (result.shares.trace, result.shares.norm, result.shares.share))
    top, _, low, _ = result.ends_of(name)
    least, most = result.bounds_of(name)
    layer, dot, kind = name.partition(".")
    return {
        "layer": layer if dot else "–",
        "source": name if name in (HESSIAN, OUTER) else kind or name,
        **_estimate_columns("trace", trace),
        **_estimate_columns("frobenius", norm),
        "lambda_max": top,
        "lambda_max_low": top,
        "lambda_max_high": most,
        "lambda_min": low,
        "lambda_min_low": least,
        "lambda_min_high": low,
        **_estimate_columns("share", share),
        "method": "zero" if result.shares.is_zero(name) else "exact" if result.shares.exact else "probes",
        "what": meaning(result, name),
    }


def _estimate_columns(name: str, one: SourceEstimate) -> dict[str, float]:
    return {name: one.value, f"{name}_stderr": one.stderr, f"{name}_low": one.low, f"{name}_high": one.high}


def meaning(result: Propagation, name: str) -> str:
    """Explain H, the GGN or a source in words."""
    if name == REST:
        blocks = f"; blocks outside of them: {', '.join(result.outside)}" if result.outside else ""
        return f"the rest of the Hessian outside of the sources above, such as the head{blocks}"
    own = {HESSIAN: "the Hessian", OUTER: "the generalized Gauss–Newton matrix, not a source"}
    return own.get(name, "the second derivative of this module alone")


def _outside(result: Propagation) -> str:
    return f" ({', '.join(result.outside)})" if result.outside else ""


def captions(result: Propagation) -> dict[str, str]:
    """Return the caption of each figure and table."""
    probes = plural(len(result.shares.forms), "probe")
    exact = result.shares.exact
    how = "exactly, from all unit vectors" if exact else f"from {probes} that all of them see"
    bars = "" if exact else "; bars are 95 % intervals"
    what = (
        "H = H_o + Σ over sources. A source is the second derivative of one norm, attention or "
        "feed-forward network, chained with the first derivatives of all others. "
    ) + REST_WORDS.format(_outside(result))
    return {
        "sources": f"{what} Trace, Frobenius norm and share of ‖H‖² (⟨A, H⟩/‖H‖²; the shares add up to one) "
        f"{how}. λ_max and λ_min from Lanczos steps: {LIES}. Zero: the matrix is only rounding error (it "
        "is not symmetric), and its error is its size.",
        "by_layer": "Every source at its layer, with the 95 % interval of its norm or share, or the range "
        "of its eigenvalue with 95 % confidence. H, the GGN and sources outside of layers come after "
        "the last layer.",
        "flow": f"{what} Top: Frobenius norm of each source by layer, and its share of ‖H‖². Bottom: largest "
        f"and smallest eigenvalue of each source ({LIES}), and coupling of layers, ‖H_lm‖ / √(‖H_ll‖ "
        f"‖H_mm‖). Norms and shares {how}{bars}.",
        "norms": f"Frobenius norm of each source, {how}.",
        "coupling": "Frobenius norm of every block of the Hessian between two layers, from random vectors "
        "on single layers, with standard error and 95 % interval.",
    }

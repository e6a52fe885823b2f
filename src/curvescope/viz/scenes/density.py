"""Scenes of spectra: densities and cumulative shares of eigenvalues, on three kinds of axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from curvescope.viz.interactive import Scene
from curvescope.viz.scenes.curves import Curve, SignedLog, axis, curves, said, switched
from curvescope.viz.style import Look

AXES = ("linear", "symlog", "log")
DENSITY, SHARE = "density", "share up to λ"
LINEAR = 1e-3  # relative to the largest |λ|: a signed logarithm is linear below it
DECADES = 8  # decades of a density shown below its maximum
MOST_APART = 6  # most outliers to mark, the farthest from zero; more would overlap


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of a matrix: broadened density with its interval, bounds of shares, single eigenvalues."""

    name: str
    look: Look
    grid: np.ndarray  # (G,)
    density: np.ndarray  # (G,)
    band: tuple[np.ndarray, np.ndarray]  # (G,) each
    edges: np.ndarray  # (E + 1,)
    share: np.ndarray  # (E,) of the eigenvalues up to λ, from edge to edge
    shares: tuple[np.ndarray, np.ndarray]  # (E,) each, ends
    ends: Mapping[float, str]  # extreme eigenvalues, with their hover text
    apart: Mapping[float, str]  # outliers of the density, with their hover text
    sure: tuple[np.ndarray, np.ndarray] | None = None  # (G,) each, certain bounds of the density
    known: np.ndarray | None = None  # (G,) mask: the density has the shape of the data, not of the kernel


def spectra(found: Sequence[Spectrum]) -> Scene:
    """Scene of densities and shares of matrices; on a log axis, negative eigenvalues are dotted."""
    controls = {"curve": [DENSITY, SHARE], "λ axis": list(AXES)}

    def draw(curve: str, kind: str) -> Scene:
        return _density(found, kind) if curve == DENSITY else _shares(found, kind)

    return switched(controls, draw)


def caption(what: str, band: str) -> str:
    """Caption of a scene of spectra for all of its controls.

    Args:
        what: Matrix, method and kernel of the density.
        band: Sentence on the errors of the density.
    """
    return (
        f"{what}: narrower features are not visible. {band}. The share up to λ has no kernel; if it has a "
        f"band, the true share lies in it 95 times in 100. Strokes at the bottom are extreme eigenvalues "
        f"from Lanczos. Dotted: the kernel hides the shape, or the certain bounds, a shaded region, are "
        f"far apart. Diamonds are outliers separated from the bulk, at most {MOST_APART} per matrix, "
        f"the farthest from zero. The logarithmic axis shows |λ|; negative eigenvalues are dotted."
    )


def _density(found: Sequence[Spectrum], kind: str) -> Scene:
    top = max(float(one.density.max()) for one in found)
    floor = top * 10.0**-DECADES
    y = axis("density of eigenvalues", type="log")
    y["range"] = [math.log10(floor) - 0.3, math.log10(top) + 0.5]
    place = floor * 3
    lines = []
    for number, one in enumerate(found):
        shown = one.density > floor / 10
        words = f"{one.name}: λ = {_place(kind)}<br>density %{{y:.3g}}"
        known = np.full(len(one.grid), fill_value=True) if one.known is None else one.known
        curve = Curve(
            one.name, one.grid, np.where(shown & known, one.density, np.nan), words, *one.band,
            look=one.look, marks=False, band=True, true=_true(one.grid, kind),
        )  # fmt: skip
        lines += _sides(curve, kind)
        if not known.all():
            lines += _sides(_vague(one, shown & ~known, floor, kind), kind)
        lines += _eigenvalues(one, place * 2.5**number, kind)
    return _on(lines, found, kind, y)


def _vague(one: Spectrum, vague: np.ndarray, floor: float, kind: str) -> Curve:
    """Return a dotted curve where the kernel hides the shape, with the certain bounds as a band."""
    low, high = (None, None) if one.sure is None else (np.maximum(end, floor / 10) for end in one.sure)
    return Curve(
        f"{one.name}, shape not known", one.grid, np.where(vague, one.density, np.nan),
        f"{one.name}: λ = {_place(kind)}<br>density %{{y:.3g}}, of the kernel's width", low, high,
        look=one.look._replace(dash=":"), marks=False, band=True, of=one.name, true=_true(one.grid, kind),
    )  # fmt: skip


def _shares(found: Sequence[Spectrum], kind: str) -> Scene:
    lines = []
    for number, one in enumerate(found):
        x = np.repeat(one.edges, 2)[1:-1]
        y, low, high = (np.repeat(part, 2) for part in (one.share, *one.shares))
        words = f"{one.name}: λ = {_place(kind)}<br>%{{y:.4p}} of eigenvalues up to here"
        true = _true(x, kind)
        curve = Curve(one.name, x, y, words, low, high, look=one.look, marks=False, band=True, true=true)
        lines += [*_sides(curve, kind), *_eigenvalues(one, -0.03 * (number + 1), kind)]
    lowest = -0.03 * (len(found) + 1)
    return _on(lines, found, kind, axis("share of eigenvalues ≤ λ", range=[lowest, 1.03]))


def _place(kind: str) -> str:
    """Return plotly's template for λ at a point: x itself, unless the axis has transformed it."""
    return "%{x:.4g}" if kind == "linear" else "%{customdata}"


def _true(x: np.ndarray, kind: str) -> np.ndarray | None:
    return None if kind == "linear" else x


def _eigenvalues(one: Spectrum, y: float, kind: str) -> list[Curve]:
    """Return extreme eigenvalues as strokes and the farthest outliers as diamonds."""
    found = []
    apart = dict(sorted(one.apart.items(), key=lambda item: -abs(item[0]))[:MOST_APART])
    for name, marks, symbol in (
        ("extreme eigenvalues", one.ends, "line-ns-open"),
        ("outliers", apart, "diamond-open"),
    ):
        if marks:
            look = one.look._replace(mark=symbol)
            x = np.array(list(marks), dtype=float)
            curve = Curve(
                name, x, np.full(len(x), y), list(marks.values()), look=look, line=False, of=one.name
            )
            found += _sides(curve, kind)
    return found


def _sides(curve: Curve, kind: str) -> list[Curve]:
    """Return the curve; for a logarithmic axis its positive and negative parts, each at |λ|."""
    if kind != "log":
        return [curve]
    found = []
    for sign, words, dash in ((1, "", curve.look.dash if curve.look else "-"), (-1, ", λ < 0", ":")):
        here = sign * curve.x > 0
        if not here.any():
            continue
        part: dict[str, Any] = {
            "name": f"{curve.name}{words}", "x": sign * curve.x[here], "y": curve.y[here],
            "words": curve.words if isinstance(curve.words, str) else np.array(curve.words)[here].tolist(),
            "of": curve.name if sign < 0 and not curve.of else curve.of,
            "true": None if curve.true is None else curve.true[here],
            "low": None if curve.low is None else curve.low[here],
            "high": None if curve.high is None else curve.high[here],
            "look": curve.look._replace(dash=dash) if curve.look else None,
        }  # fmt: skip
        found.append(Curve(**part, marks=curve.marks, line=curve.line, band=curve.band))
    return found


def _on(lines: list[Curve], found: Sequence[Spectrum], kind: str, y: dict[str, Any]) -> Scene:
    low = min(min([*one.edges.tolist(), *one.ends]) for one in found)
    high = max(max([*one.edges.tolist(), *one.ends]) for one in found)
    size = max(abs(low), abs(high)) or 1.0
    if kind == "linear":
        x = axis("eigenvalue λ", range=[low - 0.05 * size, high + 0.05 * size])
    elif kind == "log":
        ends = [math.log10(size * LINEAR / 10), math.log10(size * 1.5)]
        x = axis("|λ|, logarithmic", type="log", range=ends)
    else:
        scale = SignedLog(size * LINEAR)
        ends = scale.of([low - 0.3 * abs(low), high + 0.3 * abs(high)]).tolist()
        x = axis("eigenvalue λ, logarithmic on both sides", range=ends, **scale.ticks(low, high))
        lines = [_moved(line, scale) for line in lines]
    return curves(lines, x=x, y=y, height=440)


def _moved(curve: Curve, scale: SignedLog) -> Curve:
    return Curve(**{**vars(curve), "x": scale.of(curve.x)})


def eigenvalue_words(name: str, value: float, residual: float, *, converged: bool) -> str:
    """Return the hover text of an extreme eigenvalue."""
    sure = "" if converged else "<br>not converged"
    return f"{name}: eigenvalue {said(value, residual)}{sure}"

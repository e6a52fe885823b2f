"""The scenes of the study `blocks`: from its arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from curvescope.core.numbers import bound
from curvescope.core.parts import MATRIX_SYMBOLS, TITLES
from curvescope.studies.blocks import words
from curvescope.studies.spectrum.scenes import CHOICES, shape
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, estimated, grid_map, layer_map, said, switched
from curvescope.viz.scenes.density import spectra

if TYPE_CHECKING:
    from curvescope.studies.blocks.part import Part
    from curvescope.studies.blocks.study import Blocks

QUANTITIES = {"norm": "‖·‖_F", "trace": "trace", "λ_max": "λ_max", "rms": "root mean square entry"}


def scenes(result: Blocks) -> dict[str, Scene]:
    """The map of blocks; densities and divergences where they were asked for."""
    found = {"block_map": _map(result)}
    first = next(iter(result.parts.values()))
    if first.densities:
        found["densities"] = _densities(result)
    if first.heterogeneity is not None:
        found["heterogeneity"] = _heterogeneity(result)
    return found


def _map(result: Blocks) -> Scene:
    """Layers × roles; of the quantities, those that some matrix has."""
    matrices = {CHOICES[name]: name for name in result.parts}
    size = dict(zip(result.names, result.sizes.tolist(), strict=True))
    rows = {q: [name for name in size if _is_known(result, q, name)] for q in QUANTITIES}
    known = [q for q in QUANTITIES if rows[q]]

    def draw(matrix: str, quantity: str) -> Scene:
        name = matrices[matrix]
        cells = _cells(result.parts[name], quantity, size)
        colors = "signed" if quantity in ("trace", "λ_max") else "log"
        label = f"{QUANTITIES[quantity]}, {TITLES[name]}"
        return layer_map(cells, label=label, colors=colors, names=rows[quantity])

    return switched({"matrix": list(matrices), "quantity": known}, draw)


def _is_known(result: Blocks, quantity: str, name: str) -> bool:
    """Whether some matrix has the quantity of a block."""
    return any(math.isfinite(_number(part, quantity, name, 1).value) for part in result.parts.values())


def _cells(part: Part, quantity: str, size: dict[str, int]) -> dict[str, Cell]:
    found = {name: _number(part, quantity, name, size[name]) for name in size}
    return {name: cell for name, cell in found.items() if math.isfinite(cell.value)}


def _number(part: Part, quantity: str, name: str, size: int) -> Cell:
    """A quantity of a block with its error; nan where it was not asked for."""
    value, error, more = math.nan, math.nan, ""
    if quantity == "trace":
        value, error, probes = part.trace_of(name)
        more = f"<br>{'exact' if probes == 'exact' else f'from {probes} probes'}"
        more += "<br>not told apart from zero" if part.is_noise(name) else ""
    elif quantity == "λ_max":
        found = part.sharpness(name)
        value, error = found.largest, found.error
        more = (
            f"<br>at most {bound(found.high, up=True)}, 95 times in 100" if math.isfinite(found.high) else ""
        )
    elif name in part.norms:
        scale = size if quantity == "rms" else 1
        value, error = part.norms[name].norm / scale, part.norms[name].norm_stderr / scale
    number = said(value, error) if quantity == "λ_max" else estimated(value, error)
    text = f"<b>{name}</b><br>{QUANTITIES[quantity]}: {number}{more}<br>{size:,} parameters"
    return Cell(value, text)


def _densities(result: Blocks) -> Scene:
    """All matrices of one block at a time; the curves and axes of a spectrum."""
    names = list(next(iter(result.parts.values())).densities)
    made = {
        name: spectra([
            shape(operator, part.densities[name], part.extremes.get(name))
            for operator, part in result.parts.items()
            if name in part.densities
        ])
        for name in names
    }  # fmt: skip
    inner = made[names[0]]["controls"]
    variants = {f"{name}|{key}": v for name, one in made.items() for key, v in one["variants"].items()}
    first = next(iter(variants.values()))
    controls = [{"name": "block", "choices": names}, *inner]
    return {**first, "controls": controls, "variants": variants, "caption": words.density_scene(result)}


def _heterogeneity(result: Blocks) -> Scene:
    """Every pair of blocks, from 0 to 1."""
    parts = {CHOICES[o]: p.heterogeneity for o, p in result.parts.items() if p.heterogeneity is not None}

    def draw(matrix: str) -> Scene:
        h = parts[matrix]
        cells = [
            [
                Cell(float(h.divergence[i, j]), f"<b>{a}, {b}</b><br>divergence: "
                     f"{said(float(h.divergence[i, j]), float(h.stderr[i, j]))} bits")
                for j, b in enumerate(h.names)
            ]
            for i, a in enumerate(h.names)
        ]  # fmt: skip
        symbol = next(MATRIX_SYMBOLS[o] for o, choice in CHOICES.items() if choice == matrix)
        label = f"Jensen–Shannon divergence (bits), {symbol}"
        top = max(float(one.divergence.max()) for one in parts.values()) or 1.0
        return grid_map(h.names, h.names, cells, label=label, colors="linear", limits=(0.0, top))

    return switched({"matrix": list(parts)}, draw)

"""The tables of a comparison."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from curvescope.studies.compare.quantities import OF_BLOCKS, QUANTITIES, Estimate

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.compare.study import Comparison

Row = dict[str, object]


def of(found: Comparison) -> dict[str, pd.DataFrame]:
    """Differences, values of every side, blocks, and blocks that have no partner."""
    import pandas as pd

    rows = {"differences": _differences(found), "sides": _sides(found), "blocks": _blocks(found)}
    rows["without_partner"] = [
        {"block": block, "only in": side} for side, names in found.alone.items() for block in names
    ]
    return {name: pd.DataFrame(each) for name, each in rows.items() if each}


def _differences(found: Comparison) -> list[Row]:
    first, rows = found.sides[0], []
    for number, side in enumerate(found.sides[1:], start=1):
        for name in QUANTITIES:
            difference, ratio = found.difference(number, name), found.ratio(number, name)
            rows.append(
                {
                    "quantity": name,
                    "side": side.name,
                    **_with_ends("value", side.quantity(name)),
                    "against": first.name,
                    **_with_ends("its value", first.quantity(name)),
                    "difference": difference.value,
                    "low": difference.low,
                    "high": difference.high,
                    "verdict": difference.verdict,
                    **_with_ends("ratio", ratio),
                }
            )
    return rows


def _with_ends(name: str, found: Estimate) -> Row:
    return {name: found.value, f"{name} low": found.low, f"{name} high": found.high}


def _sides(found: Comparison) -> list[Row]:
    return [
        {
            "side": side.name,
            "model": side.model,
            "data": side.data,
            "terms": side.num_terms,
            "parameters": side.num_parameters,
            "quantity": name,
            **side.quantity(name)._asdict(),
        }
        for side in found.sides
        for name in QUANTITIES
    ]


def _blocks(found: Comparison) -> list[Row]:
    """Ratios, of λ_max first."""
    sizes = [dict(zip(side.blocks, side.sizes.tolist(), strict=True)) for side in found.sides]
    rows = []
    for name, (number, side), block in product(OF_BLOCKS, list(enumerate(found.sides))[1:], found.blocks):
        ratio = found.ratio(number, name, block)
        rows.append(
            {
                "block": block,
                "parameters": sizes[number][block],
                "quantity": name,
                "side": side.name,
                **_with_ends("value", side.quantity(name, block)),
                "against": found.sides[0].name,
                **_with_ends("its value", found.sides[0].quantity(name, block)),
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "verdict": found.difference(number, name, block).verdict,
            }
        )
    return rows

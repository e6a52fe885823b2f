"""The tables of the study `sinks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.sinks.effects import EARLIER, QUANTITIES, effect, ends, ggn_ends, split
from curvescope.studies.sinks.ways import UNCHANGED, Way

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.sinks.study import Sinks


def of(result: Sinks) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    found = {
        "sinks": [sink_row(result, way) for way in all_ways(result)],
        "texts": [row for way in all_ways(result) for row in _text_rows(result, way)],
        "heads": _head_rows(result),
        "stream": _stream_rows(result),
        "blocks": _block_rows(result),
    }
    return {name: pd.DataFrame(rows) for name, rows in found.items() if rows}


def all_ways(result: Sinks) -> list[Way]:
    """Every way, from its strength 0 on, which is the unchanged model."""
    starts = {way.how: Way(way.how, 0.0) for way in result.ways}
    found = []
    for way in result.ways:
        found += [starts.pop(way.how)] if way.how in starts else []
        found.append(way)
    return found


def sink_row(result: Sinks, way: Way) -> dict[str, Any]:
    """One way at one strength: means over texts, and factors against the unchanged model."""
    name, one = way.name, result.moved[way.name]
    h, g, bulk = ends(result, name), ggn_ends(result, name), split(result, name)
    settled = np.abs(bulk.width - split(result, name, earlier=EARLIER).width).mean()
    row: dict[str, Any] = {
        "how": way.how,
        "strength": way.strength,
        "sink_mass": one.mass.mean(),
        "loss": one.loss.mean(),
        "lambda_max": h.top.mean(),
        "lambda_max_error": h.top_error.mean(),
        "lambda_min": h.bottom.mean(),
        "lambda_min_error": h.bottom_error.mean(),
        "bulk_width": bulk.width.mean(),
        "bulk_width_error": probe_error(bulk.width) + settled,
        "outliers": bulk.outliers.mean(),
        "outliers_error": probe_error(bulk.outliers),
        "ggn_lambda_max": g.top.mean(),
        "ggn_lambda_max_error": g.top_error.mean(),
    }
    for quantity in QUANTITIES:
        found = effect(result, name, quantity)
        row |= {f"{quantity}_times": found.mean, f"{quantity}_low": found.low, f"{quantity}_high": found.high}
        row |= {f"{quantity}_direction": found.direction}
    return row


def probe_error(samples: np.ndarray) -> float:
    """Standard error over probes of the mean over texts of (X, P); every text has probes of its own."""
    texts, count = samples.shape
    return float(np.sqrt((samples.var(axis=1, ddof=1) / count).sum()) / texts)


def _text_rows(result: Sinks, way: Way) -> list[dict[str, Any]]:
    name, one = way.name, result.moved[way.name]
    h, g, bulk = ends(result, name), ggn_ends(result, name), split(result, name)
    factors = {quantity: effect(result, name, quantity) for quantity in QUANTITIES}
    count = np.sqrt(bulk.width.shape[1])
    rows = []
    for x in range(len(one.loss)):
        row: dict[str, Any] = {"how": way.how, "strength": way.strength, "text": x}
        row |= {"sink_mass": one.mass[x], "loss": one.loss[x]}
        row |= {"lambda_max": h.top[x], "lambda_max_error": h.top_error[x]}
        row |= {"lambda_min": h.bottom[x], "lambda_min_error": h.bottom_error[x]}
        row |= {"bulk_width": bulk.width[x].mean(), "bulk_width_stderr": bulk.width[x].std(ddof=1) / count}
        row |= {"outliers": bulk.outliers[x].mean(), "outliers_stderr": bulk.outliers[x].std(ddof=1) / count}
        row |= {"ggn_lambda_max": g.top[x], "ggn_lambda_max_error": g.top_error[x]}
        for quantity, found in factors.items():
            row |= {f"{quantity}_times": found.texts[x], f"{quantity}_times_error": found.errors[x]}
        rows.append(row)
    return rows


def _head_rows(result: Sinks) -> list[dict[str, Any]]:
    heads = result.heads
    return [
        {
            "layer": i,
            "head": j,
            "sink_mass": heads.mass[i, j],
            "sink_mass_spread": heads.mass_spread[i, j],
            "value_norm": heads.values[i, j],
        }
        for i, j in np.ndindex(*heads.mass.shape)
    ]


def _stream_rows(result: Sinks) -> list[dict[str, Any]]:
    heads = result.heads
    triples = zip(heads.points, heads.massive, heads.massive_others, strict=True)
    return [{"point": p, "first_token": first, "other_tokens": others} for p, first, others in triples]


def _block_rows(result: Sinks) -> list[dict[str, Any]]:
    rows = []
    for way in [Way("", 0.0), *result.last()] if result.blocks else []:
        one, before = result.blocks[way.name], result.blocks[UNCHANGED]
        for name, value, error, start in zip(one.names, one.values, one.errors, before.values, strict=True):
            row = {"how": way.how or UNCHANGED, "strength": way.strength, "blocks": name}
            row |= {"lambda_max": value, "lambda_max_error": error}
            rows.append(row | {"times": value / start if start else np.nan})
    return rows

"""What is said about sinks on models of several conditions: first numbers, tables, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.numbers import plural
from curvescope.papers.singh2025.sinks.claims import last
from curvescope.runs.shown import Line
from curvescope.studies.sinks.effects import effect
from curvescope.studies.sinks.ways import UNCHANGED

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.papers.singh2025.sinks.study import SinkCases


def summary(result: SinkCases) -> list[Line]:
    """What the largest bias does to every model."""
    found = []
    for name, one in result.cases.items():
        way = last(one, "bias")
        top, bulk = (effect(one, way.name, quantity) for quantity in ("lambda_max", "bulk_width"))
        words = f"λ_max at bias {way.strength:g}, bulk width × {bulk.mean:.2f}; sink mass "
        words += f"{one.moved[UNCHANGED].mass.mean():.2f} → {one.moved[way.name].mass.mean():.2f}"
        found.append((name, f"× {top.mean:.2f}", words))
    return found


def tables(result: SinkCases) -> dict[str, pd.DataFrame]:
    """The study's tables of all models, one under the other."""
    import pandas as pd

    found: dict[str, list[pd.DataFrame]] = {}
    for name, one in result.cases.items():
        for table, frame in one.tables().items():
            frame.insert(0, "case", name)
            found.setdefault(table, []).append(frame)
    return {table: pd.concat(frames, ignore_index=True) for table, frames in found.items()}


def captions(result: SinkCases) -> dict[str, str]:
    """What each figure and table shows."""
    first = next(iter(result.cases.values()))
    own = first.captions()
    sizes = ", ".join(f"{name}: {one.num_parameters:,}" for name, one in result.cases.items())
    texts = plural(len(first.moved[UNCHANGED].loss), "text")
    return {name: own[name] for name in result.tables()} | {
        "bias": "λ_max, bulk width and stretch (λ_max over bulk width) against a bias at the first key, as "
        f"factors, one color for each model ({texts} each; dots are texts with their errors). The bundled "
        "model reads its sample text in float32, small ones a Markov chain in float64. Parameters: "
        f"{sizes}.",
        "spectra": f"{own['spectra']} The bundled model, trained.",
    }

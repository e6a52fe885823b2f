"""Findings of a diagnosis for the page, each with links to what it rests on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from curvescope.report.parts import Finding
from curvescope.report.pieces.headings import heading
from curvescope.report.pieces.levels import severity
from curvescope.report.sections import SECTIONS
from curvescope.studies.diagnose.study import Diagnosis

RESTS_ON = {
    "learning_rate": ("checks", "spectra"),
    "block_learning_rate": ("blocks", "block-map"),
    "negative_curvature": ("checks", "spectra"),
    "condition": ("checks", "spectra"),
    "confidence": ("checks", "spectra"),
    "uneven_layers": ("layers", "block-map"),
    "flat_blocks": ("checks", "block-map"),
    "norm_placement": ("layers", "propagation"),
    "embedding_scale": ("checks", "geometry"),
    "sharp_sequences": ("sequences", ""),
    "steep_sequences": ("sequences", ""),
    "duplicates": ("sequences", ""),
    "batch_choice": ("parts", ""),
    "saturated_attention": ("heads", "geometry"),
    "sinks": ("heads", "geometry"),
    "dead_heads": ("heads", "geometry"),
}
"""Of every check, the table of the diagnosis and the section with more on it."""


def findings(
    found: Diagnosis, *, anchor: str, tables: Collection[str], there: Sequence[str]
) -> list[Finding]:
    """Every finding, worst first.

    Args:
        anchor: of the diagnosis; its tables are at `anchor-NAME`.
        tables: names of the diagnosis' tables.
        there: anchors of the sections that the page has.
    """
    made = []
    for check in found.findings:
        own, section = RESTS_ON.get(check.name, ("checks", ""))
        links = [(f"{anchor}-{own}-table", f"table of {own}")] if own in tables else []
        links += [(section, SECTIONS[section].title)] if section in there else []
        made.append(
            Finding(
                heading=heading(check.name),
                level=severity(check.severity),
                number=check.number,
                unit=check.unit,
                where=check.where,
                meaning=check.meaning,
                advice=check.advice,
                evidence=check.evidence,
                links=links,
            )
        )
    return made

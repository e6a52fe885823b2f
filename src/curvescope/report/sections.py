"""The sections of a page, in their order, and what of which study belongs to which."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A section: its title, its name in the navigation, and the studies at home in it, in order."""

    title: str
    short: str
    studies: tuple[str, ...] = ()


SECTIONS = {
    "findings": Place("Findings", "Findings", ("diagnose",)),
    "model": Place("The model", "Model"),
    "comparison": Place("Side by side", "Comparison", ("compare",)),
    "spectra": Place(
        "Spectra of H, GGN and functional Hessian", "Spectra", ("spectrum", "gap", "exact_spectra")
    ),
    "block-map": Place("The block map", "Block map", ("blocks",)),
    "blocks": Place("Blocks, and how they differ", "Blocks"),
    "propagation": Place("Where curvature comes from", "Propagation", ("propagation",)),
    "dynamics": Place("Over training", "Dynamics", ("dynamics", "monitor")),
    "landscape": Place("The landscape around the weights", "Landscape", ("taylor", "landscape")),
    "geometry": Place(
        "Geometry of tokens, heads and paths", "Geometry",
        ("embeddings", "heads", "probes", "trajectory", "layernorm", "causal", "activations"),
    ),
    "papers": Place("Papers: published and measured", "Papers"),
    "more": Place("More measurements", "More"),
    "about": Place("About this page", "About"),
}  # fmt: skip
"""By anchor."""
HOME = {study: anchor for anchor, place in SECTIONS.items() for study in place.studies}
ELSEWHERE = {
    ("spectrum", "traces"): "block-map",
    ("spectrum", "norms"): "block-map",
    ("spectrum", "block_norms"): "block-map",
    ("spectrum", "block_maps"): "block-map",
    ("spectrum", "block_map"): "block-map",
    ("blocks", "sharpness"): "blocks",
    ("blocks", "extremes"): "blocks",
    ("blocks", "densities"): "blocks",
    ("blocks", "heterogeneity"): "blocks",
    ("gap", "over_training"): "dynamics",
    ("gap", "training"): "dynamics",
}
"""Figures, scenes and tables that are shown away from their study's home."""


def home_of(study: str) -> str:
    """The section that a study is at home in."""
    return HOME.get(study, "more")


def place_of(study: str, name: str) -> str:
    """The section of a figure, scene or table."""
    return ELSEWHERE.get((study, name), home_of(study))


def rank(study: str) -> int:
    """The place of a study among those of its section; one that is not at home in any comes last."""
    known = list(HOME)
    return known.index(study) if study in known else len(known)

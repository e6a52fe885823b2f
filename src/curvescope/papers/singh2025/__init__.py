"""'Cracking the Hessian' (Singh, Ormaniec, Hofmann 2025), slides: exact spectra of attention, GGN, sinks.

Every figure is a folder of this package, imported when it is asked for. What is published here are statements
of the slides, and no number of theirs.
"""

from __future__ import annotations

FIGURES = {
    "exact_spectra": "exact spectra of attention and two-layer networks: what moves them, what is paired",
    "gap": "how far the GGN is from the Hessian: Transformers and MLPs of one size, training, other targets",
    "norms": "λ_max against norms of weight matrices: rank correlations, over training and random models",
    "sinks": "the spectrum as an attention sink grows, in six ways, on trained and untrained models",
}
SLIDES = ("slides, 'Cracking the Hessian'", "paper")
"""Where a statement stands, and whose words it is in."""
MORE: dict[str, str] = {}
"""Figures that the slides do not have: made only when they are asked for."""

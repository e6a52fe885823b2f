"""'Cracking the Hessian' (Singh, Ormaniec, Hofmann 2025), slides: exact spectra of attention, GGN, sinks.

Every figure is a module of this package, imported on demand. The slides are quoted with their statements, not
with numbers.
"""

from __future__ import annotations

FIGURES = {
    "exact_spectra": "exact spectra of attention and two-layer networks: sensitivity, and pairs of "
    "eigenvalues",
    "gap": "difference between GGN and Hessian: Transformers and MLPs of one size, training, other targets",
    "norms": "λ_max against norms of weight matrices: rank correlations over training and random models",
    "sinks": "the spectrum as an attention sink grows, for six interventions, on trained and untrained "
    "models",
}
SLIDES = ("slides, 'Cracking the Hessian'", "paper")
"""Source of a statement, and the author of its wording."""
MORE: dict[str, str] = {}
"""Figures that the slides do not have; made only on request."""

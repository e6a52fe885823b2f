"""'Cracking the Hessian' (Singh, Ormaniec, Hofmann 2025), slides: what they say, measured.

Every figure is a folder of this package, imported when it is asked for.
"""

from __future__ import annotations

FIGURES = {
    "gap": "how far the GGN is from the Hessian: Transformers and MLPs of one size, training, other targets",
    "norms": "λ_max against norms of weight matrices: rank correlations, over training and random models",
}
MORE: dict[str, str] = {}
"""Figures that the slides do not have: made only when they are asked for."""

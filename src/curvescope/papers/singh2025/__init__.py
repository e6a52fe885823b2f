"""'Cracking the Hessian' (Singh, Ormaniec, Hofmann 2025), the slides: exact spectra of attention, and sinks.

Every figure is a folder of this package, imported when it is asked for. The slides themselves could not be
read: what is published here are their statements, and no number of theirs.
"""

from __future__ import annotations

FIGURES = {
    "exact_spectra": "exact spectra of attention and two-layer networks: what moves them, what is paired",
}
MORE: dict[str, str] = {}
"""Figures that the slides do not have: made only when they are asked for."""

"""'Traveling Words' (Molina 2023), on any model with a token vocabulary.

The module `figures` has all figures and is imported when one is asked for. The full text of the paper was not
at hand when this was written, only its abstract and its public reviews: claims are those that these two
state, in words, and no number of the paper is quoted. `reference/` holds numbers of our own for GPT-2.
"""

from __future__ import annotations

FIGURES = {
    "layernorm": "the sphere, the ellipsoid, its shift and its image; the real axes, and keys out of reach",
    "embeddings": "the embedding against its normalized form, and its extreme tokens by norm, γ and β",
    "probes": "nearest keys and written values of common nouns, head by head",
    "heads": "singular vectors of W_QK and W_VO as tokens, spectra and coverage",
    "trajectory": "a sentence's tokens on their way through the layers; do they come to the next token?",
}
MORE: dict[str, str] = {}

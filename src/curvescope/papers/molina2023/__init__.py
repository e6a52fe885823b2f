"""'Traveling Words' (Molina 2023), on any model with a token vocabulary.

The module `figures` has all figures and is imported on demand. The claims come from the paper's abstract and
its public reviews, because the full text was not available. They are stated in words; no number of the paper
is quoted. `reference/` holds our own numbers for GPT-2.
"""

from __future__ import annotations

FIGURES = {
    "layernorm": "the sphere, the ellipsoid and its shift; the measured axes, and keys that no query can "
    "select",
    "embeddings": "the embedding against its normalized form, and its extreme tokens by norm, γ and β",
    "probes": "nearest keys and written values of common nouns, head by head",
    "heads": "singular vectors of W_QK and W_VO as tokens, spectra and coverage",
    "trajectory": "paths of a sentence's tokens through the layers, and their distance to the next token",
}
MORE: dict[str, str] = {}

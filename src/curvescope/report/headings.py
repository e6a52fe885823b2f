"""Names of figures and tables as headings."""

from __future__ import annotations

SPELLED = {word.lower(): word for word in ("GGN", "QK", "VO", "UMAP", "PCA")}


def heading(name: str) -> str:
    """The name of a figure or table as a heading: `qk_singular_values` is "QK singular values"."""
    words = " ".join(SPELLED.get(word.lower(), word) for word in name.replace("_", " ").split())
    return words[:1].upper() + words[1:]

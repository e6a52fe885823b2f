"""Names of figures and tables as headings."""

from __future__ import annotations

import re

SPELLED = {word.lower(): word for word in ("GGN", "QK", "VO", "UMAP", "PCA")}


INDEX = re.compile(r"(?<=λ) (?=(max|min)\b)|(?<=‖) (?=F\b)")  # λ_max and ‖·‖_F are symbols
COLUMN = re.compile(r"[a-z0-9]+(_[A-Za-z0-9]+)+")  # as programs name columns; W_Q and H_o are symbols


def column(name: str) -> str:
    """The name of a column as people read it: `lambda_max_gap` is "λ_max gap"; symbols stay."""
    if name == "lambda" or COLUMN.fullmatch(name):
        name = " ".join("λ" if word == "lambda" else word for word in name.split("_"))
    return INDEX.sub("_", name)


def heading(name: str) -> str:
    """The name of a figure or table as a heading: `qk_singular_values` is "QK singular values"."""
    words = " ".join(SPELLED.get(word.lower(), word) for word in name.replace("_", " ").split())
    return words[:1].upper() + words[1:]

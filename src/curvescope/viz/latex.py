r"""Text and tables as LaTeX that compiles, whatever the tokens are.

The result is ASCII and needs `\usepackage[T1]{fontenc}`, booktabs and longtable. What a font may not have is
written as its code in typewriter letters, so that it cannot be taken for the characters of the code.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    " ": " ",
}
CODES = {"\n": "n", "\r": "r", "\t": "t"}
MATH = {  # letters that our own headers and captions use
    "‖": r"\|", "·": r"\cdot", "±": r"\pm", "−": "-", "–": "-", "√": r"\surd", "∘": r"\circ", "→": r"\to",
    "°": r"^\circ", "Δ": r"\Delta", "Σ": r"\Sigma", "γ": r"\gamma", "β": r"\beta", "λ": r"\lambda",
    "×": r"\times", "≤": r"\le", "≥": r"\ge", "…": r"\ldots", "ₖ": "_k", "₀": "_0", "²": "^2", "ᵀ": "^T",
    "⟨": r"\langle", "⟩": r"\rangle", "ε": r"\varepsilon", "′": "'", "₁": "_1", "₂": "_2",
}  # fmt: skip
LONG = 30  # rows; a longer table goes over several pages


def escape(text: str, *, spaces: bool = False) -> str:
    r"""`text` as LaTeX in ASCII; no two texts give the same.

    Args:
        spaces: show every space as \textvisiblespace, for tokens, where a space at an end would be lost.
    """
    pieces = [_letter(c, spaces=spaces) for c in text]
    joined = "".join(pieces)
    return re.sub(r"([-,])(?=\1)", r"\1{}", joined)  # -- and ,, would become other signs


def prose(text: str) -> str:
    """A caption or a header: `escape`, with our own mathematical letters as mathematics."""
    pieces = re.split(f"([{re.escape(''.join(MATH))}])", text)
    return "".join(f"${MATH[p]}$" if p in MATH else escape(p) for p in pieces)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    caption: str,
    label: str,
    tokens: Sequence[int] = (),
) -> str:
    """One table; a long one may be broken between pages.

    Args:
        label: made into letters, digits, colons and hyphens.
        tokens: columns whose spaces are shown.
    """
    count = len(header)
    numbers = [i for i in range(count) if rows and all(_is_number(row[i]) for row in rows)]
    columns = "".join("r" if i in numbers else "l" for i in range(count))
    body = [" & ".join(cell(v, spaces=i in tokens) for i, v in enumerate(row)) + r" \\" for row in rows]
    head = " & ".join(prose(name) for name in header) + r" \\"
    named = rf"\caption{{{prose(caption)}}}\label{{{slug(label)}}}"
    if len(rows) > LONG:
        lines = [
            rf"\begin{{longtable}}{{{columns}}}",
            named + r" \\",
            r"\toprule",
            head,
            r"\midrule",
            r"\endhead",
        ]
        return "\n".join([*lines, *body, r"\bottomrule", r"\end{longtable}", ""])
    lines = [
        r"\begin{table}",
        r"\centering\small",
        named,
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        head,
    ]
    return "\n".join([*lines, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def document(tables: Mapping[str, str]) -> str:
    """Tables by label as a document of its own; every label occurs once."""
    top = [
        r"\documentclass{article}",
        r"\usepackage[T1]{fontenc}",
        r"\usepackage{booktabs,longtable}",
        r"\usepackage[margin=1cm,landscape]{geometry}",
        r"\begin{document}",
        "",
    ]
    return "\n".join([*top, *tables.values(), r"\end{document}", ""])


def cell(value: object, *, spaces: bool = False) -> str:
    """A number with four digits, or text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_number(value):
        if math.isnan(value):
            return "--"
        return f"{int(value)}" if float(value).is_integer() and abs(value) < 1e15 else prose(f"{value:.4g}")
    return escape(str(value), spaces=spaces)


def slug(label: str) -> str:
    """Letters, digits, colons and hyphens."""
    return re.sub(r"[^A-Za-z0-9:]+", "-", label).strip("-") or "table"


def _letter(c: str, *, spaces: bool) -> str:
    if c == " " and spaces:
        return r"\textvisiblespace{}"
    if c in SPECIAL:
        return SPECIAL[c]
    if " " < c <= "~":
        return c
    if c in CODES:
        return rf"\texttt{{\textbackslash{{}}{CODES[c]}}}"
    code = f"x{ord(c):02x}" if ord(c) < 0x100 else f"u{ord(c):04x}" if ord(c) < 0x10000 else f"U{ord(c):08x}"
    return rf"\texttt{{\textbackslash{{}}{code}}}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)

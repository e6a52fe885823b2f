r"""Tables as text: CSV, JSON, Markdown and LaTeX, made from data frames; nothing here opens a file.

Text and tables as LaTeX that compiles, whatever the tokens are.

The result is ASCII and needs `\usepackage[T1]{fontenc}`, booktabs and longtable. Characters that a font may
lack are written as their code in typewriter type, so that they differ from plain text.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from curvescope.core.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "json", "md", "tex")


def write(
    frame: pd.DataFrame, kind: str, *, name: str = "table", caption: str = "", tokens: Sequence[str] = ()
) -> str:
    """Convert a data frame to one of the formats.

    Args:
        kind: csv, json, md or tex.
        name: Label of a LaTeX table.
        tokens: Names of columns with tokens, whose spaces are made visible in LaTeX and Markdown.
    """
    if kind not in FORMATS:
        raise UsageError(f"expected a format of {', '.join(FORMATS)}, got {kind!r}")
    if kind == "csv":
        return frame.to_csv(index=False)
    if kind == "json":
        return as_json(frame)
    if kind == "md":
        return markdown(frame, tokens=tokens)
    header, rows = [str(c) for c in frame.columns], frame.to_numpy(dtype=object).tolist()
    at = [i for i, column in enumerate(header) if column in tokens]
    return table(header, rows, caption=caption or name, label=f"tab:{name}", tokens=at)


def write_all(
    tables: Mapping[str, pd.DataFrame], captions: Mapping[str, str], *, tokens: Sequence[str] = ()
) -> dict[str, str]:
    """Convert every table to JSON and Markdown, and all to one LaTeX document: {name of the file: text}."""
    found = {}
    for name, frame in tables.items():
        for kind in ("json", "md"):
            found[f"{name}.{kind}"] = write(frame, kind, tokens=tokens)
    parts: dict[str, str] = {}
    for name, frame in tables.items():
        own = _unused(slug(name), parts)
        parts[own] = write(frame, "tex", name=own, caption=captions.get(name, name), tokens=tokens)
    return found | {"tables.tex": document(parts)}


def _unused(name: str, taken: Mapping[str, str]) -> str:
    """Return the name, with a number appended if it is taken."""
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}" if name in taken else name


def as_json(frame: pd.DataFrame) -> str:
    """Convert a data frame to a JSON list of rows; NaN becomes null."""
    rows = [
        {str(c): _plain(v) for c, v in zip(frame.columns, row, strict=True)}
        for row in frame.to_numpy(dtype=object).tolist()
    ]
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def markdown(frame: pd.DataFrame, *, tokens: Sequence[str] = ()) -> str:
    """Return a Markdown table; numbers are right-aligned, tokens are code with visible controls."""
    header = [str(c) for c in frame.columns]
    rows = frame.to_numpy(dtype=object).tolist()
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = [_line([_md(name) for name in header]), _line(["---:" if r else "---" for r in right])]
    for row in rows:
        cells = [_md_cell(v, header[i] in tokens) for i, v in enumerate(row)]
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def visible(token: str) -> str:
    """Return a token on one line: control characters as escapes, spaces unchanged."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in token)


def label(text: str, raw: str) -> str:
    """Return the label of a token: its text, or its bytes if they are not UTF-8."""
    return raw if "\ufffd" in text and raw else text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _md_cell(value: object, token: bool) -> str:
    if _is_number(value):
        number = float(value)
        if math.isnan(number):
            return "–"
        return f"{int(number)}" if number.is_integer() and abs(number) < 1e15 else f"{number:.4g}"
    text = visible(str(value))
    if not token:
        return _md(text)
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") or not text.strip() else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", r"\|")


def _md(text: str) -> str:
    for c in r"\`*_{}[]<>#|":
        text = text.replace(c, "\\" + c)
    return text


def _plain(value: object) -> bool | int | float | str | None:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if _is_number(value):
        return float(value) if math.isfinite(value) else None
    return str(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


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
MATH = {  # symbols in our headers and captions
    "‖": r"\|", "·": r"\cdot", "±": r"\pm", "−": "-", "–": "-", "√": r"\surd", "∘": r"\circ", "→": r"\to",
    "°": r"^\circ", "Δ": r"\Delta", "Σ": r"\Sigma", "γ": r"\gamma", "β": r"\beta", "λ": r"\lambda",
    "×": r"\times", "≤": r"\le", "≥": r"\ge", "…": r"\ldots", "ₖ": "_k", "₀": "_0", "²": "^2", "ᵀ": "^T",
    "⟨": r"\langle", "⟩": r"\rangle", "ε": r"\varepsilon", "′": "'", "₁": "_1", "₂": "_2",
}  # fmt: skip
LONG = 30  # rows; a longer table may break across pages


def escape(text: str, *, spaces: bool = False) -> str:
    r"""Convert `text` to LaTeX in ASCII; different texts give different results.

    Args:
        spaces: Show every space as \textvisiblespace, for tokens, because leading and trailing spaces would
            be lost.
    """
    pieces = [_letter(c, spaces=spaces) for c in text]
    joined = "".join(pieces)
    return re.sub(r"([-,])(?=\1)", r"\1{}", joined)  # -- and ,, are ligatures


def prose(text: str) -> str:
    """Escape a caption or a header, with our mathematical symbols as mathematics."""
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
    """Return one LaTeX table; a long one may break across pages.

    Args:
        label: Reduced to letters, digits, colons and hyphens.
        tokens: Columns whose spaces are made visible.
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
    """Return tables by label as a standalone document; every label must be unique."""
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
    """Format a number with four digits, or text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_number(value):
        if math.isnan(value):
            return "--"
        return f"{int(value)}" if float(value).is_integer() and abs(value) < 1e15 else prose(f"{value:.4g}")
    return escape(str(value), spaces=spaces)


def slug(label: str) -> str:
    """Reduce a label to letters, digits, colons and hyphens."""
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

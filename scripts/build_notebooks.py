"""Notebooks from the scripts in notebooks/: executed, with their outputs, in the format of Jupyter (4.5).

    python scripts/build_notebooks.py                    # all of them, into notebooks/*.ipynb
    python scripts/build_notebooks.py tour --out folder

A script is in percent format: `# %%` begins a cell of code, `# %% [markdown]` one of text. A cell is run as
Jupyter runs it: what it prints is kept, and what its last line is worth is shown.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parents[1] / "notebooks"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


class Cell(NamedTuple):
    """A cell of a script, without its marker."""

    kind: str  # code or markdown
    source: str


def read_cells(text: str) -> list[Cell]:
    """The cells of a script in percent format."""
    head, *parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    assert not head.strip(), "a script begins with a cell"
    cells = []
    for mark, body in zip(parts[::2], parts[1::2], strict=True):
        if mark.strip() == "[markdown]":
            cells.append(Cell("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        else:
            assert not mark.strip(), f"a cell is code or [markdown], not {mark.strip()}"
            cells.append(Cell("code", body.strip()))
    return cells


def run_cell(source: str, names: dict[str, Any], where: str = "<cell>") -> tuple[str, Any]:
    """What a cell prints, and what its last line is worth (None unless it is an expression)."""
    tree, value, printed = ast.parse(source), None, io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(printed):
        exec(compile(tree, where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
    return printed.getvalue(), value


def outputs(printed: str, value: Any, count: int) -> list[dict[str, Any]]:
    """A cell's outputs as Jupyter stores them."""
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"output_type": "stream", "name": "stdout", "text": printed})
    if value is not None:
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        shown = {"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": count}
        found.append(shown)
    return found


def build(script: Path) -> dict[str, Any]:
    """The executed notebook of a script."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for i, cell in enumerate(read_cells(script.read_text(encoding="utf-8"))):
        entry = {"cell_type": cell.kind, "id": f"cell-{i}", "metadata": {}, "source": cell.source}
        if cell.kind == "code":
            count += 1
            printed, value = run_cell(cell.source, names, f"{script.name}, cell {i}")
            entry |= {"execution_count": count, "outputs": outputs(printed, value, count)}
        cells.append(entry)
    about = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="scripts in notebooks/, without .py; all by default")
    parser.add_argument("--out", type=Path, default=HERE, help="where to write the .ipynb files")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.names or sorted(path.stem for path in HERE.glob("*.py")):
        target = asked.out / f"{name}.ipynb"
        text = json.dumps(build(HERE / f"{name}.py"), indent=1, ensure_ascii=False)
        target.write_text(text + "\n", encoding="utf-8")
        print(target)


if __name__ == "__main__":
    main()

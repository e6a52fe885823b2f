"""The figures and tables of a result as files; two of them with one name are refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from curvescope.core.errors import CurvescopeError
from curvescope.runs.shown import Shown


def write_figures(result: Shown, folder: Path) -> None:
    """Every figure as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = result.figures()
    check_distinct(figures)
    with plt.rc_context({"svg.hashsalt": "curvescope", "svg.fonttype": "path"}):
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=150)
            plt.close(figure)


def write_tables(result: Shown, folder: Path) -> None:
    """Every table as CSV, and the result's other texts."""
    folder.mkdir(parents=True, exist_ok=True)
    tables, texts = result.tables(), result.files()
    check_distinct([*(f"{name}.csv" for name in tables), *texts])
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def check_distinct(names: Iterable[str]) -> None:
    """Raise where one of the files would overwrite another, also where capitals are not told apart."""
    seen: dict[str, str] = {}
    for name in names:
        if name.casefold() in seen:
            raise CurvescopeError(f"two outputs have one name: {seen[name.casefold()]!r} and {name!r}")
        seen[name.casefold()] = name

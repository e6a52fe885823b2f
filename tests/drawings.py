"""Figures saved in less time: laying them out and rendering them twice is most of a run folder's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>\n'
REAL = Figure.savefig


@contextmanager
def unrendered() -> Iterator[None]:
    """While this is open, figures are made, not laid out, and saved as empty drawings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", _save_nothing)
        patch.setattr(Figure, "draw_without_rendering", lambda figure: None)
        yield


@contextmanager
def sketched() -> Iterator[None]:
    """While this is open, SVG files are drawn without laying the figure out, and all others are empty."""

    def savefig(figure: Figure, path: Path, **options: Any) -> None:
        if Path(path).suffix == ".svg":
            figure.set_layout_engine("none")
            REAL(figure, path, **options)
        else:
            _save_nothing(figure, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield


def _save_nothing(figure: Figure, path: Path, **options: Any) -> None:
    Path(path).write_text(EMPTY, encoding="utf-8")

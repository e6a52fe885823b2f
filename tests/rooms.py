"""The rooms of the package, as the import contract in pyproject.toml has them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "curvescope"


def contract() -> list[list[str]]:
    """The layers of import-linter, the highest first, each a list of rooms."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        (rooms,) = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return [re.findall(r"\w+", layer) for layer in rooms["layers"]]


def opened() -> set[str]:
    """Those that have files."""
    found = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    return found - {"__init__", "__main__"}

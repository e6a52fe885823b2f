"""The packages inside curvescope, as the import contract in pyproject.toml has them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "curvescope"


def layers() -> list[list[str]]:
    """The layers of import-linter, the highest first, each a list of packages."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        (contract,) = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return [re.findall(r"\w+", layer) for layer in contract["layers"]]


def existing_packages() -> set[str]:
    """Return the packages that have files."""
    names = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    return names - {"__init__", "__main__"}

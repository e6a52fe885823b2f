"""docs/guides/factors.md: its code runs, and its tables are those of the stored run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from curvescope.studies.factors import Config, view
from curvescope.studies.factors.analysis import APPROXIMATIONS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guides" / "factors.md").read_text(encoding="utf-8")
STORED = json.loads((ROOT / "benchmarks/results/factors/default.json").read_text(encoding="utf-8"))


def test_the_example_runs():
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/guides/factors.md", "exec"), space)
    errors, angles = (dict(space["found"][kind]) for kind in ("error", "angle"))
    assert errors["block-diagonal"] < errors["ekfac"] < errors["kfac"]
    assert all(0 < angle < 90 for angle in angles.values())


def test_its_tables_are_those_of_the_stored_run():
    """`benchmarks/results/factors/default.json` has tables of one run with the default settings."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (holds|fails|not decided) \|$", PAGE, flags=re.M)
    assert rows == [(claim["claim"], claim["measured"], claim["verdict"]) for claim in STORED["claims"]]
    for row in STORED["optimizers"]:
        cells = [row["approximation"], f"{row['frobenius']:.2f}", f"{row['angle']:.0f}°"]
        cells += [f"{row['divergence']:.2f}", f"{row['lost']:.2f}", f"{row['angle_hessian']:.0f}°"]
        cells += [f"{row['lr']:.2g}", f"{row['damping']:g}"]
        cells += [f"{row['loss']:.2g} [{row['low']:.2g}, {row['high']:.2g}]"]
        assert f"| {' | '.join(cells)} |" in PAGE
    for row in STORED["correlations"]:
        assert f"{row['rho']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}]" in PAGE
    assert STORED["settings"] == Config().to_dict()


def test_every_approximation_is_explained():
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE, flags=re.M) == list(APPROXIMATIONS)


def test_the_tables_it_names_have_captions_and_its_figures_are_there():
    source = Path(view.__file__).read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)\.csv`", PAGE):
        assert f'"{name}": ' in source, name
    shown = re.findall(r"\]\(\.\./(images/[\w-]+\.png)\)", PAGE)
    assert len(shown) == 3
    assert all((ROOT / "docs" / name).exists() for name in shown)

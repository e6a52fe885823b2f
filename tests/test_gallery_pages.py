"""docs/gallery: every table is that of its JSON file, written as the script writes it; figures are there."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
GALLERY = ROOT / "docs" / "gallery"
MADE = sorted(path.stem for path in GALLERY.glob("*.json"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    import make_gallery

    sys.path.pop(0)
    return make_gallery


@pytest.mark.parametrize("name", MADE)
def test_a_page_has_the_numbers_of_its_file(name, script):
    found = json.loads((GALLERY / f"{name}.json").read_text(encoding="utf-8"))
    page = (GALLERY / f"{name}.md").read_text(encoding="utf-8")
    assert found["name"] == name
    assert found["converged"]
    assert script.marked(found) in page
    assert (ROOT / "docs" / "images" / f"gallery-{name}.png").stat().st_size < 100_000


def test_every_model_of_the_script_has_a_page(script):
    assert set(MADE) == set(script.MODELS)
    listed = re.findall(r"\]\(([\w-]+)\.md\)", (GALLERY / "index.md").read_text(encoding="utf-8"))
    assert set(listed) == {*MADE, "smollm2"}


def test_numbers_are_rounded_to_their_errors(script):
    assert script.rounded(21186.4, 1599.2) == "21,200"
    assert script.rounded(0.98123, 0.0372) == "0.981"
    assert script.rounded(1940.27742, 0.0173) == "1,940.3"
    assert script.rounded(558144, None) == "558,144"


def test_the_page_of_smollm2_is_what_was_stored():
    page = (GALLERY / "smollm2.md").read_text(encoding="utf-8")
    stored = ROOT / "benchmarks" / "results"
    with (stored / "sinks-smollm2" / "heads.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    mass = [float(row["sink_mass"]) for row in rows]
    without = {int(row["layer"]) for row in rows} - {
        int(row["layer"]) for row in rows if float(row["sink_mass"]) > 0.5
    }
    assert without == {0, 1, 2, 10, 11}
    assert "in none of layers 0 to 2, 10 and 11" in page
    assert f"{sum(m > 0.5 for m in mass)} of {len(mass)}" in page
    with (stored / "sinks-smollm2" / "sinks.csv").open(encoding="utf-8") as file:
        plain = next(row for row in csv.DictReader(file) if float(row["strength"]) == 0)
    for column, said in {
        "loss": 2.93,
        "lambda_max": 340.6,
        "lambda_min": -129,
        "ggn_lambda_max": 335,
    }.items():
        assert f"| {said} |".replace("-", "−") in page
        assert float(plain[column]) == pytest.approx(said, rel=0.005)
    result = json.loads((stored / "smollm2" / "result.json").read_text(encoding="utf-8"))
    eigen = next(row for row in result["rows"] if row["algorithm"].startswith("eigsh"))
    assert f"{eigen['value']:.1f}" in page
    assert eigen["converged"]
    assert f"{result['machine']['parameters']:,}" in page

"""docs/guides/why_adam.md: its code runs and prints what it says, its tables are those of the stored run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import guides
from curvescope.studies.why_adam import view
from curvescope.studies.why_adam.analysis import CHOICES
from curvescope.studies.why_adam.study import PROFILES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guides" / "why_adam.md").read_text(encoding="utf-8")
STORED = json.loads(
    (ROOT / "benchmarks" / "results" / "why_adam" / "default.json").read_text(encoding="utf-8")
)


def test_the_example_prints_what_the_page_says():
    space = guides.run("guides/why_adam.md")
    assert space["same"]
    single, merged = (space["found"][f"softmax-{kind}-bare"] for kind in ("single", "merged"))
    assert merged[0] < single[0]


def test_its_claims_are_those_of_the_stored_run():
    rows = re.findall(r"^\| (\S.*?) \| (.+?) \| (holds|fails|not decided) \|$", PAGE, flags=re.M)
    assert rows == [(c["claim"], c["measured"], c["verdict"]) for c in STORED["claims"]]


def test_its_gaps_are_those_of_the_stored_run():
    assert [row["configuration"] for row in STORED["gaps"]] == list(CHOICES)
    for row in STORED["gaps"]:
        losses = " | ".join(f"{row[f'lr_{o}']:g} | {row[f'loss_{o}']:.3f}" for o in ("adam", "sgd"))
        gap = f"{row['gap']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
        assert f"| {row['configuration']} | {row['parameters']} | {losses} | {gap} |" in PAGE


def test_its_sentences_are_true_of_the_stored_run():
    gaps = STORED["gaps"]
    ratios = [10 ** row["gap"] for row in gaps]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times the loss" in PAGE.replace("\n  ", " ")
    assert min(ratios) > 1
    assert sum(row["low"] > 0 for row in gaps) == 11
    largest = sorted(gaps, key=lambda row: -row["gap"])[:2]
    assert {row["configuration"] for row in largest} == {"softmax-single-bare", "softmax-merged-bare"}
    assert {row["above_zero"] for row in STORED["correlations"]} == {"not decided"}
    assert len(STORED["correlations"]) == 21
    assert not STORED["notes"]  # no best rate at an end, no chosen run that diverged
    merging = next(row for row in STORED["changes"] if (row["to"], row["of"]) == ("merged", "sizes"))
    change = f"{merging['change']:.3f} [{merging['low']:.3f}, {merging['high']:.3f}]"
    assert change.replace("-", "−") in PAGE
    bare = [row for row in STORED["changes"] if row["to"] == "bare" and row["scope"] == "of these networks"]
    assert all(row["low"] > 0 for row in bare)


def test_it_says_what_the_scales_are():
    quick, full = PROFILES["quick"], PROFILES["full"]
    assert (STORED["seeds"], STORED["steps"]) == (quick.seeds, quick.steps) == (5, 400)
    assert f"{quick.steps} steps of {quick.batch_size} sums" in PAGE
    assert f"{full.steps:,} steps of {full.batch_size} sums" in PAGE
    assert (full.size.layers, full.size.digits, full.seeds) == (2, 3, 8)


def test_the_tables_and_figures_it_names_are_there():
    source = Path(view.__file__).read_text(encoding="utf-8")
    for name in set(re.findall(r"`(\w+)\.csv`", PAGE)) - {"claims"}:
        assert f'"{name}": ' in source, name
    shown = re.findall(r"\]\(\.\./(images/[\w-]+\.png)\)", PAGE)
    assert len(shown) == 3
    assert all((ROOT / "docs" / name).exists() for name in shown)

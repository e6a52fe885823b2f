"""docs/singh2025.md: its table of claims is computed from stored results, its commands and tables exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import singh_results
from curvescope.papers import all_claims, figures_of
from curvescope.runs.study_result import Shown
from curvescope.studies import STUDIES
from curvescope.studies.exact_spectra import view

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "singh2025.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results() -> dict[str, Shown]:
    return singh_results.load()


def test_the_table_of_claims_is_what_the_stored_results_give(results: dict[str, Shown]):
    """Claims, numbers and verdicts are computed here; `singh_results.py` writes page and results."""
    assert singh_results.TABLE.findall(PAGE) == [singh_results.markdown(results)]
    claims = all_claims.table(results)
    assert singh_results.TALLY.findall(PAGE) == [f"{all_claims.tally(claims)}."]
    assert set(claims["figure"]) == set(figures_of("singh2025"))
    assert set(claims["whose"]) == {"paper", "ours"}
    assert not claims.duplicated(["figure", "claim"]).any()


def test_a_claim_of_ours_is_not_said_to_be_the_paper_s(results: dict[str, Shown]):
    for result in results.values():
        for claim in result.claims():
            assert (claim.whose == "paper") == claim.source.startswith("slides"), claim


def test_its_commands_tables_and_settings_exist():
    source = Path(view.__file__).read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)\.csv`", PAGE):
        assert f'"{name}": ' in source, name
    assert set(re.findall(r"curvescope run (\w+)", PAGE)) <= set(STUDIES)
    assert set(re.findall(r"--figure (\w+)", PAGE)) <= set(figures_of("singh2025"))
    assert "singh2025.md\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

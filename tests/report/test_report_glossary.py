"""The glossary: the page on words has all of them, and a section explains those that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from curvescope.report.glossary import TERMS, used_in

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"


def test_the_page_on_words_has_every_term():
    page = PAGE.read_text(encoding="utf-8")
    rows = [f"| {term.name} | {term.meaning.replace('|', '&#124;')} |" for term in TERMS]
    assert page.rstrip().splitlines()[-len(rows) :] == rows


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("99 % QK", ["QK, VO", "99 % QK, 99 % VO"]),
        ("H_o and H_f", ["GGN, H_o", "functional Hessian, H_f"]),
        ("from 4 probes", ["probe"]),
        ("|k₀|", ["k₀"]),
        ("L0.mid", ["L3.mid, L3.out"]),
        ("turn (°)", ["step, turn"]),
        ("in return", []),
        ("times the width of the bulk", ["bulk, outliers"]),
        ("bulk |b| and the three outliers", ["bulk, outliers, of scalar attention"]),
        ("sharpest over median, Hessian", ["H", "sharpest over median"]),
        ("effective rank QK", ["QK, VO", "effective rank, of a head"]),
        ("effective_rank", ["effective rank, of the GGN"]),
        ("Something SHOVED along", []),
    ],
)
def test_a_text_uses_the_terms_that_stand_in_it_as_words(text, names):
    assert [term.name for term in used_in([text])] == names

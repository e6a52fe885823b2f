"""One table of all claims of a paper: rows, whose words, Markdown."""

from __future__ import annotations

import re

from curvescope.papers import all_claims
from curvescope.papers.common import Claim
from curvescope.runs.study_result import Shown


class Made(Shown):
    """Claims and nothing else."""

    def __init__(self, *claims: Claim):
        object.__setattr__(self, "_claims", claims)

    def claims(self) -> list[Claim]:
        return list(self._claims)

    def summary(self):
        return []

    def captions(self):
        return {}

    def tables(self):
        return {}

    def figures(self):
        return {}


def test_one_row_per_claim():
    first = Made(Claim("|x| ≤ 1", "1", "2", "fails", "Theorem 1"), Claim("y", "0", "0", "holds", "a", "ours"))
    second = Made(Claim("z", "3", "3", "holds", "article", "article"))
    found = all_claims.table({"one": first, "two": second})
    assert list(found["figure"]) == ["one", "one", "two"]
    assert list(found["whose"]) == ["paper", "ours", "article"]
    assert list(found["published in"]) == ["Theorem 1", "a", "article"]
    assert all_claims.tally(found) == "3 claims: 2 holds; 1 fails"
    lines = all_claims.markdown(found).splitlines()
    assert len(lines) == 5
    assert lines[2] == "| one | \\|x\\| ≤ 1 | paper | 1 | 2 | fails | Theorem 1 |"
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {8}
    assert all_claims.tally(all_claims.table({"one": Made()})) == "0 claims"

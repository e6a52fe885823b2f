"""How bad or good something is: a word, a symbol and a color, so that none of them is needed alone."""

from __future__ import annotations

import re
from typing import NamedTuple


class Level(NamedTuple):
    """A level: its name among the page's colors, its symbol, its word."""

    key: str
    symbol: str
    word: str


SEVERITIES = {
    "fault": Level("bad", "✖", "fault"),
    "warning": Level("part", "▲", "warning"),
    "note": Level("open", "●", "note"),
    "fine": Level("good", "✔", "fine"),
}
GOOD = Level("good", "✔", "holds or agrees")
PART = Level("part", "◐", "in part, or corrected")
BAD = Level("bad", "✖", "fails or differs")
OPEN = Level("open", "○", "open")
VERDICTS = (BAD, PART, GOOD, OPEN)
"""The levels of verdicts, in the order of a tally."""
FOR = re.compile(r"^(holds|agrees|not violated)|, holds\b")
AGAINST = re.compile(r"\b(fails|differs)\b|^violated")
PARTLY = re.compile(r"^(in part|repaired|holds with|holds as)")


def severity(word: str) -> Level:
    """The level of a finding; what was not looked at is open."""
    return SEVERITIES.get(word, Level("open", "○", word))


def verdict(words: str) -> Level:
    """The level of a verdict on a claim, by the words it is given in."""
    good, bad = FOR.search(words), AGAINST.search(words)
    if PARTLY.search(words) or (good and bad):
        return PART
    return GOOD if good else BAD if bad else OPEN

"""What a page is made of, as its template reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from curvescope.report.pieces.levels import Level
from curvescope.report.pieces.stills import Still
from curvescope.runs.shown import Line

FIRST = re.compile(r".+?[.](?=\s|$)", re.DOTALL)
Rows = Sequence[tuple[str, str]]
"""Labels with words behind them."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is read, and what it is sorted by, in full precision."""

    text: str
    sort: str
    number: bool = False
    level: Level | None = None  # of a verdict


@dataclass(frozen=True)
class Table:
    """A table that can be sorted, and the CSV file that has all of it (relative to the page, or "")."""

    anchor: str
    heading: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    csv: str = ""

    @property
    def numbers(self) -> list[bool]:
        """Of every column, whether it holds numbers."""
        return [any(row[i].number for row in self.rows) for i in range(len(self.header))]


@dataclass(frozen=True)
class Control:
    """A switch of a scene."""

    name: str
    choices: Sequence[str]


@dataclass(frozen=True)
class Methods:
    """How a figure was made, and the command that makes it again ("" where there is none)."""

    rows: Rows
    command: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure: a still that prints, a scene for a browser as JSON, or both."""

    anchor: str
    heading: str
    caption: str
    methods: Methods
    still: Still | None = None
    scene: str = ""
    scene_caption: str = ""  # where the scene looks other than the still
    controls: Sequence[Control] = ()

    @property
    def alternative(self) -> str:
        """What the figure is, for those who do not see it: its name and the first sentence of its caption."""
        first = FIRST.match(self.caption.replace("`", ""))
        return f"{self.heading}: {first[0]}" if first else self.heading


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis."""

    heading: str
    level: Level
    number: str
    unit: str
    where: str
    meaning: str
    advice: str
    evidence: str
    links: Sequence[tuple[str, str]]  # anchors with their names


@dataclass(frozen=True)
class Tally:
    """How many claims have a verdict of a level."""

    level: Level
    count: int


@dataclass(frozen=True)
class Entry:
    """What one run says in one section."""

    anchor: str
    title: str
    words: str = ""
    opening: str = ""
    sample: str = ""  # what it was measured on
    findings: Sequence[Finding] = ()
    cards: Sequence[Line] = ()
    notes: Sequence[str] = ()
    tallies: Sequence[Tally] = ()
    claims: Table | None = None
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    source: str = ""  # the run, as study/folder
    home: tuple[str, str] | None = None  # where the rest of the run is: anchor and name


@dataclass(frozen=True)
class Card:
    """What a model is made of."""

    name: str
    facts: Rows
    notes: Sequence[str] = ()
    roles: Table | None = None
    blocks: Table | None = None


@dataclass(frozen=True)
class Section:
    """A section of the page, with something in it."""

    anchor: str
    title: str
    short: str  # in the navigation
    entries: Sequence[Entry] = ()
    cards: Sequence[Card] = ()

"""Elements of a page, as its template reads them.

Pictures inside a page: data: addresses for an attribute in double quotes, short without a visible loss.

They have no double quote in them, so that nothing in a picture can end the attribute.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from curvescope.runs.study_result import Line

# Characters of a page, and of a still that is not too large by any count.
ALL_STILLS, FEWEST = (4_000_000, 30_000)
LARGEST = 150_000
CSS, DOTS = 96, 150  # pixels of an inch: a browser's, and those of our PNG files
WIDTH = re.compile(r'<svg[^>]* width="([\d.]+)pt"')
IGNORED = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
PATH = re.compile(r' d="[^"]*"')
DIGITS = re.compile(r"-?\d+\.\d{3,}")  # matplotlib writes six digits behind the point, of 1/72 inch


def largest(count: int) -> int:
    """Most characters of a drawing on a page with so many drawings, before it becomes pixels."""
    return min(max(ALL_STILLS // max(count, 1), FEWEST), LARGEST)


class Still(NamedTuple):
    """A picture: its address, and its width in a browser's pixels (0 if unknown)."""

    address: str
    width: int


def still(path: Path, most: int = LARGEST) -> Still:
    """A picture: an SVG, or the PNG beside it where the SVG is too large and that is less."""
    if path.suffix != ".svg":
        return _pixels(path)
    found = _drawing(path.read_text(encoding="utf-8"))
    beside = path.with_suffix(".png")
    if len(found.address) > most and beside.is_file():
        pixels = _pixels(beside)
        return pixels if len(pixels.address) < len(found.address) else found
    return found


def _pixels(path: Path) -> Still:
    """A PNG, as WebP without loss where this machine can write it: a third of the size."""
    from PIL import Image, UnidentifiedImageError, features

    file, kind = BytesIO(), "webp" if features.check("webp") else "png"
    try:
        with Image.open(path) as picture:
            picture.save(file, kind, lossless=True, quality=50)
            width = round(picture.width * CSS / DOTS)
    except UnidentifiedImageError:
        return Still(_encoded("image/png", path.read_bytes()), 0)
    return Still(_encoded(f"image/{kind}", file.getvalue()), width)


def _drawing(svg: str) -> Still:
    """An SVG as text, without comments, its coordinates to a hundredth of a point."""
    text = PATH.sub(lambda found: DIGITS.sub(_short, found[0]), IGNORED.sub("", svg))
    text = " ".join(text.split())
    points = WIDTH.search(text)
    width = round(float(points[1]) * CSS / 72) if points else 0
    if "'" in text:
        return Still(_encoded("image/svg+xml", text.encode()), width)
    for sign, written in (("%", "%25"), ("#", "%23"), ("&", "&amp;"), ('"', "'")):
        text = text.replace(sign, written)
    return Still(f"data:image/svg+xml;charset=utf-8,{text}", width)


def _short(number: re.Match[str]) -> str:
    """`12.345678` as `12.35`, `3.000000` as `3`."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _encoded(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


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
        """Return True for each column of numbers."""
        return [any(row[i].number for row in self.rows) for i in range(len(self.header))]


@dataclass(frozen=True)
class Control:
    """A switch of a scene."""

    name: str
    choices: Sequence[str]


@dataclass(frozen=True)
class Methods:
    """Description of how a figure was made, and the command that makes it again ("" without one)."""

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
        """Alternative text of the figure: its name and the first sentence of its caption."""
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
    """Number of claims whose verdict has a level."""

    level: Level
    count: int


@dataclass(frozen=True)
class Entry:
    """Entry of one run in one section."""

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
    """Description of a model."""

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


SPELLED = {word.lower(): word for word in ("GGN", "QK", "VO", "UMAP", "PCA")}


INDEX = re.compile(r"(?<=λ) (?=(max|min)\b)|(?<=‖) (?=F\b)")  # λ_max and ‖·‖_F are symbols
COLUMN = re.compile(r"[a-z0-9]+(_[A-Za-z0-9]+)+")  # as programs name columns; W_Q and H_o are symbols


def column(name: str) -> str:
    """The name of a column as people read it: `lambda_max_gap` is "λ_max gap"; symbols stay."""
    if name == "lambda" or COLUMN.fullmatch(name):
        name = " ".join("λ" if word == "lambda" else word for word in name.split("_"))
    return INDEX.sub("_", name)


def heading(name: str) -> str:
    """The name of a figure or table as a heading: `qk_singular_values` is "QK singular values"."""
    words = " ".join(SPELLED.get(word.lower(), word) for word in name.replace("_", " ").split())
    return words[:1].upper() + words[1:]


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
PARTLY = re.compile(r"^(in part|in some|repaired|holds with|holds as)")


def severity(word: str) -> Level:
    """The level of a finding; what was not looked at is open."""
    return SEVERITIES.get(word, Level("open", "○", word))


def verdict(words: str) -> Level:
    """The level of a verdict on a claim, by the words it is given in."""
    good, bad = FOR.search(words), AGAINST.search(words)
    if PARTLY.search(words) or (good and bad):
        return PART
    return GOOD if good else BAD if bad else OPEN

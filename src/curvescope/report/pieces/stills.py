"""Pictures inside a page: data: addresses for an attribute in double quotes, short without a visible loss.

They have no double quote in them, so that nothing in a picture can end the attribute.
"""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ALL_STILLS, FEWEST = (
    4_000_000,
    30_000,
)  # characters of a page, and of a still that is not too large by any count
LARGEST = 150_000
CSS, DOTS = 96, 150  # pixels of an inch: a browser's, and those of our PNG files
WIDTH = re.compile(r'<svg[^>]* width="([\d.]+)pt"')
IGNORED = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
PATH = re.compile(r' d="[^"]*"')
LONG = re.compile(r"-?\d+\.\d{3,}")  # matplotlib writes six digits behind the point, of 1/72 inch


def largest(count: int) -> int:
    """How many characters a drawing may take where a page has so many, before pixels take its place."""
    return min(max(ALL_STILLS // max(count, 1), FEWEST), LARGEST)


class Still(NamedTuple):
    """A picture: its address, and its width in a browser's pixels (0 where that is not known)."""

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
    text = PATH.sub(lambda found: LONG.sub(_short, found[0]), IGNORED.sub("", svg))
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

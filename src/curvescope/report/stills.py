"""Pictures inside a page: data: addresses for an attribute in double quotes, short without a visible loss.

They have no double quote in them, so that nothing in a picture can end the attribute.
"""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

ALL_STILLS, FEWEST = (
    4_000_000,
    30_000,
)  # characters of a page, and of a still that is not too large by any count
LARGEST = 150_000
IGNORED = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", re.DOTALL)
PATH = re.compile(r' d="[^"]*"')
LONG = re.compile(r"-?\d+\.\d{3,}")  # matplotlib writes six digits behind the point, of 1/72 inch


def largest(count: int) -> int:
    """How many characters a drawing may take where a page has so many, before pixels take its place."""
    return min(max(ALL_STILLS // max(count, 1), FEWEST), LARGEST)


def still(path: Path, most: int = LARGEST) -> str:
    """The address of a picture: an SVG, or the PNG beside it where the SVG is too large and that is less."""
    if path.suffix != ".svg":
        return _pixels(path)
    found = _drawing(path.read_text(encoding="utf-8"))
    beside = path.with_suffix(".png")
    if len(found) > most and beside.is_file():
        return min(found, _pixels(beside), key=len)
    return found


def _pixels(path: Path) -> str:
    """A PNG, as WebP without loss where this machine can write it: a third of the size."""
    from PIL import Image, features

    if not features.check("webp"):
        return _encoded("image/png", path.read_bytes())
    file = BytesIO()
    with Image.open(path) as picture:
        picture.save(file, "WEBP", lossless=True, quality=50)
    return _encoded("image/webp", file.getvalue())


def _drawing(svg: str) -> str:
    """An SVG as text, without comments, its coordinates to a hundredth of a point."""
    text = PATH.sub(lambda found: LONG.sub(_short, found[0]), IGNORED.sub("", svg))
    text = " ".join(text.split())
    if "'" in text:
        return _encoded("image/svg+xml", text.encode())
    for sign, written in (("%", "%25"), ("#", "%23"), ("&", "&amp;"), ('"', "'")):
        text = text.replace(sign, written)
    return f"data:image/svg+xml;charset=utf-8,{text}"


def _short(number: re.Match[str]) -> str:
    """`12.345678` as `12.35`, `3.000000` as `3`."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _encoded(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"

"""Numbers as text."""

from __future__ import annotations

import math


def with_error(value: float, stderr: float) -> str:
    """`21800 ± 1000`: the error with two digits, the value to the same place; alone if it has no error.

    A value whose error would only show behind its sixth digit stands alone too, with six digits.
    """
    if not math.isfinite(stderr) or stderr <= 0 or not math.isfinite(value):
        return f"{value:.4g}"
    if stderr < 5e-6 * abs(value):
        return f"{value:,.6g}"
    place = math.floor(math.log10(stderr)) - 1
    if -6 < place < 6 and abs(value) < 1e7:
        return f"{round(value, -place):,.{max(-place, 0)}f} ± {round(stderr, -place):,.{max(-place, 0)}f}"
    exponent = math.floor(math.log10(max(abs(value), stderr)))
    digits = max(exponent - place, 0)
    scale = 10.0**exponent
    return f"({value / scale:.{digits}f} ± {stderr / scale:.{digits}f})e{exponent:+d}"


def rounded(value: float, digits: int = 4) -> str:
    """`6,753`, `0.01235`, `1.235e+08`: a number to so many digits, with commas."""
    if not math.isfinite(value) or value == 0 or not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits}g}"
    place = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, place):,.{max(place, 0)}f}"


def below_noise(value: float, high: float) -> float | str:
    """What cannot be negative and was found to be zero: `< 3.2` with the upper end of its interval."""
    return f"< {high:.2g}" if value == 0 and high > 0 else value


def plural(count: int, noun: str) -> str:
    """`1 probe`, `16 probes`, `1,024 blocks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """`40 s`, `3 min`, `2.5 h`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def data_size(count: int) -> str:
    """Bytes as `12 kB`, `3.4 MB`, `120 MB`, `1.2 GB`, in steps of 1024."""
    if count < 2**20:
        return f"{count / 2**10:.0f} kB"
    if count < 2**30:
        return f"{count / 2**20:.{0 if count >= 100 * 2**20 else 1}f} MB"
    return f"{count / 2**30:.1f} GB"

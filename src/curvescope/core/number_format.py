"""Numbers as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

MAX_DIGITS = 6  # of a value with an error
DAY, YEAR = 86400.0, 365.25 * 86400.0  # seconds
MIN_PLAIN, MAX_PLAIN = 1e-4, 1e7  # absolute values that are written without an exponent


LIES_BETWEEN = "x to y: it lies between them, with 95 % certainty"
"""Explanation of `between` for a lower and an upper bound."""


def with_error(value: float, stderr: float) -> str:
    """Format a value with its error: `21,800 ± 1,000`.

    The error has two digits and the value ends at the same decimal place. A value has at most six digits: its
    error may then have one digit (`0.314860 ± 0.000005`), and an error too small for six digits is omitted.
    An error of zero is omitted, too. If the error is infinite, the value has two digits: `1.2 ± ∞`.
    """
    if math.isnan(stderr) or stderr <= 0 or not math.isfinite(value):
        return _alone(value, 4)
    if stderr == math.inf:
        return f"{rounded(value, 2)} ± ∞"
    size = max(abs(value), stderr)
    exponent = _exponent(size)
    last = exponent - MAX_DIGITS + 1
    if stderr <= 0.5 * 10.0**last:
        return _alone(value, MAX_DIGITS)
    place = max(_exponent(float(f"{stderr:.1e}")) - 1, last)
    if MIN_PLAIN <= size < MAX_PLAIN:
        shown = round(value, -place) + 0.0, round(stderr, -place)  # + 0.0: without the sign of zero
        return " ± ".join(f"{x:,.{max(-place, 0)}f}" for x in shown)
    digits = max(exponent - place, 0)
    shown = (float(Decimal(x).scaleb(-exponent)) for x in (value, stderr))  # 10.0**exponent may overflow
    value, stderr = (round(x, digits) + 0.0 for x in shown)
    return f"({value:.{digits}f} ± {stderr:.{digits}f})e{exponent:+d}"


def _exponent(size: float) -> int:
    return math.floor(math.log10(size))


def _alone(value: float, digits: int) -> str:
    """Format like `rounded`, without trailing zeros, because a number without an error may be exact."""
    text = rounded(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def rounded(value: float, digits: int = 4) -> str:
    """Format a number with a number of significant digits and commas: `6,753`, `0.01235`, `1.235e+08`."""
    if not math.isfinite(value) or value == 0 or not MIN_PLAIN <= abs(value) < MAX_PLAIN:
        return f"{value + 0.0:.{digits}g}"
    place = digits - 1 - _exponent(abs(value))
    return f"{round(value, place):,.{max(place, 0)}f}"


def to_error(value: float, error: float) -> str:
    """Format a value without its error, to the error's second digit: `21,800`.

    It has at most four digits, and two if the error is infinite.
    """
    if error == math.inf:
        return rounded(value, 2)
    if value == 0 or not (math.isfinite(value) and math.isfinite(error) and error > 0):
        return rounded(value)
    digits = _exponent(abs(value)) - _exponent(float(f"{error:.1e}")) + 2
    return rounded(value, min(max(digits, 1), 4))


def between(low: float, high: float, digits: int = 4) -> str:
    """Format an interval: `5,430 to 6,753`, or one number if both ends look the same or one is NaN.

    The ends are rounded outward, so that a number between them also lies between the printed ones.
    """
    ends = [rounded(end, digits) for end in (low, high) if not math.isnan(end)]
    if len(set(ends)) < 2:
        return ends[0] if ends else "–"
    return f"{bound(low, digits, up=low > high)} to {bound(high, digits, up=high > low)}"


def bound(value: float, digits: int = 4, *, up: bool) -> str:
    """Format like `rounded`, but round an upper bound (`up`) up and a lower one down: `2,893` for 2892.1."""
    if not math.isfinite(value):
        return rounded(value, digits)
    context = Context(prec=digits, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    return rounded(float(context.create_decimal(repr(float(value)))), digits)


def below_noise(value: float, high: float) -> float | str:
    """Format a nonnegative number; an estimate of zero is shown as `< 3.2`, the upper end of its interval."""
    return f"< {bound(high, 2, up=True)}" if value == 0 and high > 0 else value


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `1 probe`, `16 probes`, `1,024 blocks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def one_of(names: Sequence[str], most: int = 3) -> str:
    """Format alternatives: `a`, `a or b`, `a, b, c or one of 5 more`."""
    shown, rest = list(names[:most]), len(names) - most
    if rest > 0:
        return f"{', '.join(shown)} or {'another' if rest == 1 else f'one of {rest:,} more'}"
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def duration(seconds: float) -> str:
    """Format a duration: `40 s`, `3 min`, `2.5 h`, `3.5 days`, `2.6 years`."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * DAY:
        return f"{seconds / 3600:.1f} h"
    count, unit = (seconds / DAY, "days") if seconds < 2 * YEAR else (seconds / YEAR, "years")
    return f"{count:,.1f} {unit}" if count < 10 else f"{count:,.0f} {unit}"


def short_duration(seconds: float) -> str:
    """Format like `duration`, with two digits below ten seconds: `0.0021 s`, `1.8 s`, `3 min`."""
    return f"{seconds:.2g} s" if seconds < 9.95 else duration(seconds)


def data_size(count: int) -> str:
    """Format a number of bytes, in steps of 1024: `12 kB`, `3.4 MB`, `120 MB`, `1.2 GB`."""
    if count < 2**20:
        return f"{count / 2**10:.0f} kB"
    if count < 2**30:
        return f"{count / 2**20:.{0 if count >= 100 * 2**20 else 1}f} MB"
    return f"{count / 2**30:.1f} GB"

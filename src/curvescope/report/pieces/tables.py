"""Tables of results as cells: a number stands with its error, rounded to it.

Columns are known by their names. The error of `x` is the column `x_stderr`, `x_error`, `x_numerical` or
`± x`, or the next column if that is `±`, begins with it, is called `stderr`, or `error` behind a `value` or a
`lambda_max`. With a column `x_sampling` both errors have columns of their own, and `x` has its interval. An
interval is `x_low` and `x_high`, `x low` and `x high`, or `low` and `high` right behind `x` or its error; it
goes into the cell of a number without an error of its own, and is rounded to the error of one that has it.
CSV files keep every column and every digit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from curvescope.core.number_format import MAX_DIGITS, rounded, to_error, with_error
from curvescope.report.page_elements import Cell, Table, column, heading, verdict

if TYPE_CHECKING:
    import pandas as pd

MOST_CELLS, FEWEST_ROWS = 8000, 50  # of a table on the page
BEFORE_ERROR = ("value", "lambda_max")  # a column `error` behind one of these is its error
VERDICT = "verdict"
SIZES = ("larger", "smaller", "equal")  # verdicts of a comparison, which are not good or bad
ERROR = re.compile(r"^(residual|error|stderr|noise)$|_(residual|error|stderr|numerical|sampling)$|^±")
STANDARD = re.compile(r"(stderr|numerical)$|^±")  # errors that one probe does not have
UNKNOWN = " ± ?"
MOST_COUNTED = 2.0**24  # float32 has whole numbers alone beyond
BELOW = re.compile(r"^< [\d.,e+-]+$")  # below noise: found to be zero


def table(
    name: str, frame: pd.DataFrame, caption: str = "", *, anchor: str, csv: str = "", title: str = ""
) -> Table:
    """A frame as a table of the page."""
    columns = [str(name) for name in frame.columns]
    most = max(MOST_CELLS // max(len(columns), 1), FEWEST_ROWS)
    shown = frame.head(most).to_numpy(dtype=object).tolist()
    shown = _whole_numbers(shown)
    numeric = [_all_numbers([row[i] for row in shown]) for i in range(len(columns))]
    errors = _errors(columns, numeric)
    every = _intervals(columns, numeric, errors)
    intervals = {i: ends for i, ends in every.items() if i not in errors}
    beside = {end: errors[i] for i, ends in every.items() if i in errors for end in ends}
    inside = {*errors.values(), *(end for both in intervals.values() for end in both)}
    kept = [i for i in range(len(columns)) if i not in inside]
    rows = [[_whole_cell(row, i, columns, errors, intervals, beside) for i in kept] for row in shown]
    if any(cell.text.endswith(UNKNOWN) for row in rows for cell in row):
        caption = f"{caption} ± ?: an estimate from one probe, without an error.".strip()
    rest = f" The first {most:,} of {len(frame):,} rows; the CSV file has all." if len(frame) > most else ""
    header = [column(columns[i]) + (" (low to high)" if i in intervals else "") for i in kept]
    return Table(anchor, title or heading(name), (caption + rest).strip(), header, rows, csv)


def _whole_numbers(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The same, with numbers such as steps, which a frame may hold as 200.0, as whole ones."""
    whole = [all(_is_whole(value) for value in values) for values in zip(*rows, strict=True)]
    return [
        [int(value) if one and math.isfinite(value) else value for one, value in zip(whole, row, strict=True)]
        for row in rows
    ]


def _is_whole(value: object) -> bool:
    """Return True if a number stands for a count: whole, though it has the digits not to be, or nothing."""
    return isinstance(value, float) and (
        math.isnan(value) or (value.is_integer() and abs(value) < MOST_COUNTED)
    )


def _all_numbers(values: Sequence[Any]) -> bool:
    """Return True if a column holds numbers, bounds such as `< 3.2`, or nothing, and not nothing alone."""
    known = [value for value in values if value is not None]
    return bool(known) and all(_is_number(v) or BELOW.match(str(v)) for v in known)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _errors(columns: Sequence[str], numeric: Sequence[bool]) -> dict[int, int]:
    """Map columns to the column of their errors."""
    places = {name: i for i, name in enumerate(columns)}
    found: dict[int, int] = {}
    for i, name in enumerate(columns):
        if f"{name}_sampling" in places:
            continue  # both errors have columns of their own, and the number has its interval
        errors = (f"{name}_stderr", f"{name}_error", f"{name}_numerical", f"± {name}")
        named = [places[error] for error in errors if error in places]
        if numeric[i] and named and numeric[named[0]]:
            found[i] = named[0]
    for i, (name, after) in enumerate(pairwise(columns)):
        free = i not in found and i not in found.values() and i + 1 not in found.values()
        behind = after.startswith("±") or after == "stderr" or (after == "error" and name in BEFORE_ERROR)
        if free and behind and not name.startswith("±") and numeric[i] and numeric[i + 1]:
            found[i] = i + 1
    return found


def _intervals(
    columns: Sequence[str], numeric: Sequence[bool], errors: Mapping[int, int]
) -> dict[int, tuple[int, int]]:
    """Map columns to the columns of both ends of their interval; a column of errors has none."""
    places = {name: i for i, name in enumerate(columns)}
    found: dict[int, tuple[int, int]] = {}
    for i, name in enumerate(columns):
        for ends in ("_low", "_high"), ("_numerical_low", "_numerical_high"), (" low", " high"):
            low, high = (f"{name}{end}" for end in ends)
            if low in places and high in places:
                found[i] = places[low], places[high]
        after = errors[i] + 1 if errors.get(i) == i + 1 else i + 1
        if tuple(columns[after : after + 2]) == ("low", "high") and not ERROR.search(name):
            found[i] = after, after + 1
    return {i: ends for i, ends in found.items() if all(numeric[j] for j in (i, *ends))}


def _whole_cell(
    row: Sequence[Any],
    i: int,
    columns: Sequence[str],
    errors: Mapping[int, int],
    intervals: Mapping[int, tuple[int, int]],
    beside: Mapping[int, int],
) -> Cell:
    """A cell with its error or its interval; the end of an interval to the error `beside` says it has."""
    value, name = row[i], columns[i]
    if name == VERDICT and isinstance(value, str):
        return Cell(value, value, level=None if value in SIZES else verdict(value))
    if i in errors and _is_number(value) and _is_number(row[errors[i]]):
        return Cell(_estimate(value, row[errors[i]], columns[errors[i]]), repr(value), number=True)
    if i in intervals and _is_number(value):
        return Cell(_between(value, *(row[j] for j in intervals[i])), repr(value), number=True)
    if i in beside and _is_number(value) and _is_number(row[beside[i]]):
        return Cell(_signed(to_error(value, row[beside[i]]), value), repr(value), number=True)
    if ERROR.search(name) and isinstance(value, float) and math.isfinite(value):
        return Cell(rounded(value, 2), repr(value), number=True)
    return cell(value)


def _estimate(value: float, error: float, name: str) -> str:
    """A number with its error; one whose standard error is not known has two digits: `11 ± ?`."""
    if math.isfinite(value) and math.isnan(error) and STANDARD.search(name):
        return f"{rounded(value, 2)}{UNKNOWN}"
    return _signed(with_error(value, error), value)


def _signed(text: str, value: float) -> str:
    return "–" if math.isnan(value) else text


def _between(value: float, low: float, high: float) -> str:
    """Format a value with its interval: `0.52 (0.48 to 0.57)`, `0.94 (0.11 to ∞)`.

    All are rounded to two digits of the wider side. If that leaves no digit of the value, each number has
    two: `2,000 (-37,000 to 52,000)`.
    """
    if not math.isfinite(value) or not all(_is_number(end) and not math.isnan(end) for end in (low, high)):
        return cell(value).text
    if math.inf in (-low, high):
        return f"{rounded(value, 2)} ({_end(low)} to {_end(high)})"
    wide = max(high - value, value - low)
    if wide <= 0:
        return rounded(value)
    if not 1e-4 <= max(abs(low), abs(high)) < 1e7 or wide > 10 * abs(value) > 0:
        return f"{rounded(value, 2)} ({rounded(low, 2)} to {rounded(high, 2)})"
    last = MAX_DIGITS - 1 - math.floor(math.log10(max(abs(low), abs(high))))
    place = min(1 - math.floor(math.log10(wide)), last)
    text = [f"{round(x, place) + 0.0:,.{max(place, 0)}f}" for x in (value, low, high)]
    return text[0] if text[1] == text[2] else f"{text[0]} ({text[1]} to {text[2]})"


def _end(value: float) -> str:
    return rounded(value, 2).replace("inf", "∞")


def cell(value: object) -> Cell:
    """A value by itself: whole numbers with commas, others with four digits."""
    if isinstance(value, bool):
        return Cell("yes" if value else "no", str(int(value)))
    if value is None:
        return Cell("–", "")
    if isinstance(value, int):
        return Cell(f"{value:,}", repr(value), number=True)
    if isinstance(value, float):
        return Cell("–" if math.isnan(value) else rounded(value), repr(value), number=True)
    if BELOW.match(str(value)):
        return Cell(str(value), "0", number=True)
    return Cell(str(value), str(value))

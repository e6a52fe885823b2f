"""What was measured, and how it is shown: a line, a row and a bar for each contender."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from curvescope.core.result import Result
from curvescope.runs.shown import Line, Shown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

nan = math.nan
GIB = 2**30
Ratio = tuple[float, float, float]
"""Median, least, most."""


@dataclass(frozen=True)
class Columns(Result):
    """Products with several columns at once, in a row."""

    number: int
    seconds: list[float]  # one per round, of all columns
    unit: list[float]  # of a gradient, next to each
    peak: float  # bytes at most

    def ratio(self) -> Ratio:
        """Time of one column in gradients."""
        return _ratio([s / self.number for s in self.seconds], self.unit)


@dataclass(frozen=True)
class Measured(Result):
    """One contender."""

    name: str
    seconds: list[float]  # one per round
    unit: list[float]  # of a gradient, next to each; of large models the median of gradients before
    first: float  # seconds of the first call: what is built or compiled, and one product
    peak: float  # bytes at most after the first product, all included; nan where it is not known (CPU)
    error: float  # ‖found − exact‖ / ‖exact‖ on a small batch, exact in float64; nan for the gradient
    note: str = ""  # why there are no numbers, or not all
    frozen: list[float] = field(default_factory=list)  # as `seconds`, inside `with operator.frozen()`
    frozen_unit: list[float] = field(default_factory=list)
    first_peak: float = nan  # as `peak`, during the first product
    error_on: str = "the model"  # on which model the error was measured
    columns: list[Columns] = field(default_factory=list)

    def ratio(self) -> Ratio:
        """Time in gradients, round by round."""
        return _ratio(self.seconds, self.unit)

    def frozen_ratio(self) -> Ratio:
        """Time in gradients of products in a row; nan for what is not ours."""
        return _ratio(self.frozen, self.frozen_unit)

    def line(self) -> Line:
        """Time in gradients, and the rest in words."""
        if not self.seconds:
            return (self.name, "–", self.note)
        median, low, high = self.ratio()
        seconds = f"{statistics.median(self.seconds):.3g} s"
        words = [f"{low:.2f} to {high:.2f} gradients", seconds] if median == median else []
        words += [f"frozen {self.frozen_ratio()[0]:.2f}"] if self.frozen else []
        words += [f"{c.number} columns {c.ratio()[0]:.2f} each" for c in self.columns]
        words += [f"first call {self.first:.1f} s"]
        if self.peak == self.peak:
            words += [f"peak {self.peak / GIB:.1f} GiB, at first {self.first_peak / GIB:.1f}"]
        words += [f"error {self.error:.1e}"] if self.error == self.error else []
        words += [self.note] if self.note else []
        return (self.name, f"{median:.2f}×" if median == median else seconds, ", ".join(words))

    def row(self) -> dict[str, Any]:
        """A row of the table."""
        median, low, high = self.ratio()
        return {
            "contender": self.name,
            "gradients": median,
            "low": low,
            "high": high,
            "frozen": self.frozen_ratio()[0],
            "seconds": statistics.median(self.seconds) if self.seconds else nan,
            "first_s": self.first,
            "first_peak_GiB": self.first_peak / GIB,
            "peak_GiB": self.peak / GIB,
            "error": self.error,
            "error_on": self.error_on if self.error == self.error else "",
            "note": self.note,
        }


@dataclass(frozen=True)
class Committed(Result):
    """What the package's file of figures says of one contender on this device; nan where it says nothing."""

    contender: str
    gradients: float
    frozen: float
    peak_GiB: float
    seconds: float
    torch: str


@dataclass(frozen=True)
class Cost(Shown):
    """All contenders, on one model and batch."""

    model: str
    device: str
    num_parameters: int
    tokens: str
    tf32: bool
    measured: list[Measured] = field(default_factory=list)
    slq_seconds: float = nan
    vector: float = nan  # bytes of one parameter vector, by which peaks can be reckoned
    committed: list[Committed] = field(default_factory=list)

    def of(self, name: str) -> Measured:
        """The contender of that name."""
        return next(m for m in self.measured if m.name == name)

    def ratio(self, name: str) -> Ratio:
        """Time in gradients, round by round: median, least, most."""
        return self.of(name).ratio()

    def summary(self) -> list[Line]:
        """Each contender: time in gradients, and the rest in words; what was committed beside it."""
        where = f"{self.num_parameters:,} parameters, {self.tokens} on {self.device}"
        where += f", a vector {self.vector / GIB:.3g} GiB" if self.vector == self.vector else ""
        lines = [("model", self.model, where)]
        known = {c.contender: c for c in self.committed}
        for m in self.measured:
            label, value, words = m.line()
            if m.seconds and m.name in known:
                words = f"{words}; {_said(known[m.name])}"
            lines.append((label, value, words))
        if self.slq_seconds == self.slq_seconds:
            lines.append(("SLQ 10 × 100", f"{self.slq_seconds:.0f} s", "density of the Hessian"))
        return lines

    def captions(self) -> dict[str, str]:
        """What the figure and the tables show."""
        where = f"{self.model}, {self.tokens}, {self.device}{', TF32' if self.tf32 else ''}"
        return {
            "cost": f"Time of one product in units of one gradient ({where}); "
            "the bar is the median over rounds, the line their range. Steady: inside an algorithm, where "
            "what is kept is checked once for all products. Columns: time of each, of so many at once.",
            "costs": "Error: distance to the product in float64, on a small batch of the model that error_on "
            "names. Peaks, on a GPU, are all that is allocated, during the first product and after it; "
            "vector_GiB is one parameter vector.",
            "columns": "Several columns at once, in a row: time of each, in gradients.",
        }

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row per contender, and one per number of columns."""
        import pandas as pd

        known = {c.contender: c for c in self.committed}
        rows = [m.row() | {"vector_GiB": self.vector / GIB} for m in self.measured]
        if known:
            beside = (_beside(known.get(m.name)) for m in self.measured)
            rows = [row | more for row, more in zip(rows, beside, strict=True)]
        if all(m.peak != m.peak for m in self.measured):  # on a CPU
            rows = [{k: x for k, x in row.items() if not k.endswith("peak_GiB")} for row in rows]
        found = {"costs": pd.DataFrame(rows)}
        several = [_several(m.name, c) for m in self.measured for c in m.columns]
        return found | ({"columns": pd.DataFrame(several)} if several else {})

    def figures(self) -> dict[str, Figure]:
        """Bars of time, and of memory where it is known."""
        from curvescope.viz.estimates import bars

        rows: list[tuple[str, Ratio, float]] = []
        for m in self.measured:
            if not m.seconds:
                continue
            rows.append((m.name, m.ratio(), m.peak))
            rows += [(f"{m.name}, frozen", m.frozen_ratio(), nan)] if m.frozen else []
            rows += [(f"{m.name}, {c.number} columns, each", c.ratio(), c.peak) for c in m.columns]
        names, ratios, peaks = zip(*rows, strict=True) if rows else ((), (), ())
        known = any(peak == peak for peak in peaks)
        return {"cost": bars(names, ratios, [peak / GIB for peak in peaks] if known else None)}


def _ratio(seconds: Sequence[float], unit: Sequence[float]) -> Ratio:
    """Round by round; nan where there is no unit."""
    found = [a / b for a, b in zip(seconds, unit, strict=True)] if unit else []
    return (statistics.median(found), min(found), max(found)) if found else (nan, nan, nan)


def _said(known: Committed) -> str:
    """A committed figure in words."""
    words = [f"{known.gradients:.2f}×"]
    words += [f"frozen {known.frozen:.2f}"] if known.frozen == known.frozen else []
    words += [f"{known.peak_GiB:.1f} GiB"] if known.peak_GiB == known.peak_GiB else []
    return f"committed: {', '.join(words)}"


def _beside(known: Committed | None) -> dict[str, float]:
    """Columns of what was committed."""
    return {
        "committed_gradients": known.gradients if known else nan,
        "committed_peak_GiB": known.peak_GiB if known else nan,
    }


def _several(name: str, columns: Columns) -> dict[str, Any]:
    median, low, high = columns.ratio()
    return {
        "contender": name,
        "columns": columns.number,
        "gradients_each": median,
        "low": low,
        "high": high,
        "seconds": statistics.median(columns.seconds),
        "peak_GiB": columns.peak / GIB,
    }

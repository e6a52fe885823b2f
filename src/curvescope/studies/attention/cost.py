"""Measurements of attention: tables of time ratios, and curves over the sequence length."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from curvescope.core.result import Result
from curvescope.runs.study_result import Line, Shown, Tables
from curvescope.studies.attention.contenders import CONTENDERS, DERIVATIVES, MATH
from curvescope.studies.hvp.study import Ratio, ratio_per_round
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

nan = math.nan
MB = 1e6
Point = tuple[float, float, float, float]
"""Point of a curve: the length, a value, and its range."""
TITLES = dict(zip(DERIVATIVES, ("forward", "backward", "JVP", "double backward"), strict=True))


@dataclass(frozen=True)
class Timed(Result):
    """One contender, one derivative, at one length, width, mask and number of threads."""

    length: int
    width: int
    mask: str
    threads: int
    heads: int
    derivative: str
    contender: str
    seconds: list[float] = field(default_factory=list)  # one per round
    unit: list[float] = field(default_factory=list)  # seconds of the math path in the same rounds
    first: float = nan  # seconds of the first call: compilation and one computation
    again: float = nan  # of the second call, whose memory was measured
    peak: float = nan  # peak bytes in that call, minus the memory in use before
    error: float = nan  # ‖result − reference‖ / ‖reference‖; the reference is the math path in the same dtype
    note: str = ""  # reason why there are no numbers

    def ratio(self) -> Ratio:
        """Time divided by the time of the math path, per round: median, minimum, maximum."""
        return ratio_per_round(self.seconds, self.unit)

    @property
    def place(self) -> tuple[int, int, str, int, str]:
        """All settings except the contender."""
        return self.length, self.width, self.mask, self.threads, self.derivative


@dataclass(frozen=True)
class AttentionCell(Result):
    """All contenders and derivatives for one shape, mask and number of threads."""

    timed: list[Timed]
    left_out: bool


@dataclass(frozen=True)
class Cost(Shown):
    """Result: times and memory of all cells."""

    device: str
    dtype: str
    torch: str
    measured: list[Timed] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def of(self, contender: str, derivative: str, **where: Any) -> Timed:
        """First entry of a contender and a derivative, for example with `length=512`."""
        return next(
            one
            for one in self.measured
            if one.contender == contender
            and one.derivative == derivative
            and all(getattr(one, name) == value for name, value in where.items())
        )

    def summary(self) -> list[Line]:
        """Return our time divided by the math path's, for each derivative and length, without a mask."""
        lines: list[Line] = [("device", self.device, f"{self.dtype}, torch {self.torch}")]
        for derivative in DERIVATIVES:
            ours = self._line("ours", derivative, *self._middle())
            if not ours:
                continue
            words = ", ".join(f"{one.length}: {_range(one)}" for one in ours)
            lines.append(
                (derivative, f"{ours[-1].ratio()[0]:.2f}×", f"of the math path's time; by length: {words}")
            )
        refused = {(one.contender, one.derivative): one.note for one in self.measured if one.note}
        lines += [(name, "cannot", f"{derivative}: {note}") for (name, derivative), note in refused.items()]
        return lines

    def captions(self) -> dict[str, str]:
        """Return captions of the figures and the table."""
        where = f"{self.dtype}, {self.device}, torch {self.torch}"
        width, threads = self._middle()[0], self._middle()[2]
        tokens = max((one.heads * one.length for one in self.measured), default=0)
        sizes = [one.length for one in self.measured if one.heads * one.length == tokens]
        return {
            "time": f"Time divided by that of PyTorch's math path ({where}, width {width}, threads: "
            f"{threads}), over the sequence length: median and range over interleaved rounds. Below 1 is "
            f"faster. Heads × length is {tokens:,} from {min(sizes, default=0):,} tokens on. With one CPU "
            "thread, the study measures process time instead of wall-clock time.",
            "memory": "Peak memory of the same computations, without the input tensors. The dotted line is "
            "the size of query, key and value. Where it is flat, the number of heads falls as the length "
            "grows: a flat curve there means memory linear in the length.",
            "attention": "Ratio: time divided by that of the math path in the same round; median, minimum "
            "and maximum over rounds. Error: distance to the math path's results in the same dtype. A note "
            "gives the reason if a contender has no number.",
        }

    def tables(self) -> Tables:
        """Return one row per contender, derivative and shape."""
        return {"attention": [_row(one) for one in self.measured]}

    def figures(self) -> dict[str, Figure]:
        """Draw relative time and memory over the sequence length."""
        width, _, threads = self._middle()
        places = {mask: (width, mask, threads) for mask in ("none", "causal")}
        sizes = {one.length: one.heads * one.length for one in self.measured if one.width == width}
        entry = {"float64": 8, "bfloat16": 2}.get(self.dtype, 4) * width / MB
        given = [(length, 3 * entry * tokens) for length, tokens in sorted(sizes.items())] or [(1.0, 1.0)]
        names = [name for name in CONTENDERS if any(one.contender == name for one in self.measured)]
        curves = partial(self._curves, names=names, places=places)
        return {
            "time": _panels(
                curves(Timed.ratio, without=MATH),
                names,
                label="time / time of the math path",
                reference=[(length, 1.0) for length, _ in given],
                words="the math path",
            ),
            "memory": _panels(
                curves(_megabytes),
                names,
                label="peak memory (MB)",
                reference=given,
                words="query, key and value",
            ),
        }

    def _curves(
        self,
        value: Callable[[Timed], Ratio],
        *,
        names: list[str],
        places: dict[str, tuple[int, str, int]],
        without: str = "",
    ) -> dict[str, dict[tuple[str, str], list[Point]]]:
        """Return curves over the length by contender and mask, for every derivative."""
        return {
            TITLES[derivative]: {
                (name, mask): [(one.length, *value(one)) for one in self._line(name, derivative, *where)]
                for name in names
                for mask, where in places.items()
                if name != without
            }
            for derivative in DERIVATIVES
        }

    def _middle(self) -> tuple[int, str, int]:
        """Return the width, mask and threads that were measured at the most lengths."""
        counts: dict[tuple[int, str, int], set[int]] = {}
        for one in self.measured:
            counts.setdefault((one.width, one.mask, one.threads), set()).add(one.length)
        order = sorted(counts, key=lambda key: (-len(counts[key]), key[1] != "none", key))
        return order[0] if order else (64, "none", 1)

    def _line(self, contender: str, derivative: str, width: int, mask: str, threads: int) -> list[Timed]:
        """Return one contender's entries over the lengths, without those that have no numbers."""
        found = (
            one
            for one in self.measured
            if (one.contender, one.derivative) == (contender, derivative)
            and (one.width, one.mask, one.threads) == (width, mask, threads)
            and one.seconds
        )
        return sorted(found, key=lambda one: one.length)


def _range(one: Timed) -> str:
    median, low, high = one.ratio()
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def _megabytes(one: Timed) -> Ratio:
    size = max(one.peak, 0.1 * MB) / MB
    return size, size, size


def _row(one: Timed) -> dict[str, Any]:
    median, low, high = one.ratio()
    return {
        "derivative": one.derivative,
        "length": one.length,
        "width": one.width,
        "mask": one.mask,
        "threads": one.threads,
        "heads": one.heads,
        "contender": one.contender,
        "ratio": median,
        "low": low,
        "high": high,
        "seconds": statistics.median(one.seconds) if one.seconds else nan,
        "rounds": len(one.seconds),
        "first_s": one.first,
        "peak_MB": one.peak / MB,
        "error": one.error,
        "note": one.note,
    }


def _panels(
    panels: Mapping[str, Mapping[tuple[str, str], Sequence[Point]]],
    names: Sequence[str],
    *,
    label: str,
    reference: Sequence[tuple[float, float]],
    words: str,
) -> Figure:
    """Draw one panel for each of the four computations, with curves over the length.

    Args:
        panels: Curves by contender and mask, for each panel title.
        names: Contenders, which take colors and markers in this order. The line style shows the mask.
        label: Label of the vertical axis.
        reference: Points (x, value) of a dotted line in every panel.
        words: Label of that line in the legend.
    """
    from matplotlib.lines import Line2D

    drawn = {key for curves in panels.values() for key, line in curves.items() if line}
    looks = {name: (style.MANY[i], style.MARKS[i % len(style.MARKS)]) for i, name in enumerate(names)}
    dashes = dict(
        zip(
            dict.fromkeys(mask for curves in panels.values() for _, mask in curves), ("-", "--"), strict=False
        )
    )
    figure, grid = style.subplots(2, 2, figsize=(8.2, 6.2), sharex=True, sharey=True)
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=True):
        axes.plot(*zip(*reference, strict=True), color="black", lw=0.8, ls=":")
        for (name, mask), line in curves.items():
            if not line:
                continue
            x, y, low, high = zip(*line, strict=True)
            hue, mark = looks[name]
            axes.plot(x, y, color=hue, marker=mark, ls=dashes[mask], ms=4)
            axes.vlines(x, low, high, color=hue, lw=0.8)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", title=title)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axes in grid[1]:
        axes.set_xlabel("length (tokens)")
    for axes in grid[:, 0]:
        axes.set_ylabel(label)
    for axes in grid.flat:
        style.plain_numbers(axes)
    marks = [
        Line2D([], [], color=looks[name][0], marker=looks[name][1], label=name)
        for name in names
        if any(key[0] == name for key in drawn)
    ]
    kinds = [
        Line2D([], [], color="0.4", ls=ls, label="no mask" if mask == "none" else mask)
        for mask, ls in dashes.items()
        if any(key[1] == mask for key in drawn)
    ]
    dotted = Line2D([], [], color="black", lw=0.8, ls=":", label=words)
    figure.legend(handles=[*marks, *kinds, dotted], loc="outside lower center", ncols=4)
    return figure

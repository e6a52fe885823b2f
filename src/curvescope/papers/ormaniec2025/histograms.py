"""Histograms of entry sizes in the W_Q and W_V blocks of the Hessian, with softmax and without.

The bars are those of the paper. Edges are evenly spaced in the logarithm from max(1e-8, smallest) to the
largest entry: 50 edges, or 30 for W_Q with softmax. Counts are raw counts of all 65,536 entries; smaller
entries are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators.curvature import BY_SYMBOL
from curvescope.papers.common import (
    AGREES,
    AUTHORS_CODE,
    DIFFERS,
    FigureConfig,
    as_printed,
    published_table,
    within,
)
from curvescope.papers.ormaniec2025.small_model import IN_WORDS, Kind, histogram_data, small_problem
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import Claim, Line, Shown, Tables
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLOCKS = ("L0.W_V", "L0.W_Q")
KINDS: tuple[Kind, ...] = get_args(Kind)
SMALLEST = 1e-8
NUM_EDGES = {("softmax", "L0.W_Q"): 30}  # 50 for all others
CAPTIONS = {
    "histogram_classical": "Sizes of all entries of two diagonal blocks of the exact Hessian, with softmax. "
    "Filled: measured. Black outline: published. {setting}",
    "histogram_linear": "The same model without softmax, in front of the one with softmax (pale). Only the "
    "outlined bars, with softmax, are published. {setting}",
    "histograms": "Bars of both figures: edges and counts.",
    "histogram_norms": "Frobenius norms of the blocks and of their two parts, and entry sizes.",
}
PUBLISHED_NORMS = {
    ("softmax", "L0.W_Q", "H"): 2.59756894e-4,
    ("softmax", "L0.W_V", "H"): 2.66764947e-2,
    ("softmax", "L0.W_Q", "H_o"): 1.18092e-4,
    ("softmax", "L0.W_Q", "H_f"): 2.63422e-4,
}
PUBLISHED_SIZES = {
    "L0.W_Q": {"min": "6.57e-11", "median": "5.127e-7", "mean": "7.186e-7", "max": "9.003e-6"},
    "L0.W_V": {"min": "7.79e-10", "median": "1.602e-5", "mean": "4.691e-5", "max": "2.320e-3"},
}
# Number of entries below SMALLEST, and height of the tallest bar.
PUBLISHED_COUNTS = {"L0.W_Q": (644, 6259), "L0.W_V": (38, 4085)}
MEASURES = {"min": np.min, "median": np.median, "mean": np.mean, "max": np.max}
COLORS = {"L0.W_V": "#7570b3", "L0.W_Q": "#1b9e77"}  # colors of the paper


@dataclass(frozen=True)
class Config(FigureConfig):
    """No settings: weights, data and bars are those of the paper."""


@dataclass(frozen=True)
class Bars(Result):
    """Entries, norms and bars of one block of one model."""

    attention: str
    block: str
    entries: np.ndarray  # (n,) |H_ij|, all of them
    norms: dict[str, float]  # Frobenius norms of H, H_o and H_f
    edges: np.ndarray  # (bars + 1,)
    counts: np.ndarray  # (bars,)


@dataclass(frozen=True)
class Histograms(Shown):
    """Bars of the four blocks."""

    bars: list[Bars]

    def of(self, attention: str, block: str) -> Bars:
        """Bars of one block of one model."""
        return next(b for b in self.bars if (b.attention, b.block) == (attention, block))

    def median_ratio(self, attention: str) -> float:
        """Ratio of the median entries of W_V and W_Q."""
        V, Q = (np.median(self.of(attention, block).entries) for block in BLOCKS)
        return float(V / Q)

    def claims(self) -> list[Claim]:
        """Compare bars, norms and the sizes shown in the paper's figures."""
        rows = [self._bars(block) for block in BLOCKS]
        rows += [
            within(f"‖{part}‖_F of {block}, {attention}", value, self.of(attention, block).norms[part],
                   relative=1e-5, source=AUTHORS_CODE)
            for (attention, block, part), value in PUBLISHED_NORMS.items()
        ]  # fmt: skip
        for block, sizes in PUBLISHED_SIZES.items():
            entries = self.of("softmax", block).entries
            rows += [
                _size(f"{what} |entry| of {block}, softmax", what, text, entries)
                for what, text in sizes.items()
            ]
            below, tallest = PUBLISHED_COUNTS[block]
            rows.append(_count(f"entries of {block} below 1e-8, softmax", below, int((entries < 1e-8).sum())))
            counts = self.of("softmax", block).counts
            rows.append(_count(f"tallest bar of {block}, softmax", tallest, int(counts.max())))
        return [*rows, *self._without_softmax()]

    def _bars(self, block: str) -> Claim:
        drawn = published(block)
        ours = self.of("softmax", block)
        off = np.abs(ours.counts - np.array([int(row["count"]) for row in drawn]))
        words = f"{int((off == 0).sum())} equal" + (f", largest difference {off.max()}" if off.any() else "")
        agrees = off.sum() <= 1  # a count can change if float32 rounding moved an entry across an edge
        verdict = AGREES if agrees else DIFFERS
        return Claim(f"bars of {block}, softmax", f"{len(drawn)} bars", words, verdict, AUTHORS_CODE)

    def _without_softmax(self) -> list[Claim]:
        """Check that without softmax W_Q grows to the size of W_V, which hardly changes."""
        softmax, linear = (self.median_ratio(kind) for kind in KINDS)
        V, Q = (
            float(np.median(self.of("linear", b).entries) / np.median(self.of("softmax", b).entries))
            for b in BLOCKS
        )
        return [
            Claim(
                "median |entry| of W_V over that of W_Q, with softmax", "about 30", f"{softmax:.1f}",
                AGREES if 20 < softmax < 45 else DIFFERS, "figure",
            ),
            Claim(
                "the same without softmax", "W_Q grows to W_V, which hardly changes",
                f"{linear:.2f} (W_Q × {Q:.0f}, W_V × {V:.2f})",
                AGREES if 1 / 5 < linear < 5 and Q > 5 and 1 / 3 < V < 3 else DIFFERS, "figure",
            ),
        ]  # fmt: skip

    def summary(self) -> list[Line]:
        """Return the main numbers, each with a label and an explanation."""
        return [(c.claim, c.measured, f"published {c.published}: {c.verdict}") for c in self.claims()]

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        return {name: text.format(setting=IN_WORDS) for name, text in CAPTIONS.items()}

    def tables(self) -> Tables:
        """Return tables of bars and norms."""
        bars = [
            {
                "attention": b.attention,
                "block": b.block,
                "bin": i,
                "edge_lo": b.edges[i],
                "edge_hi": b.edges[i + 1],
                "count": int(count),
            }
            for b in self.bars
            for i, count in enumerate(b.counts)
        ]
        norms = [
            {
                "attention": b.attention,
                "block": b.block,
                **b.norms,
                **{name: float(measure(b.entries)) for name, measure in MEASURES.items()},
            }
            for b in self.bars
        ]
        return {"histograms": bars, "histogram_norms": norms}

    def figures(self) -> dict[str, Figure]:
        """Draw histograms with softmax (stacked vertically), and without (side by side)."""
        return {"histogram_classical": _classical(self), "histogram_linear": _linear(self)}


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Histograms:
    """Compute the blocks, except those stored in `state`."""
    wanted: list[tuple[Kind, str]] = [(kind, block) for kind in KINDS for block in BLOCKS]
    pieces = [
        Piece(
            f"{kind}.{block}",
            partial(measure, kind, block, device=cfg.device),
            f"{block} with {kind} attention",
        )
        for kind, block in wanted
    ]
    found = work_through(pieces, progress=progress, state=state)
    return Histograms([found.take(Bars, f"{kind}.{block}") for kind, block in wanted])


def measure(
    attention: Kind, block: str, *, parts: tuple[str, ...] = tuple(BY_SYMBOL), device: str = "cpu"
) -> Bars:
    """Compute one block of the model exactly, with norms of the given parts, which include H."""
    problem = small_problem(attention, histogram_data(), device=device)
    dense = {name: BY_SYMBOL[name](problem, block).to_dense().cpu().numpy() for name in parts}
    entries = np.abs(dense["H"]).ravel()
    edges = bar_edges(entries, NUM_EDGES.get((attention, block), 50))
    counts = np.histogram(entries, edges)[0]
    norms = {name: float(np.linalg.norm(matrix)) for name, matrix in dense.items()}
    return Bars(attention, block, entries, norms, edges, counts)


def bar_edges(entries: np.ndarray, num: int) -> np.ndarray:
    """Return `num` edges, evenly spaced in the logarithm; the last is the largest entry, which counts."""
    edges = np.logspace(np.log10(max(SMALLEST, entries.min())), np.log10(entries.max()), num)
    edges[-1] = entries.max()  # rounding could put the edge below the largest entry
    return edges


def published(block: str) -> list[dict[str, str]]:
    """Read the bars of the published figure with softmax: edge_lo, edge_hi, count."""
    return [row for row in published_table("ormaniec2025", "histograms") if row["block"] == block]


def _size(claim: str, what: str, text: str, entries: np.ndarray) -> Claim:
    """Compare a printed size; the smallest entry only to one percent, because float32 ends there."""
    value = float(MEASURES[what](entries))
    if what == "min":
        return within(claim, float(text), value, relative=0.01, source=AUTHORS_CODE)
    return as_printed(claim, text, value, source=AUTHORS_CODE)


def _count(claim: str, published: int, measured: int) -> Claim:
    """Compare counts, which may differ by one: float32 rounding can move an entry across an edge."""
    verdict = AGREES if abs(published - measured) <= 1 else DIFFERS
    return Claim(claim, f"{published}", f"{measured}", verdict, AUTHORS_CODE)


def _classical(result: Histograms) -> Figure:
    figure, axes = style.subplots(2, 1, figsize=(7, 5.4), sharex=True)
    for ax, block in zip(axes, BLOCKS, strict=True):
        _bars(ax, result.of("softmax", block), label="measured")
        _outline(ax, block)
        _mark_median(ax, result.of("softmax", block))
        _style(ax, block)
        ax.legend(loc="upper left")
    axes[-1].set_xlabel("|entry| of the Hessian block")
    figure.supylabel("number of entries")
    return figure


def _linear(result: Histograms) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for ax, block in zip(axes, BLOCKS, strict=True):
        _bars(ax, result.of("softmax", block), label="with softmax", alpha=0.35)
        _bars(ax, result.of("linear", block), label="without softmax")
        _outline(ax, block)
        _style(ax, block)
        ax.set_xlabel("|entry| of the Hessian block")
    low, high = zip(*(ax.get_xlim() for ax in axes), strict=True)
    for ax in axes:
        ax.set_xlim(min(low), max(high))
    axes[0].legend(loc="upper left")
    axes[1].legend(loc="upper right")
    axes[0].set_ylabel("number of entries")
    return figure


def _bars(ax: Axes, bars: Bars, **style: Any) -> None:
    ax.bar(
        bars.edges[:-1], bars.counts, np.diff(bars.edges), align="edge", color=COLORS[bars.block],
        edgecolor="white", linewidth=0.4, **style,
    )  # fmt: skip


def _outline(ax: Axes, block: str) -> None:
    """Draw the published bars."""
    rows = published(block)
    edges = [float(row["edge_lo"]) for row in rows] + [float(rows[-1]["edge_hi"])]
    ax.stairs([int(row["count"]) for row in rows], edges, color="black", lw=1.1, label="published, softmax")


def _mark_median(ax: Axes, bars: Bars) -> None:
    median = float(np.median(bars.entries))
    ax.axvline(median, color="0.2", lw=1, ls="--")
    words = f"- - median {median:.2g}, {len(bars.entries):,} entries"
    ax.text(0.985, 0.93, words, transform=ax.transAxes, color="0.25", va="top", ha="right")


def _style(ax: Axes, block: str) -> None:
    ax.set_xscale("log")
    ax.set_title(block, color=COLORS[block])
    ax.margins(x=0.02)


STUDY = Study(Config, run)

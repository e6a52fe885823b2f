"""Heat map of every entry of the Hessian of the d = 16 Transformer, and of its attention.

Columns are computed block by block, only above the diagonal, from exact products with unit vectors in
float64. Stored are four numbers for every block and an image with 4 × 4 entries per pixel. All sizes are
multiples of four, so no pixel mixes two blocks. All entries of the attention part are stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators import Hessian
from curvescope.papers.common import AGREES, AUTHORS_CODE, DIFFERS, FigureConfig, as_printed
from curvescope.papers.ormaniec2025.small_model import IN_WORDS, heatmap_data, small_problem
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import Claim, Line, Shown, Tables
from curvescope.viz import style
from curvescope.viz.blocks import cell_text
from curvescope.viz.interactive import Scene, scene
from curvescope.viz.matrix import FLOOR, LABEL, colors, entries_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ORDER = (
    "E", "P", "L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O", "L0.W_1", "L0.b_1", "L0.W_2", "L0.b_2", "U", "b_U",
)  # fmt: skip
ATTENTION = ("L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O")
CELL = 4  # entries along a side of a pixel of the large image
CAPTIONS = {
    "heatmap": "log10(|entry| + 1e-6) of the exact Hessian. Left: {parameters} parameters in {blocks} "
    "blocks; a pixel is the mean over {cell} × {cell} entries of one block. Right: every entry of the "
    "attention part. Colors from {low:.3f} to {high:.3f}, the extreme values before averaging. The "
    "published image is blurred over 5 × 5 entries, across the borders of blocks. The table has one row "
    "per block of the upper triangle, including the diagonal. {setting}",
    "heatmap_blocks": "Median |entry| of every block, the numbers behind the heat map.",
}
PUBLISHED = {
    "loss": "2.48540626",
    "‖H‖_F of the whole": "3.5441",
    "‖H‖_F of L0.W_Q, L0.W_Q": "2.647e-4",
    "‖H‖_F of L0.W_V, L0.W_V": "2.549e-2",
    "‖H‖_F of L0.W_Q, L0.W_V": "9.272e-3",
    "lower end of the colors": "-6.0000",
    "upper end of the colors": "-0.9210",
}


@dataclass(frozen=True)
class Config(FigureConfig):
    """Blocks to compute. The published image has all of them; like there, attention biases are left out."""

    blocks: tuple[str, ...] = setting(
        ("*",), "glob patterns of blocks, e.g. *.W_Q; by default all blocks of the published image"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern in self.blocks:
            if not any(fnmatchcase(name, pattern) for name in ORDER):
                raise UsageError(
                    f"blocks: expected glob patterns of the heat map's blocks, got {pattern!r}",
                    hint=near_misses(pattern, list(ORDER)),
                )

    @property
    def names(self) -> list[str]:
        """Names of the chosen blocks in the published order."""
        return [name for name in ORDER if any(fnmatchcase(name, glob) for glob in self.blocks)]


@dataclass(frozen=True)
class BlockColumns(Result):
    """Columns of one block, down to the diagonal."""

    rows: list[str]
    frobenius: np.ndarray  # (rows,), like the next four
    mean_abs: np.ndarray
    median_abs: np.ndarray
    max_abs: np.ndarray
    min_abs: np.ndarray
    picture: np.ndarray  # (entries of the rows / CELL, entries of the block / CELL)
    entries: np.ndarray  # (entries of the rows in attention, entries of the block); empty for other blocks


@dataclass(frozen=True)
class HeatMap(Shown):
    """The Hessian as numbers per block and as two images."""

    names: list[str]
    sizes: list[int]
    loss: float
    frobenius: np.ndarray  # (b, b), symmetric, like the next four
    mean_abs: np.ndarray
    median_abs: np.ndarray
    max_abs: np.ndarray
    min_abs: np.ndarray
    picture: np.ndarray  # means of log10(|H| + FLOOR) over CELL × CELL entries
    attention_names: list[str]
    attention: np.ndarray  # all entries, float32

    @property
    def norm(self) -> float:
        """Frobenius norm of the full matrix."""
        return float(np.sqrt((self.frobenius**2).sum()))

    @property
    def limits(self) -> tuple[float, float]:
        """Ends of the color scale: smallest and largest log10(|entry| + FLOOR) before averaging."""
        return math.log10(self.min_abs.min() + FLOOR), math.log10(self.max_abs.max() + FLOOR)

    def pair(self, first: str, second: str) -> float:
        """Frobenius norm of a block."""
        return float(self.frobenius[self.names.index(first), self.names.index(second)])

    def claims(self) -> list[Claim]:
        """Compare the published numbers digit by digit, and check the darkest part of the image."""
        found = {"loss": self.loss}
        for one, two in (("L0.W_Q", "L0.W_Q"), ("L0.W_V", "L0.W_V"), ("L0.W_Q", "L0.W_V")):
            if {one, two} <= set(self.names):
                found[f"‖H‖_F of {one}, {two}"] = self.pair(one, two)
        if len(self.names) == len(ORDER):
            found["‖H‖_F of the whole"] = self.norm
            found["lower end of the colors"], found["upper end of the colors"] = self.limits
        rows = [
            as_printed(name, text, found[name], source=AUTHORS_CODE)
            for name, text in PUBLISHED.items()
            if name in found
        ]
        return [*rows, *self._darkest()]

    def _darkest(self) -> list[Claim]:
        """Check that the W_Q, W_K quadrant of the attention panel is the darkest."""
        if self.attention_names != list(ATTENTION):
            return []
        place = [self.names.index(name) for name in ATTENTION]
        median = self.median_abs[np.ix_(place, place)]
        dark, others = median[:2, :2].max(), min(median[2:, 2:].min(), median[:2, 2:].min())
        return [
            Claim(
                "W_Q, W_K quadrant against the rest of attention",
                "darkest",
                f"medians up to {dark:.1e}, elsewhere from {others:.1e}",
                AGREES if dark < others else DIFFERS,
                "figure",
            )
        ]

    def summary(self) -> list[Line]:
        """Return the main numbers, each with a label and an explanation."""
        entries = sum(self.sizes)
        return [(c.claim, c.measured, f"published {c.published}: {c.verdict}") for c in self.claims()] + [
            ("entries", f"{entries:,}²", f"exact, in float64; {len(self.names)} blocks")
        ]

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        low, high = self.limits
        own = {
            "parameters": f"{sum(self.sizes):,}", "blocks": len(self.names), "cell": CELL, "low": low,
            "high": high, "setting": IN_WORDS,
        }  # fmt: skip
        return {name: text.format(**own) for name, text in CAPTIONS.items()}

    def tables(self) -> Tables:
        """One row per pair of blocks; upper triangle with the diagonal."""
        rows = [
            {
                "row": one,
                "col": two,
                "rows": self.sizes[i],
                "cols": self.sizes[j],
                **{
                    name: float(getattr(self, name)[i, j])
                    for name in ("frobenius", "mean_abs", "median_abs", "max_abs")
                },
            }
            for i, one in enumerate(self.names)
            for j, two in enumerate(self.names)
            if i <= j
        ]
        return {"heatmap": rows}

    def figures(self) -> dict[str, Figure]:
        """Draw the two panels of the paper, and the blocks as numbers."""
        return {"heatmap": _panels(self), "heatmap_blocks": _blocks(self)}

    def scenes(self) -> dict[str, Scene]:
        """Return the two panels for a browser; hovering over a block shows its numbers."""
        return {"heatmap": _scene(self)}


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> HeatMap:
    """Compute the columns block by block, except those stored in `state`."""
    problem = small_problem("softmax", heatmap_data(), device=cfg.device)
    names = cfg.names
    pieces = [
        Piece(name, partial(_columns, problem, names[:number]), f"columns of {name}")
        for number, name in enumerate(names, start=1)
    ]
    contents = fingerprint(problem.model, problem.batches)
    results = work_through(pieces, contents=contents, progress=progress, state=state)
    return _joined(problem, names, [results.take(BlockColumns, name) for name in names])


def _columns(problem: Problem, rows: list[str]) -> BlockColumns:
    """Compute the columns of the last of these blocks, over the rows of all of them."""
    H = Hessian(problem).block(rows, rows[-1])
    dense = H.to_dense().cpu().numpy()
    blocks = [np.abs(dense[H.space.slices[name]]) for name in rows]
    in_attention = [name for name in rows if name in ATTENTION and rows[-1] in ATTENTION]
    entries = [dense[H.space.slices[name]] for name in in_attention]
    return BlockColumns(
        rows,
        np.array([np.linalg.norm(block) for block in blocks]),
        np.array([block.mean() for block in blocks]),
        np.array([np.median(block) for block in blocks]),
        np.array([block.max() for block in blocks]),
        np.array([block.min() for block in blocks]),
        pooled(colors(np.concatenate(blocks))).astype(np.float32),
        np.concatenate(entries or [dense[:0]]).astype(np.float32),
    )


def pooled(values: np.ndarray) -> np.ndarray:
    """Means over CELL × CELL entries."""
    m, n = values.shape
    return values.reshape(m // CELL, CELL, n // CELL, CELL).mean((1, 3))


def _joined(problem: Problem, names: list[str], columns: list[BlockColumns]) -> HeatMap:
    sizes = [problem.model.blocks[name].size for name in names]
    tables = {}
    for what in ("frobenius", "mean_abs", "median_abs", "max_abs", "min_abs"):
        tables[what] = np.zeros((len(names), len(names)))
        for j, part in enumerate(columns):
            tables[what][: j + 1, j] = tables[what][j, : j + 1] = getattr(part, what)
    own = [name for name in names if name in ATTENTION]
    return HeatMap(
        names,
        sizes,
        problem.loss_value(),
        **tables,
        picture=_mirrored([part.picture for part in columns]),
        attention_names=own,
        attention=_mirrored([columns[names.index(name)].entries for name in own]),
    )


def _mirrored(columns: list[np.ndarray]) -> np.ndarray:
    """Return the symmetric matrix from its columns down to the diagonal block."""
    n = sum(part.shape[1] for part in columns)
    matrix, start = np.zeros((n, n), np.float32), 0
    for part in columns:
        stop = start + part.shape[1]
        matrix[:stop, start:stop] = part[:stop]
        matrix[start:stop, :stop] = part[:stop].T
        start = stop
    return matrix


def _shown(result: HeatMap) -> dict[str, tuple[np.ndarray, list[str], list[int]]]:
    """Panels: title to values, block names and block sizes in pixels."""
    sizes = dict(zip(result.names, result.sizes, strict=True))
    panels = {"Transformer Block": (result.picture, result.names, [n // CELL for n in result.sizes])}
    if result.attention_names:
        values = colors(result.attention)
        panels["Self-Attention"] = (
            values,
            result.attention_names,
            [sizes[name] for name in result.attention_names],
        )
    return panels


def _panels(result: HeatMap) -> Figure:
    panels = _shown(result)
    figure, axes = style.subplots(1, len(panels), figsize=(4.8 * len(panels) + 0.8, 5.0), squeeze=False)
    image = None
    for ax, (title, (values, names, sizes)) in zip(axes[0], panels.items(), strict=True):
        image = entries_map(ax, values, names, sizes, result.limits)
        ax.set_title(title, pad=10)
    bar = figure.colorbar(image, ax=list(axes[0]), shrink=0.8, pad=0.02)  # pyright: ignore[reportArgumentType]
    bar.set_label(LABEL)
    return figure


def _blocks(result: HeatMap) -> Figure:
    low, high = result.limits
    values = colors(result.median_abs)
    side = 1.6 + 0.62 * len(result.names)
    figure, ax = style.subplots(figsize=(side + 1.2, side))
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    image = ax.imshow(values, vmin=low, vmax=high, cmap="viridis")
    ax.set_xticks(range(len(result.names)), result.names, rotation=90)
    ax.set_yticks(range(len(result.names)), result.names)
    ax.tick_params(length=0)
    for (i, j), value in np.ndenumerate(result.median_abs):
        dark = values[i, j] < (low + high) / 2 + 0.6
        ax.text(j, i, cell_text(value), ha="center", va="center", color="white" if dark else "black")
    ax.spines[:].set_linewidth(0)
    figure.colorbar(image, ax=ax, label="log10(median |entry| + 1e-6)", shrink=0.8)
    return figure


def _scene(result: HeatMap) -> Scene:
    import matplotlib.pyplot as plt

    figure = _panels(result)
    found = scene(figure)
    plt.close(figure)
    for number, (_, names, sizes) in enumerate(_shown(result).values(), start=1):
        key = "" if number == 1 else str(number)
        edges = [-0.5, *(np.cumsum(sizes) - 0.5).tolist()]
        found["data"].append(
            {
                "type": "heatmap", "x": edges, "y": edges, "z": [[0] * len(names)] * len(names), "opacity": 0,
                "showscale": False, "text": _words(result, names), "xaxis": f"x{key}", "yaxis": f"y{key}",
                "hovertemplate": "%{text}<extra></extra>",
            }
        )  # fmt: skip
    low, high = result.limits
    bar = {"title": {"text": LABEL, "side": "right"}, "len": 0.8}
    marker = {"colorscale": "Viridis", "cmin": low, "cmax": high, "color": [low], "colorbar": bar}
    found["data"].append({"type": "scatter", "mode": "markers", "x": [None], "y": [None], "marker": marker,
                          "showlegend": False, "hoverinfo": "skip"})  # fmt: skip
    return found


def _words(result: HeatMap, names: Sequence[str]) -> list[list[str]]:
    place = [result.names.index(name) for name in names]
    return [
        [
            f"{result.names[i]} × {result.names[j]}<br>Frobenius {result.frobenius[i, j]:.4g}<br>"
            f"mean {result.mean_abs[i, j]:.3g}, median {result.median_abs[i, j]:.3g}, "
            f"max {result.max_abs[i, j]:.3g}"
            for j in place
        ]
        for i in place
    ]


STUDY = Study(Config, run)

"""Figures of paths through the layers, with names beside their points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.viz import style
from curvescope.viz.scenes.curves import switched
from curvescope.viz.style import BLUE, ORANGE, PALETTE, PLUM, on_screen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.viz.interactive import Scene

__all__ = ["depth_curve", "path_grid", "path_scene", "share_bars", "short", "single_path", "token_map"]


MARKER = 3.5  # radius of a marker in points
DISTANCES = (4.5, 13.0)  # points from a marker to its name, nearer ones first; far names get a line
Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge of a box, in points."""
SIDES = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))


class Names(NamedTuple):
    """Points (n, 2) or (n, 3) with one name each."""

    points: np.ndarray
    names: Sequence[str]
    color: str
    size: float


class Marks(NamedTuple):
    """Marks that names should not cover: points (n, 2) or (n, 3), and their size."""

    points: np.ndarray
    radius: float = MARKER  # in typographic points


def name_points(
    ax: Any,
    groups: Sequence[Names],
    *,
    clear: Sequence[Marks],
    distances: Sequence[float] = DISTANCES,
) -> None:
    """Write the names of every group beside their points, the first group first. A name does not overlap
    other names or markers, and lies inside the figure; a name without such a position is left out. Call it
    after the limits, view and position of the axes are set.

    Args:
        distances: Distances from a marker to its name in points, nearer ones first; far names get a line.
    """
    taken = [_around(middle, mark.radius) for mark in clear for middle in _on_paper(ax, mark.points)]
    width, height = (72 * inches for inches in ax.figure.get_size_inches())
    for group in groups:
        for middle, name in zip(_on_paper(ax, group.points), group.names, strict=True):
            size = _size_of(name, group.size)
            for box, offset, far in _places(middle, size, distances):
                inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height
                if inside and not _touches(box, np.array(taken)):
                    _write(ax, name, middle, offset, far, group)
                    taken.append(box)
                    break


def along(path: np.ndarray, num_points: int = 12) -> np.ndarray:
    """Return points (m, 3) on the segments of a path (n, 3), which names should not cover."""
    shares = np.linspace(0, 1, num_points, endpoint=False)[:, None]
    parts = [a + shares * (b - a) for a, b in pairwise(path)]
    return np.concatenate([*parts, path[-1:]])


def _on_paper(ax: Any, points: np.ndarray) -> np.ndarray:
    """Return positions (n, 2) of points (n, 2 or 3) in the figure, in points from its lower left corner."""
    ax.apply_aspect()
    if points.shape[1] == 3:
        from mpl_toolkits.mplot3d import proj3d

        x, y, z = points.T
        x, y, _ = proj3d.proj_transform(x, y, z, ax.get_proj())
        points = np.column_stack([x, y])
    pixels = ax.transData.transform(points)
    return pixels * 72 / ax.figure.dpi


def _size_of(name: str, size: float) -> tuple[float, float]:
    """Return width and height of a name, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(name, FontProperties(size=size), ismath=False)
    return width + 1, size


def _places(
    middle: np.ndarray, size: tuple[float, float], distances: Sequence[float]
) -> Iterator[tuple[Box, tuple[float, float], bool]]:
    """Yield boxes for a name around a point, best first, with the center's offset, and True if far."""
    for distance in distances:
        for right, up in SIDES:
            reach = distance if right == 0 or up == 0 else distance / 2**0.5
            offset = (right * (reach + size[0] / 2), up * (reach + size[1] / 2))
            x, y = middle + offset
            box = (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
            yield box, offset, distance > distances[0]


def _around(middle: np.ndarray, radius: float) -> Box:
    x, y = middle
    return (x - radius, y - radius, x + radius, y + radius)


def _touches(box: Box, others: np.ndarray) -> bool:
    """Return True if a box overlaps one of the others (n, 4)."""
    left, lower, right, upper = others.reshape(-1, 4).T
    return bool(((box[0] < right) & (left < box[2]) & (box[1] < upper) & (lower < box[3])).any())


def _write(
    ax: Any, name: str, middle: np.ndarray, offset: tuple[float, float], far: bool, group: Names
) -> None:
    """Write a name whose center is `offset` away from a point, with a thin line to it if it is far."""
    place = ax.transData.inverted().transform(middle * ax.figure.dpi / 72)
    line = {"arrowstyle": "-", "lw": 0.4, "color": group.color, "shrinkA": 0, "shrinkB": MARKER}
    ax.annotate(
        name, place, offset, textcoords="offset points", ha="center", va="center", fontsize=group.size,
        color=group.color, annotation_clip=False, arrowprops=line if far else None,
    )  # fmt: skip


WORD, STATE, PATH = BLUE, on_screen(PLUM), ORANGE
ALL_PATHS = "all"
MAX_LABEL = 12
RING = 6.3  # radius of a ring in points


@style.in_style
def depth_curve(
    ax: Axes,
    names: Sequence[str],
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    baseline: tuple[np.ndarray, np.ndarray] | None = None,
    title: str = "",
    log_y: bool = False,
) -> Axes:
    """Draw quantities along the depth, each (mean, stderr) with a band of two standard errors.

    Args:
        names: Points of the model, `in, L0.mid, L0.out, …`; those inside a block get small markers.
        baseline: mean and stderr with shuffled targets, dashed and gray.
        log_y: a logarithmic axis for exp(mean), e.g. of the mean logarithm of a rank.
    """
    x = np.arange(len(names))
    inside = np.array([name.endswith(".mid") for name in names])
    drawn = list(curves.items()) + ([("shuffled targets", baseline)] if baseline is not None else [])
    for i, (label, (mean, stderr)) in enumerate(drawn):
        gray = baseline is not None and i == len(drawn) - 1
        color = "0.45" if gray else PALETTE[i % len(PALETTE)]
        low, mid, high = mean - 2 * np.nan_to_num(stderr), mean, mean + 2 * np.nan_to_num(stderr)
        if log_y:
            low, mid, high = np.exp(low), np.exp(mid), np.exp(high)
        ax.fill_between(x, low, high, color=color, alpha=0.22, lw=0)
        ax.plot(x, mid, "--" if gray else "-", color=color, lw=1.5, label=label)
        ax.plot(x[~inside], mid[~inside], "o", color=color, ms=4)
        ax.plot(x[inside], mid[inside], ".", color=color, ms=4)
    if log_y:
        ax.set_yscale("log")
    _depth_axis(ax, names)
    ax.set_title(title)
    if len(drawn) > 1:
        ax.legend()
    return ax


@style.in_style
def share_bars(ax: Axes, blocks: Sequence[str], share: np.ndarray, stderr: np.ndarray) -> Axes:
    """Draw what attention and feed-forward contribute to the step of every block; the two sum to one."""
    x = np.arange(len(blocks))
    ax.bar(x, share, color=PALETTE[0], label="attention", width=0.7)
    ax.bar(x, 1 - share, bottom=share, color=PALETTE[1], alpha=0.75, label="feed-forward", width=0.7)
    ax.errorbar(x, share, yerr=2 * np.nan_to_num(stderr), fmt="none", ecolor="black", lw=1)
    ax.set_xticks(x, list(blocks))
    ax.set(
        ylim=(min(0.0, float(share.min()) * 1.1), max(1.0, float(share.max()) * 1.1)),
        title="share of each block's step",
    )
    ax.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    return ax


@style.in_style
def token_map(
    ax: Axes,
    tokens: Sequence[str],
    names: Sequence[str],
    values: np.ndarray,
    *,
    label: str,
    words: Sequence[Sequence[str]] | None = None,
) -> Axes:
    """Draw one number per token (columns) and point (rows, deepest on top); `words` are written into it.

    Missing values are gray.
    """
    image = ax.imshow(values.T[::-1], aspect="auto", cmap=style.MAP, interpolation="nearest")
    ax.set_facecolor("0.9")
    ax.set_xticks(range(len(tokens)), [short(t) for t in tokens], rotation=60, ha="right")
    ax.set_yticks(range(len(names)), list(names)[::-1])
    ax.tick_params(length=0)
    if words is not None:
        for (i, j), value in np.ndenumerate(values):
            color = style.ink_at(image, value)
            text = short(str(words[i][j]), 7)
            ax.text(i, len(names) - 1 - j, text, ha="center", va="center", color=color)
    ax.figure.colorbar(image, ax=ax, label=label, pad=0.01)
    return ax


@style.in_style
def path_grid(
    words: np.ndarray, states: np.ndarray, tokens: Sequence[str], *, token: int, panels: Mapping[str, int]
) -> Figure:
    """Draw the states of all tokens at some depths, with the path of one token so far.

    Args:
        words: (T, 3) readout directions of the prompt's tokens.
        states: (T, L + 1, 3) states of the tokens at the input and after every block.
        token: Token whose path is drawn. panels: {title: one of the L + 1 depths}.
    """
    columns = -(-len(panels) // 2) if len(panels) > 3 else len(panels)
    rows = -(-len(panels) // columns)
    figure = _figure(3.7 * columns, 3.6 * rows)
    for i, (title, depth) in enumerate(panels.items()):
        ax: Any = figure.add_subplot(rows, columns, i + 1, projection="3d")
        path, here = states[token, : depth + 1], states[:, depth]
        ax.scatter(*words.T, color=WORD, s=14, marker="^", depthshade=False)
        ax.scatter(*here.T, color=STATE, s=14, depthshade=False)
        ax.plot(*path.T, color=PATH, lw=1.6)
        ax.scatter(*path[-1], color=PATH, s=30, depthshade=False)
        ax.set_title(title, y=0.96)
        _same_box(ax, words, states.reshape(-1, 3))
        others = [i for i in range(len(tokens)) if i != token]
        groups = [
            _names(path[-1:], [tokens[token]], PATH, 8),
            _names(here[others], [tokens[i] for i in others], STATE, 7),
        ]
        name_points(ax, groups, clear=[Marks(words), Marks(here), Marks(along(path))])
    _legend(figure, "token directions", "states", f"path of {short(tokens[token])!r}")
    return figure


@style.in_style
def single_path(
    words: np.ndarray,
    path: np.ndarray,
    tokens: Sequence[str],
    *,
    token: int,
    names: Sequence[str],
    target: int | None,
) -> Figure:
    """Draw the path (N, 3) of one token among the directions (T, 3) of the prompt's tokens, in three views.

    Args:
        names: Names of the points of the path; the ends of blocks are labeled.
        target: Token that the path should reach; it is ringed.
    """
    figure = _figure(13, 4.7)
    ends = [i for i, name in enumerate(names) if not name.endswith(".mid")]
    for i, (elevation, azimuth) in enumerate(((22, -60), (22, 30), (90, -90))):
        ax: Any = figure.add_subplot(1, 3, i + 1, projection="3d")
        ax.scatter(*words.T, color=WORD, s=14, marker="^", depthshade=False)
        ax.plot(*path.T, color=PATH, lw=1.4)
        ax.scatter(
            *path.T, c=np.arange(len(path)), cmap="autumn_r", s=26, depthshade=False, edgecolor="0.3", lw=0.4
        )
        ring = words[[]] if target is None else words[target : target + 1]
        ax.scatter(*ring.T, s=(2 * RING) ** 2, facecolor="none", edgecolor="black", lw=1.2, depthshade=False)
        _same_box(ax, words, path)
        ax.view_init(elevation, azimuth)
        order = [ends[0], ends[-1], *ends[1:-1]]
        groups = [
            _names(path[order], [names[i].removesuffix(".out") for i in order], PATH, 8),
            _names(words, tokens, WORD, 8, once=True),
        ]
        name_points(ax, groups, clear=[Marks(words), Marks(along(path)), Marks(ring, RING)])
    aim = f", ringed: {short(tokens[target])!r}" if target is not None else ""
    _legend(figure, f"token directions{aim}", None, f"path of {short(tokens[token])!r}, input to output")
    return figure


def path_scene(
    words: np.ndarray, states: np.ndarray, tokens: Sequence[str], names: Sequence[str], *, token: int
) -> Scene:
    """Return paths (T, N, 3) as plotly's JSON, one token at a time or all; `token` is shown first."""
    labels = [short(t) for t in tokens]
    choices = {f"{i}: {labels[i]}": [i] for i in [token, *(i for i in range(len(labels)) if i != token)]}
    first, *others = choices
    both = np.concatenate([words, states.reshape(-1, 3)])
    fixed = {
        f"{which}axis": {
            "showticklabels": False, "title": {"text": f"axis {i + 1}"}, "zeroline": False,
            "range": _padded_range(both[:, i]),
        }
        for i, which in enumerate("xyz")
    }  # fmt: skip
    layout = {
        "scene": {**fixed, "aspectmode": "data", "camera": {"eye": {"x": 1.6, "y": 1.6, "z": 1.1}}},
        "margin": {"l": 0, "r": 0, "t": 10, "b": 0},
        "height": 560, "showlegend": False,
    }  # fmt: skip

    def draw(path: str) -> Scene:
        data: list[Scene] = [
            _trace(words, "markers+text", on_screen(WORD), "token directions", text=labels, symbol="diamond")
        ]
        for i in choices.get(path, range(len(labels))):
            at = [f"{labels[i]} {name}" for name in names]
            color = PATH if i == token else STATE
            data.append(_trace(states[i], "lines+markers", color, f"{i}: {labels[i]}", hover=at, size=3))
        return {"data": data, "layout": layout}

    return switched({"path": [first, ALL_PATHS, *others]}, draw)


def _padded_range(values: np.ndarray) -> list[float]:
    """Return the ends of an axis, a twentieth beyond the values, the same for every path."""
    low, high = float(values.min()), float(values.max())
    room = 0.05 * (high - low or 1.0)
    return [round(low - room, 5), round(high + room, 5)]


def short(token: str, most: int = MAX_LABEL) -> str:
    """Return a token as a label: spaces and control characters visible, shortened, without mathematics."""
    shown = token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    shown = "".join(
        c if _drawable(c) else repr(c)[1:-1] if not c.isprintable() else f"U+{ord(c):04X}" for c in shown
    )
    shown = shown if len(shown) <= most else shown[: most - 1] + "…"
    return shown.replace("$", r"\$")


def _drawable(c: str) -> bool:
    """Return True if matplotlib's font has the character: Latin, Greek, Cyrillic, and the marks used here."""
    return c.isprintable() and (ord(c) < 0x530 or c in "␣⏎⇥…–—‘’“”•€")


def _trace(
    points: np.ndarray,
    mode: str,
    color: str,
    name: str,
    *,
    text: Sequence[str] | None = None,
    hover: Sequence[str] | None = None,
    symbol: str = "circle",
    size: int = 4,
) -> Scene:
    x, y, z = (np.round(column, 5).tolist() for column in points.T)
    return {
        "type": "scatter3d",
        "x": x, "y": y, "z": z,
        "mode": mode,
        "name": name,
        "text": list(text or hover or []),
        "hoverinfo": "text",
        "marker": {"size": size, "color": color, "symbol": symbol},
        "line": {"color": color, "width": 4},
    }  # fmt: skip


def _depth_axis(ax: Axes, names: Sequence[str]) -> None:
    shown = [i for i, name in enumerate(names) if not name.endswith(".mid")]
    step = max(1, len(shown) // 13)
    ax.set_xticks(shown[::step], [names[i].removesuffix(".out") for i in shown[::step]])
    ax.set_xlim(-0.4, len(names) - 0.6)
    ax.grid(axis="x", lw=0.3, color="0.9")


def _figure(width: float, height: float) -> Figure:
    """Create a figure with fixed axes above a legend of a third of an inch."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(width, height))
    figure.subplots_adjust(
        left=0.01, right=0.99, bottom=0.4 / height, top=1 - 0.3 / height, wspace=0.02, hspace=0.1
    )
    return figure


def _names(points: np.ndarray, tokens: Sequence[str], color: str, size: int, *, once: bool = False) -> Names:
    """Return tokens as names of points; with `once`, a repeated token at the same position is named once."""
    kept = [tokens.index(t) for t in dict.fromkeys(tokens)] if once else list(range(len(tokens)))
    return Names(points[kept], [short(tokens[i]) for i in kept], color, size)


def _same_box(ax: Any, *clouds: np.ndarray) -> None:
    """Set equal scales on the three axes, without ticks."""
    everything = np.concatenate(clouds)
    middle = (everything.max(0) + everything.min(0)) / 2
    half = float((everything.max(0) - everything.min(0)).max()) / 2 or 1.0
    for axis, center in zip(("x", "y", "z"), middle, strict=True):
        getattr(ax, f"set_{axis}lim")(center - half, center + half)
        getattr(ax, f"set_{axis}ticklabels")([])
    ax.set_box_aspect((1, 1, 1), zoom=1.12)
    ax.set_proj_type("ortho")
    ax.tick_params(color="0.85")
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.pane.set_facecolor("white")
        axis.pane.set_edgecolor("0.85")
        axis.line.set_color("0.85")
        axis._axinfo["grid"].update(color="0.93", linewidth=0.5)


def _legend(figure: Figure, words: str, states: str | None, path: str) -> None:
    from matplotlib.lines import Line2D

    entries = [Line2D([], [], color=WORD, marker="^", ls="", label=words)]
    if states is not None:
        entries.append(Line2D([], [], color=STATE, marker="o", ls="", label=states))
    entries.append(Line2D([], [], color=PATH, label=path))
    figure.legend(handles=entries, loc="lower center", ncols=3)

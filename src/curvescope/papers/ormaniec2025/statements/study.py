"""Statements of the paper and its slides, checked: exponents, structure, and rates that are only bounds.

Everything is exact, on small random instances in float64: closed forms of one head, and dense blocks of small
networks for depth and norms. `low` and `high` are the smallest and largest value over the instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from curvescope.closed_form.bounds import growth
from curvescope.core.hessian_terms import HALVES, SYMBOLS
from curvescope.core.progress import Progress
from curvescope.papers.common import FigureConfig
from curvescope.papers.ormaniec2025.statements import architecture, heads
from curvescope.papers.ormaniec2025.statements.heads import FAILS, OURS, VERDICTS, StatementGroup
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Claim, Line, Shown, Tables
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NUM_HEADS = {"quick": 5, "full": 20}
NUM_MODELS = {"quick": 2, "full": 5}
CAPTIONS = {
    "statements_data": "One softmax head with tokens σX. Top: norms of its blocks (one head), with the "
    "stated powers in gray. Middle: local slopes, mean over {heads} random heads. Gray lines are the "
    "stated exponents, which hold for small scores and are upper bounds for larger ones. Bottom: local "
    "slopes for tokens of mean zero, for which all blocks of H_o grow as σ⁶.",
    "statements_weights": "Exponents in the weights and in the attention moments, measured (mean over "
    "{heads} random heads) with the claimed one in brackets; a dash marks a block that is zero.",
    "statements_softmax": "Left: ratio of the H_o blocks of W_V and W_Q, with softmax and without, one line "
    "per head. Middle: negative eigenvalues of the Hessian over the scores' weights, with W_Q and W_K "
    "and with their product. Right: entries of the paper's model (5, 25, 50, 75, 95 %).",
    "statements_depth": "Left: H_o block of the first W_Q of linear attention, of softmax attention with "
    "skips, and of the first layer of a linear MLP. Right: one layer with Pre-LN (solid) and without a "
    "norm (dashed).",
    "statements": "Every statement: claimed value, mean over instances ({heads} heads or {models} networks "
    "and their layers) with the smallest and the largest, and a verdict from these numbers.",
}
PAIRS = ["".join(pair) for pair in growth.PAIRS]
COLORS = dict(zip(PAIRS, ("#1b9e77", "#66c2a5", "#0b5d48", "#d95f02", "#e6ab02", "#7570b3"), strict=True))
STYLES = {"QQ": "-", "QK": "--", "KK": ":", "QV": "-", "KV": "--", "VV": "-"}
DEPTH_COLORS = {"linear attention": "#1b9e77", "softmax": "#7570b3", "MLP": "#1b6ca8"}
GUIDE = {"color": "0.75", "lw": 0.8, "zorder": 0}


@dataclass(frozen=True)
class Config(FigureConfig):
    """The profile sets the number of random heads and networks."""


@dataclass(frozen=True)
class Statements(Shown):
    """All groups of statements."""

    num_heads: int
    num_models: int
    groups: dict[str, StatementGroup]

    def claims(self) -> list[Claim]:
        """Return one claim per group, and one for every statement that fails."""
        found = []
        for group in self.groups.values():
            counts = Counter(row.verdict for row in group.rows)
            words = ", ".join(f"{counts[v]} × {v.partition(',')[0]}" for v in VERDICTS if counts[v])
            worst = max(counts, key=VERDICTS.index)
            found.append(Claim(group.title, f"{len(group.rows)} statements", words, worst))
        return found + [
            Claim(
                row.statement, f"{row.claimed:g}", f"{row.measured:.3g}", row.verdict, row.where,
                "ours" if row.where == OURS else "paper",
            )
            for group in self.groups.values()
            for row in group.rows
            if row.verdict == FAILS
        ]  # fmt: skip

    def summary(self) -> list[Line]:
        """Return the main numbers, each with a label and an explanation."""
        return [(c.claim, c.published, f"{c.measured}") for c in self.claims()]

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        own = {"heads": self.num_heads, "models": self.num_models}
        return {name: text.format(**own) for name, text in CAPTIONS.items()}

    def tables(self) -> Tables:
        """One row per statement."""
        import pandas as pd

        columns = ("statement", "where", "claimed", "measured", "low", "high", "verdict", "note")
        rows = [{c: getattr(row, c) for c in columns} for g in self.groups.values() for row in g.rows]
        return {"statements": pd.DataFrame(rows, columns=list(columns))}

    def figures(self) -> dict[str, Figure]:
        """Return one figure per subject."""
        return {
            "statements_data": _data(self),
            "statements_weights": _weights(self),
            "statements_softmax": _softmax(self),
            "statements_depth": _depth(self),
        }


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Statements:
    """Measure the groups, except those stored in `state`."""
    num_heads, num_models = NUM_HEADS[cfg.profile], NUM_MODELS[cfg.profile]
    groups = _groups(num_heads, num_models, cfg.device)
    pieces = [Piece(name, measure) for name, measure in groups.items()]
    found = work_through(pieces, progress=progress, state=state)
    return Statements(num_heads, num_models, {name: found.take(StatementGroup, name) for name in groups})


def _groups(num_heads: int, num_models: int, device: str) -> dict[str, Callable[[], StatementGroup]]:
    return {
        "data": lambda: heads.growth_in_data(num_heads),
        "saturation": lambda: heads.saturation(num_heads),
        "targets": lambda: heads.scaled_targets(num_heads),
        "centering": lambda: heads.centering(num_heads),
        "weights": lambda: heads.growth_in_weights(num_heads),
        "moments": lambda: heads.attention_moments(num_heads),
        "softmax": lambda: architecture.heterogeneity(num_heads, device),
        "parameterization": lambda: architecture.parameterization(num_heads),
        "linear": lambda: architecture.linear(num_heads),
        "depth": lambda: architecture.depth(num_models),
        "pre_norm": lambda: architecture.pre_norm(num_models),
    }


def _data(result: Statements) -> Figure:
    curves = result.groups["data"].curves
    figure, axes = style.subplots(3, 2, figsize=(11, 9.6), sharex=True, sharey="row")
    for column, part in enumerate(HALVES):
        pairs = [pair for pair in PAIRS if growth.DATA.exponents((pair[0], pair[1]), part)]
        _norms(axes[0, column], curves, part, pairs)
        axes[0, column].set_title(f"{SYMBOLS[part]}, {_words(part)}")
        for row, prefix in ((1, "slope"), (2, "centered")):
            ax = axes[row, column]
            for level in (6, 5, 4, 3, 2, 0):
                ax.axhline(level, **GUIDE)
            for pair in pairs:
                ax.semilogx(curves["sigma"], curves[f"{prefix} {part} {pair}"], STYLES[pair],
                            color=COLORS[pair], lw=1.6)  # fmt: skip
            ax.set_ylim(-8, 8)
            ax.set_yticks([-6, -4, -2, 0, 2, 3, 4, 5, 6])
        axes[2, column].set_xlabel("scale σ of the tokens")
    axes[0, 0].set_ylabel("Frobenius norm, one head")
    axes[1, 0].set_ylabel("slope d log‖·‖ / d log σ")
    axes[2, 0].set_ylabel("slope, tokens of mean zero")
    return figure


def _words(part: str) -> str:
    return "GGN" if part == "outer" else "functional Hessian, ∂ℓ/∂F fixed"


def _norms(ax: Axes, curves: dict[str, np.ndarray], part: str, pairs: Sequence[str]) -> None:
    sigma = curves["sigma"]
    for pair in pairs:
        values = curves[f"norm {part} {pair}"]
        ax.loglog(sigma, values, STYLES[pair], color=COLORS[pair], lw=1.8, label=f"{pair[0]}, {pair[1]}")
    small = sigma <= 1.5
    for pair in [p for p in ("QQ", "QV", "VV") if p in pairs]:
        power = growth.DATA.slope((pair[0], pair[1]), part)  # pyright: ignore[reportArgumentType]
        assert power is not None
        values = curves[f"norm {part} {pair}"][0] * (sigma / sigma[0]) ** power
        ax.loglog(sigma[small], values[small], color="0.6", lw=0.8, ls="--", zorder=0)
        ax.annotate(
            f"σ$^{power}$", (sigma[4], values[4]), xytext=(-8, 7), textcoords="offset points",
            color="0.2",
        )  # fmt: skip
    ax.legend(ncols=2, loc="upper left")
    ax.set_ylim(1e-12, 1e8)


def _weights(result: Statements) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(13, 4.4), gridspec_kw={"width_ratios": [6, 7]})
    found = result.groups["weights"].curves
    tables = {"W_Q": growth.WEIGHTS_Q, "W_K": growth.WEIGHTS_K, "W_V": growth.WEIGHTS_V}
    rows, cells = [], []
    for weight, table in tables.items():
        for part in HALVES:
            claimed = [table.slope(pair, part) for pair in growth.PAIRS]
            rows.append(f"t {weight},  {SYMBOLS[part]}")
            cells.append(list(zip(found[f"{weight} {part}"], claimed, strict=True)))
    _tiles(axes[0], rows, [f"{p[0]}, {p[1]}" for p in PAIRS], cells)
    axes[0].set_title("exponents in the weights")
    _moment_tiles(axes[1], result.groups["moments"].curves)
    return figure


def _moment_tiles(ax: Axes, found: dict[str, np.ndarray]) -> None:
    rows, cells = [], []
    places = [(pair, 0) for pair in PAIRS]
    places.insert(2, ("QK", 1))
    for part in HALVES:
        for moment in ("M1", "M2", "M3"):
            rows.append(f"{SYMBOLS[part]} in {moment[0]}{'₁₂₃'[int(moment[1]) - 1]}")
            row = []
            for pair, number in places:
                value = found.get(f"{part} {pair}{number} {moment}")
                row.append((np.nan, None) if value is None else (value[1], int(value[0])))
            cells.append(row)
    names = [f"{pair[0]}, {pair[1]}" + ("\nmixed term" if number else "") for pair, number in places]
    _tiles(ax, rows, names, cells)
    ax.set_title("powers of the attention moments")


def _tiles(
    ax: Axes, rows: Sequence[str], columns: Sequence[str], cells: list[list[tuple[float, int | None]]]
) -> None:
    """Draw measured above claimed values, with a dash for blocks that are zero."""
    shades = np.array([[np.nan if want is None else value for value, want in row] for row in cells])
    ax.imshow(shades, cmap="BuGn", vmin=-0.6, vmax=3.2, aspect="auto")
    for i, row in enumerate(cells):
        for j, (value, want) in enumerate(row):
            if want is None:
                ax.text(j, i, "–", ha="center", va="center", color="0.6")
                continue
            ax.text(j, i - 0.12, f"{value:.3f}".replace("-0.000", "0.000"), ha="center", va="center")
            ax.text(j, i + 0.27, f"({want})", ha="center", va="center", color="0.25")
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(length=0)
    ax.spines[:].set_linewidth(0)


def _softmax(result: Statements) -> Figure:
    figure, axes = style.subplots(1, 3, figsize=(15, 4.4))
    found = result.groups["softmax"].curves
    sigma = found["sigma"]
    for kind, color in (("softmax", "#7570b3"), ("linear", "#1b9e77")):
        for i, line in enumerate(found[kind]):
            words = {"softmax": "with softmax", "linear": "without"}[kind] if i == 0 else None
            axes[0].loglog(sigma, line, color=color, lw=1.2, alpha=0.8, label=words)
    _guide(axes[0], sigma, float(np.median(found["softmax"][:, 0])), -4)
    axes[0].set(
        title="W_V against W_Q, with softmax and without",
        xlabel="scale σ of the tokens",
        ylabel="‖H_o(V, V)‖ / ‖H_o(Q, Q)‖",
    )
    axes[0].legend()
    found = result.groups["parameterization"].curves
    sigma = found["sigma"]
    for words, color, power in (("W_Q and W_K", "#d95f02", -3), ("one W_QK", "#1b6ca8", -1)):
        for i, line in enumerate(found[words]):
            axes[1].loglog(sigma, line, color=color, lw=1.2, alpha=0.8, label=words if i == 0 else None)
        _guide(axes[1], sigma, float(np.median(found[words][:, 0])), power)
    axes[1].set(
        title="two matrices are more indefinite than one",
        xlabel="scale σ of the tokens",
        ylabel="−λ_min(H) / λ_max(H_o)",
    )
    axes[1].legend()
    _entries(axes[2], result.groups["softmax"].curves)
    return figure


def _guide(ax: Axes, x: np.ndarray, start: float, power: int) -> None:
    part = x <= 0.3
    values = start * (x[part] / x[0]) ** power
    ax.loglog(x[part], values, color="0.3", lw=1, ls="--")
    ax.annotate(f"σ$^{{{power}}}$", (x[part][-1], values[-1]), xytext=(4, 4), textcoords="offset points")


def _entries(ax: Axes, found: dict[str, np.ndarray]) -> None:
    """Draw boxes from five quantiles, by block and attention."""
    colors, labels = {"L0.W_V": "#7570b3", "L0.W_Q": "#1b9e77"}, []
    for x, (kind, block) in enumerate((k, b) for k in ("softmax", "linear") for b in colors):
        low, q1, median, q3, high = found[f"entries {kind} {block}"]
        ax.plot([x, x], [low, high], color=colors[block], lw=1.2)
        ax.bar(x, q3 - q1, 0.5, bottom=q1, color=colors[block], alpha=0.6, log=True)
        ax.plot([x - 0.25, x + 0.25], [median, median], color="black", lw=1.4)
        labels.append(f"{block.removeprefix('L0.')}\n{'with' if kind == 'softmax' else 'without'} softmax")
    ax.set_xticks(range(4), labels)
    ax.set(ylabel="|entry| of the Hessian block", title="the paper's own model")


def _depth(result: Statements) -> Figure:
    figure, axes = style.subplots(1, 3, figsize=(15, 4.6))
    curves = result.groups["depth"].curves
    for name, values in curves.items():
        if name == "sigma":
            continue
        kind, depth = name.rsplit(", ", 1)
        axes[0].loglog(
            curves["sigma"], values / values[len(values) // 2], color=DEPTH_COLORS[kind], lw=1.8,
            ls={"1": "-", "2": "--", "3": ":" if kind != "MLP" else "--", "5": ":"}[depth],
            label=f"{kind}, depth {depth}",
        )  # fmt: skip
    axes[0].set_ylim(1e-30, 1e30)
    axes[0].legend(loc="upper left")
    axes[0].set(
        title="growth with depth",
        xlabel="scale σ of the tokens",
        ylabel="‖H_o‖ of the first layer, 1 at σ = 1",
    )
    curves = result.groups["pre_norm"].curves
    for ax, weight in zip(axes[1:], ("W_Q", "W_V"), strict=True):
        for part, color in (("H_o", "#1b6ca8"), ("H_f", "#d95f02")):
            ax.loglog(
                curves["sigma"], curves[f"pre {part} {weight}"], color=color, lw=1.8, label=f"{part}, Pre-LN"
            )
            plain = curves[f"none {part} {weight}"]
            if plain.any():
                ax.loglog(curves["sigma"], plain, color=color, lw=1.2, ls="--", label=f"{part}, no norm")
        ax.set(
            ylim=(1e-12, 1e4),
            title=f"Pre-LN: {weight}, one layer",
            xlabel="scale σ of the tokens",
            ylabel="Frobenius norm",
        )
        ax.legend(loc="lower right")
    return figure

"""Growth: Frobenius norms of the blocks of W_Q and W_V against the scale σ of the embeddings.

H = H_o + H_f (GGN and functional Hessian) for all sweeps of the paper: softmax attention of depth 1 to 5, on
logarithmic and linear grids, pre-norm, linear attention of depth 1 to 3, and linear MLPs. All computations
use float64. Layers are counted from 0. `growth_sweeps` explains which norms are exact and which are estimated
with probes. By default one draw of the embeddings is scaled along σ, so that curves are smooth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.papers.common import AUTHORS_CODE, FigureConfig
from curvescope.papers.ormaniec2025.growth_exponents import Slope, laws, published_curves, slopes
from curvescope.papers.ormaniec2025.growth_sweeps import (
    EXPERIMENTS,
    PAPER_PROBES,
    PARTS,
    REPEATS,
    RandomSource,
    SweepExperiment,
    chosen,
    measure,
    sweep_tokens,
)
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study import Study
from curvescope.runs.study_result import HOLDS, Claim, Line, Shown, Tables
from curvescope.viz import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
NEAR = 3.0  # standard errors within which a mean agrees with the published one
CAPTION = (
    "{title}. Frobenius norm of diagonal blocks against the standard deviation σ of the embeddings. "
    "Lines: mean of {repeats} repeats ({draw}) with its standard error as a band; {method}. Dots with "
    "bars: published mean of 20 repeats with its standard error. Gray: slopes drawn in the paper. "
    "Layers are counted from 0. Data: 64 sums of two five-digit numbers, 18 tokens. {network}"
)
CAPTIONS = {
    "growth": "Every norm; stderr is the standard error over probes, 0 if the norm is exact.",
    "slopes": "Slopes of log mean against log σ per regime: claimed by the paper, published (fitted to its "
    "data) and measured, with a 95 % jackknife interval over repeats. `expected` is the theoretical "
    "exponent in the regime, if there is one.",
}
NETWORKS = {
    "softmax": "Network: width 128, one head, ReLU feed-forward of width 512, skips, cross-entropy.",
    "linear": "Network: width 128, one head, attention only, no skips, squared error.",
    "mlp": "Network: linear layers of width 128 without biases, squared error.",
}
COLORS = {"W_V": "#7570b3", "W_Q": "#1b9e77", "W": "#2060c0"}
TITLES = {"H_o": "$H_o$ (GGN)", "H_f": "$H_f$ (functional Hessian)", "H": "$H$"}
LINES = 24  # most lines of a family of guides
TICKS = {
    "log": (0.01, 0.1, 1, 10),
    "log_short": (0.1, 0.2, 0.5, 1),
    "linear": (0, 1, 4, 7, 10),
    "linear_short": (0, 0.5, 1),
}


@dataclass(frozen=True)
class Config(FigureConfig):
    """Sweeps and effort; None stands for the default of the profile.

    `quick` has 3 repeats, every second scale and 4 probes. `full` has 20 repeats, all scales, and 20 probes
    on a GPU or 4 on a CPU. With `replay`, weights, embeddings and probes are the paper's own.
    """

    experiments: tuple[str, ...] = setting(
        ("*",), "glob patterns of the sweeps, e.g. softmax_none_ce_log_L[12]"
    )
    repeats: int | None = setting(None, "repeats of every sweep; by default 3 (quick) or 20 (full)", least=1)
    probes: int | None = setting(
        None, "probes per block of an inner layer; by default 4, or 20 (full, on a GPU)", least=1
    )
    every: int | None = setting(None, "2 takes every second scale; by default 2 (quick) or 1 (full)", least=1)
    redraw: bool | None = setting(
        None, "draw new embeddings at every scale, as in the paper; by default only with replay"
    )
    exact: bool = setting(
        True, "compute the last layer in closed form; otherwise with probes, as in the paper"
    )
    seed: int = setting(0, "seed of weights, embeddings and probes, without replay")

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen(self.experiments)
        if self.replay and (self.num_repeats > REPEATS or self.num_probes > PAPER_PROBES):
            raise UsageError(f"replay: the paper has only {REPEATS} repeats and {PAPER_PROBES} probes")
        if self.replay and self.redraw is False:
            raise UsageError(
                "redraw: expected true or nothing with replay, because the paper draws at every scale"
            )

    @property
    def num_repeats(self) -> int:
        """Number of repeats of every sweep."""
        return self.repeats or (3 if self.profile == "quick" else REPEATS)

    @property
    def num_probes(self) -> int:
        """Number of probes of a block in an inner layer."""
        many = self.profile == "full" and torch.device(self.device).type != "cpu"
        return self.probes or (PAPER_PROBES if many else 4)

    @property
    def step(self) -> int:
        """Stride of the scales."""
        return self.every or (2 if self.profile == "quick" else 1)


@dataclass(frozen=True)
class SweepPoints(Result):
    """Norms at some scales of one repeat, in the order of the experiment's rows."""

    frobenius: np.ndarray  # (scales, rows)
    stderr: np.ndarray  # (scales, rows) over probes, 0 if exact


@dataclass(frozen=True)
class GrowthSweep(Result):
    """One sweep with all repeats."""

    experiment: str
    indices: np.ndarray  # (S,) indices of the scales in the paper's grid
    sigma: np.ndarray  # (S,)
    frobenius: np.ndarray  # (repeats, S, rows)
    stderr: np.ndarray  # (repeats, S, rows)
    slopes: list[list[Any]]  # rows of the table of exponents, as `Slope`

    @property
    def setting(self) -> SweepExperiment:
        """The experiment."""
        return EXPERIMENTS[self.experiment]

    def table_of_slopes(self) -> list[Slope]:
        """The exponents."""
        return [Slope(*row) for row in self.slopes]

    def curve(self, block: str, part: str, layer: int) -> np.ndarray:
        """Norms of a block: (repeats, S)."""
        return self.frobenius[:, :, [tuple(row) for row in self.setting.rows].index((block, part, layer))]


@dataclass(frozen=True)
class GrowthCurves(Shown):
    """All sweeps in the settings."""

    settings: dict[str, Any]
    sweeps: dict[str, GrowthSweep]

    def claims(self) -> list[Claim]:
        """Return one claim per kind of sweep, block, part and regime; ranges are over depths and layers.

        The table of slopes lists all of them by layer, including those without a published counterpart.
        """
        groups: dict[tuple[str, ...], list[Slope]] = {}
        for sweep in self.sweeps.values():
            if sweep.setting.grid.startswith("linear"):
                continue  # this network is also on the logarithmic grid
            for row in sweep.table_of_slopes():
                if (math.isnan(row.claimed) and math.isnan(row.expected)) or math.isnan(row.published):
                    continue
                power = "no exponent" if math.isnan(row.claimed) else f"σ^{row.claimed:g}"
                scales = f"{row.sigma_lo:g} ≤ σ ≤ {row.sigma_hi:g}"
                key = family(sweep.setting), row.block, row.part, scales, power
                groups.setdefault(key, []).append(row)
        return [_claim(key, rows) for key, rows in groups.items()]

    def summary(self) -> list[Line]:
        """Return the main numbers, each with a label and an explanation."""
        rows = [row for sweep in self.sweeps.values() for row in sweep.table_of_slopes()]
        laws = [row for row in rows if row.expected == row.claimed]
        claimed = [row for row in rows if not math.isnan(row.claimed)]
        held, all_held = (sum(row.verdict == HOLDS for row in some) for some in (laws, claimed))
        near, of = agreement(self.sweeps.values())
        zeros = [
            float(np.abs(sweep.curve(*row)).max())
            for sweep in self.sweeps.values()
            for row in sweep.setting.rows
            if sweep.setting.is_zero(*row)
        ]
        settings = self.settings
        own = "the paper's own random numbers" if settings["replay"] else f"own seed {settings['seed']}"
        bent = "hold, including ranges in which curves bend and saturate"
        of_laws = "claimed exponents hold in the regimes with a theoretical exponent"
        inside = f"points with σ ≤ 1 within {NEAR:g} standard errors of the published mean"
        lines = [
            ("sweeps", str(len(self.sweeps)), f"{settings['repeats']} repeats each, {own}"),
            ("exponents", f"{held} of {len(laws)}", of_laws),
            ("on all ranges", f"{all_held} of {len(claimed)}", bent),
            ("published means", f"{near} of {of}", inside),
        ]
        if zeros:
            lines.append(("structural zeros", f"{max(zeros):g}", f"largest norm of {len(zeros)} such curves"))
        return lines

    def captions(self) -> dict[str, str]:
        """Return the caption of each figure and table."""
        settings = self.settings
        draw = (
            "new embeddings at every σ"
            if settings.get("redraw") or settings["replay"]
            else "one draw of the embeddings per repeat, scaled"
        )
        lines = {}
        for name, sweep in self.sweeps.items():
            words = title(sweep.setting)
            lines[f"growth_{name}"] = CAPTION.format(
                title=f"{words[0].upper()}{words[1:]}",
                repeats=settings["repeats"],
                draw=draw,
                method=_method(sweep, settings),
                network=NETWORKS[sweep.setting.family],
            )
        return lines | CAPTIONS

    def tables(self) -> Tables:
        """Return every norm and every exponent."""
        import pandas as pd

        growth = [_frame(sweep) for sweep in self.sweeps.values()]
        exponents = [
            {"experiment": name, **row._asdict()}
            for name, sweep in self.sweeps.items()
            for row in sweep.table_of_slopes()
        ]
        columns = ["experiment", *Slope._fields]
        return {"growth": growth, "slopes": pd.DataFrame(exponents, columns=columns)}

    def figures(self) -> dict[str, Figure]:
        """Return one figure per sweep."""
        return {f"growth_{name}": draw_sweep(sweep) for name, sweep in self.sweeps.items()}


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> GrowthCurves:
    """Measure the sweeps."""
    tokens = sweep_tokens().to(cfg.device)
    redraw = bool(cfg.redraw) or cfg.replay
    weights = lru_cache(1)(RandomSource.weights)  # cached for all pieces of a repeat
    pieces = []
    for experiment in chosen(cfg.experiments):
        for repeat in range(cfg.num_repeats):
            source = RandomSource(experiment, repeat, cfg.seed, cfg.replay, redraw, cfg.device)
            pieces += [
                Piece(name, partial(_points, cfg, source, weights, tokens, indices))
                for name, indices in _pieces(cfg, experiment, repeat)
            ]
    found = work_through(pieces, progress=progress, state=state)
    sweeps = {e.name: _sweep(cfg, e, found) for e in chosen(cfg.experiments)}
    return GrowthCurves({**cfg.to_dict(), **_meaning(cfg)}, sweeps)


def _meaning(cfg: Config) -> dict[str, int]:
    """Return the profile's values of the settings that are None."""
    return {"repeats": cfg.num_repeats, "probes": cfg.num_probes, "every": cfg.step}


def _indices(cfg: Config, experiment: SweepExperiment) -> list[int]:
    return list(range(0, len(experiment.sigmas), cfg.step))


def _pieces(cfg: Config, experiment: SweepExperiment, repeat: int) -> Iterator[tuple[str, list[int]]]:
    """Yield names of pieces, and the scales in each."""
    name, indices = f"{experiment.name}.r{repeat:02d}", _indices(cfg, experiment)
    if not experiment.slow:
        yield name, indices
        return
    for index in indices:
        yield f"{name}.s{index:02d}", [index]


def _points(
    cfg: Config,
    source: RandomSource,
    weights: Callable[[RandomSource], dict[str, torch.Tensor]],
    tokens: torch.Tensor,
    indices: list[int],
) -> SweepPoints:
    with torch.no_grad():
        found = [
            measure(source, index, weights(source), tokens, probes=cfg.num_probes, exact=cfg.exact)
            for index in indices
        ]
    return SweepPoints(np.stack([norm for norm, _ in found]), np.stack([stderr for _, stderr in found]))


def _sweep(cfg: Config, experiment: SweepExperiment, found: FinishedPieces) -> GrowthSweep:
    repeats = [
        [found.take(SweepPoints, name) for name, _ in _pieces(cfg, experiment, repeat)]
        for repeat in range(cfg.num_repeats)
    ]
    frobenius = np.stack([np.concatenate([p.frobenius for p in pieces]) for pieces in repeats])
    stderr = np.stack([np.concatenate([p.stderr for p in pieces]) for pieces in repeats])
    indices = np.array(_indices(cfg, experiment))
    sigma = experiment.sigmas[indices]
    exponents = slopes(experiment, sigma, frobenius, lenient=cfg.profile == "quick")
    return GrowthSweep(experiment.name, indices, sigma, frobenius, stderr, [list(row) for row in exponents])


def _frame(sweep: GrowthSweep) -> pd.DataFrame:
    """One row per block, part, layer, scale and repeat."""
    import pandas as pd

    repeats, scales, _ = sweep.frobenius.shape
    parts = [
        pd.DataFrame(
            {
                "experiment": sweep.experiment,
                "block": block,
                "part": part,
                "layer": layer,
                "sigma": np.tile(sweep.sigma, repeats),
                "repeat": np.repeat(np.arange(repeats), scales),
                "frobenius": sweep.frobenius[:, :, k].ravel(),
                "stderr": sweep.stderr[:, :, k].ravel(),
            }
        )
        for k, (block, part, layer) in enumerate(sweep.setting.rows)
    ]
    return pd.concat(parts, ignore_index=True)


def title(experiment: SweepExperiment) -> str:
    """Describe an experiment in words."""
    depth = "one layer" if experiment.depth == 1 else f"{experiment.depth} layers"
    if experiment.family == "mlp":
        return f"linear MLP, {depth}"
    if experiment.family == "linear":
        return f"linear attention, {depth}, squared error"
    norm = "pre-norm" if experiment.norm == "pre" else "no norm"
    return f"softmax attention, {depth}, {norm}"


def family(experiment: SweepExperiment) -> str:
    """Name the kind of sweep: all depths together, unless depth changes the exponent."""
    if experiment.family == "linear":
        return title(experiment)
    return {"mlp": "linear MLPs", "softmax": "softmax, pre-norm" if experiment.norm == "pre" else "softmax"}[
        experiment.family
    ]


def _claim(key: tuple[str, ...], rows: list[Slope]) -> Claim:
    kind, block, part, scales, power = key
    return Claim(
        f"{kind}: {block}, {part} ~ {power} for {scales}",
        _range(row.published for row in rows),
        _range(row.measured for row in rows),
        _verdict([row.verdict for row in rows]),
        AUTHORS_CODE,
    )


def _range(values: Iterable[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} to {high}"


def _verdict(verdicts: list[str]) -> str:
    kinds = sorted(set(verdicts), key=verdicts.count, reverse=True)
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{kind} ({verdicts.count(kind)} of {len(verdicts)})" for kind in kinds)


def agreement(sweeps: Iterable[GrowthSweep]) -> tuple[int, int]:
    """Count the means with σ ≤ 1 within NEAR standard errors of the published ones, and all such means."""
    near = of = 0
    for sweep in sweeps:
        small = sweep.sigma <= 1
        for curve, published in published_curves(sweep.experiment).items():
            values = sweep.curve(*curve)[:, small]
            mean, then = values.mean(0), published.mean[sweep.indices][small]
            spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            error = np.hypot(spread / math.sqrt(len(values)), published.stderr[sweep.indices][small])
            known = np.isfinite(then) & (then > 0) & np.isfinite(error)
            near += int((np.abs(mean - then) <= NEAR * error)[known].sum())
            of += int(known.sum())
    return near, of


def _method(sweep: GrowthSweep, settings: dict) -> str:
    if not settings["exact"] and sweep.setting.family != "mlp":
        return f"from {settings['probes']} probes"
    if sweep.setting.depth == 1 or sweep.setting.family == "mlp":
        return "norms are exact"
    return f"exact in the last layer, from {settings['probes']} probes in the others"


def draw_sweep(sweep: GrowthSweep) -> Figure:
    """Draw rows W_V and W_Q, columns H_o, H_f, H; one panel for an MLP, because its H_f is zero."""
    experiment = sweep.setting
    if experiment.family == "mlp":
        figure, ax = style.subplots(figsize=(7.6, 4.4))
        panel(ax, sweep, "W", "H")
        ax.set(title=title(experiment), ylabel="‖block‖ F", xlabel="σ of the embeddings")
        _key(figure, COLORS["W"])
        return figure
    figure, axes = style.subplots(2, 3, figsize=(12, 6.6), sharex=True)
    for ax_row, block in zip(axes, experiment.blocks, strict=True):
        for ax, part in zip(ax_row, PARTS, strict=True):
            panel(ax, sweep, block, part)
        ax_row[0].set_ylabel(f"{block[0]}$_{block[2]}$:  ‖block‖ F", color=COLORS[block])
    for ax, part in zip(axes[0], PARTS, strict=True):
        ax.set_title(TITLES[part])
    for ax in (*axes[0], *axes[1]):
        ax.set_xlabel("σ of the embeddings" if ax in axes[1] else "")
    figure.suptitle(title(experiment))
    _key(figure, "0.3")
    return figure


def panel(ax: Axes, sweep: GrowthSweep, block: str, part: str) -> None:
    """Draw one block and part for all layers."""
    experiment, depth = sweep.setting, sweep.setting.depth
    shown = [layer for layer in range(depth) if not experiment.is_zero(block, part, layer)]
    _scales(ax, experiment)
    if not shown:
        ax.set_yticks([])
        _note(ax, "exactly 0", at=(0.5, 0.5))
        return
    for layer in shown:
        fade = (layer + 2) / (depth + 1)
        _line(ax, sweep, (block, part, layer), fade)
        _dots(ax, sweep, (block, part, layer), fade)
    _limits(ax, sweep, block, part, shown)
    _guides(ax, experiment, block, part, shown[-1])
    _slopes(ax, sweep, block, part)
    if len(shown) < depth:
        ax.plot([], [], color="white", label=f"{depth - 1} (exactly 0)")
    if depth > 1:
        ax.legend(title="layer", loc="upper left", handlelength=1.2)


def _line(ax: Axes, sweep: GrowthSweep, curve: tuple[str, str, int], fade: float) -> None:
    values = sweep.curve(*curve)
    mean, color = values.mean(0), COLORS[curve[0]]
    ax.plot(sweep.sigma, mean, color=color, alpha=fade, lw=1.8, label=str(curve[2]))
    if len(values) > 1:
        error = values.std(0, ddof=1) / math.sqrt(len(values))
        low = np.maximum(mean - error, mean * 1e-2)  # zero has no position on a logarithmic axis
        ax.fill_between(sweep.sigma, low, mean + error, color=color, alpha=0.25 * fade, lw=0)


def _dots(ax: Axes, sweep: GrowthSweep, curve: tuple[str, str, int], fade: float) -> None:
    found = published_curves(sweep.experiment).get(curve)
    if found is None:
        return
    good = np.isfinite(found.mean) & (found.mean > 0)
    x, mean, error = sweep.setting.sigmas[good], found.mean[good], np.nan_to_num(found.stderr[good])
    bars = np.stack([np.minimum(error, 0.99 * mean), error])
    ax.errorbar(
        x, mean, bars, fmt="o", ms=3.2, mfc="white", mec=COLORS[curve[0]], ecolor=COLORS[curve[0]],
        alpha=min(1.0, fade + 0.1), elinewidth=0.8, mew=0.8, zorder=3,
    )  # fmt: skip


def _scales(ax: Axes, experiment: SweepExperiment) -> None:
    logarithmic = experiment.grid.startswith("log")
    if logarithmic:
        ax.set(xscale="log", yscale="log")
        low, high = experiment.sigmas[0], experiment.sigmas[-1]
        ax.set_xlim(low * (low / high) ** 0.03, high * (high / low) ** 0.03)
    else:
        ax.set_xlim(0, experiment.sigmas[-1] * 1.03)
    ax.set_xticks(TICKS[experiment.grid], [f"{tick:g}" for tick in TICKS[experiment.grid]])
    ax.minorticks_off()
    ax.axvline(1, color="0.4", lw=0.8, ls=":")


def _limits(ax: Axes, sweep: GrowthSweep, block: str, part: str, shown: list[int]) -> None:
    means = [sweep.curve(block, part, layer).mean(0) for layer in shown]
    published = published_curves(sweep.experiment)
    means += [published[key].mean for layer in shown if (key := (block, part, layer)) in published]
    values = np.concatenate(means)
    values = values[np.isfinite(values) & (values > 0)]
    if sweep.setting.grid.startswith("log"):
        spare = (values.max() / values.min()) ** 0.06
        ax.set_ylim(values.min() / 3 / spare, values.max() * 3 * spare)
    else:
        ax.set_ylim(0, values.max() * 1.1)


def _guides(ax: Axes, experiment: SweepExperiment, block: str, part: str, layer: int) -> None:
    """Draw dashed lines c^i σ^e, i = …, −1, 0, 1, …, for the exponent drawn in the paper."""
    slope = next((law.claimed for law in laws(experiment, block, part, layer)), None)
    if slope is None:
        return
    low, high = ax.get_ylim()
    if experiment.grid.startswith("log"):
        x = experiment.sigmas[[0, -1]]
        ends = np.log10(np.clip([low, high], 1e-290, None))[:, None] - slope * np.log10(x)
        step = max(1.0, round(float(np.ptp(ends)) / LINES))
        factors = 10.0 ** np.arange(math.floor(ends.min()), math.ceil(ends.max()) + 1, step)
    else:
        x, factors = np.linspace(0, experiment.sigmas[-1], 60), 2.0 ** np.arange(-30, 12)
        factors = factors[(factors * x[-1] ** slope > 0.02 * high) & (factors * x[-1] ** slope < 500 * high)]
    for factor in factors:
        ax.plot(x, factor * x**slope, color="0.5", alpha=0.3, lw=0.8, ls="--", zorder=0)
    ax.set_ylim(low, high)


def _slopes(ax: Axes, sweep: GrowthSweep, block: str, part: str) -> None:
    """Write the claimed and the measured slope of each regime, over the layers."""
    rows = [row for row in sweep.table_of_slopes() if (row.block, row.part) == (block, part)]
    lines = [f"claimed: σ$^{{{row.claimed:g}}}$" for row in rows[:1] if not math.isnan(row.claimed)]
    # The regimes in between are only in the table.
    short = {row.regime for row in rows} >= {"small σ", "large σ"}
    rows = [row for row in rows if not (short and row.regime.startswith("σ"))]
    for low, high in dict.fromkeys((row.sigma_lo, row.sigma_hi) for row in rows):
        own = [row.measured for row in rows if (row.sigma_lo, row.sigma_hi) == (low, high)]
        ends = sorted({f"{min(own):.2f}", f"{max(own):.2f}"}, key=float)
        lines.append(f"slope {' to '.join(ends)} on [{low:g}, {high:g}]")
    corner = (0.04, 0.04) if sweep.setting.norm == "pre" else (0.98, 0.04)
    if not sweep.setting.grid.startswith("log"):
        corner = (0.04, 0.98)
    if lines:
        _note(ax, "\n".join(lines), at=corner)


def _key(figure: Figure, color: str) -> None:
    """Draw the legend of lines and dots once for the figure."""
    from matplotlib.lines import Line2D

    ours = Line2D([], [], color=color, lw=1.8, label="measured: mean ± standard error")
    dots = Line2D(
        [], [], color=color, marker="o", mfc="white", ms=4, ls="", label="published: mean ± standard error"
    )
    gray = Line2D([], [], color="0.5", alpha=0.5, lw=0.8, ls="--", label="claimed slope")
    figure.legend(handles=[ours, dots, gray], loc="outside lower center", ncols=3)


def _note(ax: Axes, text: str, *, at: tuple[float, float]) -> None:
    ax.text(
        *at, text, transform=ax.transAxes, color="0.2", va="top" if at[1] > 0.7 else "bottom",
        ha="left" if at[0] < 0.3 else "right" if at[0] > 0.7 else "center",
        bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1.5}, zorder=4,
    )  # fmt: skip


STUDY = Study(Config, run)

"""Questions of the paper's reviewers, each answered by a measurement with a verdict.

The public reviews asked about deeper models, the term that the O-notation drops, other architectures, the
range of σ, one query-key matrix against two, the gradient, and the effect of softmax on the query blocks.
Each question has measurements (`pieces`) and conclusions (`answers`). Second derivatives are exact, in
float64, on networks that are small enough for dense matrices. Intervals are over seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.papers.ormaniec2025.reviewers import orders, softmax
from curvescope.papers.ormaniec2025.reviewers.answers import (
    Answer,
    exponents,
    local_slopes,
)
from curvescope.papers.ormaniec2025.reviewers.networks import DATA, PARTS, Config, NormSweep
from curvescope.papers.ormaniec2025.reviewers.softmax import (
    NAMES,
    RATES,
    WAYS,
    Curved,
    HeadBlockNorms,
    TrainingLosses,
)
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Claim, Line, Shown, Tables
from curvescope.studies.common.statistics import Interval, geometric_interval, mean_interval
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


R = TypeVar("R", bound=Result)
QUESTIONS = sorted([*orders.QUESTIONS, *softmax.QUESTIONS], key=lambda question: question.number)
BASE = (
    "one-layer Transformer: one softmax head, width 4, W_O, ReLU feed-forward of width 5, skips, no "
    "norm, no biases, {parameters} parameters at initialization"
)
OVER = "Means over {seeds} seeds of weights and embeddings, with 95 % intervals"
CAPTIONS = {
    "reviewers_depth": "Exponents of σ in ‖H_o‖ and ‖H‖ of every W_Q, W_K and W_V, fitted for σ from 0.0003 "
    "to 0.003, with the paper's exponents for one layer (lines). {over}. Data: {data}. Networks: the "
    "{base}, changed as labeled (all see all has no causal mask: σ from 0.01 to 0.04). Several dots of one "
    "label are its layers.",
    "reviewers_dropped": "Left: ‖∂ℓ/∂F‖ of a term, the factor that the O-notation drops, against σ: 2(F − "
    "Y) for squared error, p − y for cross-entropy. Right: ‖H_f(W_Q)‖ over σ⁵. At σ = 0.1 of the fitted "
    "case both are zero and not shown. {over}. Data: {data}; for squared error the targets are these "
    "digits as one-hot vectors, changed as labeled. Network: the {base}.",
    "reviewers_architectures": "Exponents of σ in ‖H‖ of every block of weights, for σ from 0.0003 to "
    "0.003. {over}. Data: {data}. Networks: the {base}; an MLP and a gated MLP on the last six tokens, "
    "a causal convolutional network, a causal MLP-mixer and a tanh RNN, with 144 to 161 parameters each.",
    "reviewers_regimes": "Local slopes d log ‖block‖ / d log σ of H over six decades of σ. A line ends if "
    "the block is zero in float64. Bands are 95 % intervals over {seeds} seeds. Data: {data}. Networks: "
    "{settings}.",
    "reviewers_merged": "Left: −λ_min(H)/λ_max(H_o) over the weights of the scores, with W_Q and W_K and "
    "with their product, against σ (cross-entropy, at initialization). Middle and right: loss of "
    "full-batch training at σ = 1 on {sums} sums, for each parameterization and seed with the best of "
    "{rates} learning rates. Lines are means over {seeds} seeds, bands 95 % intervals. Data: {data}. "
    "Network: the {merged}, with a head of width 2: W_Q and W_K together have as many entries as W_QK.",
    "reviewers_gradient": "Norms of the blocks of the gradient, of H_o and of H against σ. {over}. Data: "
    "{data}. Network: the {base}.",
    "reviewers_softmax": "Ratio of ‖block‖ of H with softmax and without, against the temperature τ of the "
    "scores q kᵀ/(τ√d_K). Left: without softmax, the scores are the weights. Right: the scores divided "
    "by the number of visible tokens are the weights. Geometric means over {heads} seeds with 95 % "
    "intervals. One causal head of width 4, in closed form, on the tokens of the {task} at σ = 1, with "
    "squared error against normal targets.",
    "reviewers": "Every answer: claim, expected value, measured value, the number that decides with its 95 "
    "% interval over seeds, and the verdict.",
    "reviewers_norms": "Every norm of every sweep.",
    "reviewers_ranges": "Regimes of σ for each seed: ranges whose local slopes differ by at most 0.5.",
    "reviewers_temperature": "Ratio of ‖block‖ of H with softmax and without: geometric mean and 95 % "
    "interval.",
}
ROLE_COLORS: dict[str, str] = dict(zip(("W_Q", "W_K", "W_V", "W_O"), PALETTE, strict=False))
DASHES = {"targets ∝ σ": ":", "fitted at σ = 0.1": "--"}


@dataclass(frozen=True)
class Reviewers(Shown):
    """All measurements, by name of their piece."""

    settings: dict[str, Any]
    seeds: int
    found: dict[str, Result]

    def of(self, kind: type[R], prefix: str = "") -> dict[str, R]:
        """Return the pieces of a kind whose names start with `prefix`."""
        return {
            name: one for name, one in self.found.items() if isinstance(one, kind) and name.startswith(prefix)
        }

    def answers(self) -> list[Answer]:
        """Return every answer, question by question."""
        return [row for question in QUESTIONS for row in question.answers(self.found)]

    def claims(self) -> list[Claim]:
        """Return every answer as a claim."""
        return [row.as_claim() for row in self.answers()]

    def summary(self) -> list[Line]:
        """Count the claims of each question by verdict."""
        rows = self.answers()
        found = []
        for one in QUESTIONS:
            counts = Counter(row.verdict.partition(" with ")[0] for row in rows if row.question == one.number)
            words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            found.append((f"question {one.number}", words, one.text))
        return found

    def captions(self) -> dict[str, str]:
        """Return the caption of every figure and table, with data and architecture."""
        data = DATA.format(sequences=self.settings["sequences"])
        own = {
            "data": data,
            "task": data.partition(" (")[0],
            "base": BASE.format(parameters=152),
            "merged": BASE.format(parameters=120),
            "seeds": self.seeds,
            "heads": len(self.of(HeadBlockNorms)["softmax"].softmax),
            "settings": "; ".join(orders.SETTINGS.values()),
            "sums": softmax.SUMS,
            "rates": len(RATES["Adam"]),
        }
        own["over"] = OVER.format(seeds=self.seeds)
        return {name: text.format(**own) for name, text in CAPTIONS.items()}

    def tables(self) -> Tables:
        """One row per answer, norm, regime, and block with temperature."""
        import pandas as pd

        columns = ("question", "claim", "expected", "measured", "value", "low", "high", "verdict", "source")
        rows = [{name: getattr(row, name) for name in columns} for row in self.answers()]
        return {
            "reviewers": pd.DataFrame(rows, columns=list(columns)),
            "reviewers_norms": _norms(self),
            "reviewers_ranges": _ranges(self),
            "reviewers_temperature": _temperature(self),
        }

    def figures(self) -> dict[str, Figure]:
        """Return one figure per question."""
        return {
            "reviewers_depth": _depth(self),
            "reviewers_dropped": _dropped(self),
            "reviewers_architectures": _architectures(self),
            "reviewers_regimes": _regimes(self),
            "reviewers_merged": _merged(self),
            "reviewers_gradient": _gradient(self),
            "reviewers_softmax": _softmax(self),
        }


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Reviewers:
    """Measure everything that is not stored in `state`."""
    todo = {name: work for question in QUESTIONS for name, work in question.pieces(cfg).items()}
    found = work_through([Piece(name, work) for name, work in todo.items()], progress=progress, state=state)
    return Reviewers(cfg.to_dict(), cfg.count, {name: found.take(Result, name) for name in todo})


def _norms(result: Reviewers) -> list[dict[str, Any]]:
    return [
        {"sweep": name, "block": block, "part": part, "sigma": sigma, "seed": seed,
         "norm": one.norms[seed, s, p, b], "loss_slope": one.slope[seed, s]}
        for name, one in result.of(NormSweep).items()
        for seed in range(len(one.norms))
        for s, sigma in enumerate(one.sigma)
        for p, part in enumerate(PARTS)
        for b, block in enumerate(one.blocks)
    ]  # fmt: skip


def _ranges(result: Reviewers) -> list[dict[str, Any]]:
    return [
        {"setting": case, "part": part, "block": block, "seed": seed, **regime._asdict()}
        for case, part, block in dict.fromkeys(law[:3] for law in orders.LAWS)
        for seed, own in enumerate(orders.regimes_of(result.of(NormSweep)[f"regime.{case}"], part, block))
        for regime in own
    ]


def _temperature(result: Reviewers) -> list[dict[str, Any]]:
    one = result.of(softmax.HeadBlockNorms)["softmax"]
    return [
        {"block": block, "temperature": tau, "against": over,
         **geometric_interval(one.ratio(block, t, over=over))._asdict()}
        for over in ("linear", "mean")
        for block in softmax.NAMES
        for t, tau in enumerate(one.temperatures)
    ]  # fmt: skip


def band(ax: Axes, x: np.ndarray, curves: np.ndarray, *, linear: bool = False, **look: Any) -> None:
    """Draw the mean of curves (seeds, x) with its interval: geometric, unless `linear`."""
    known = np.isfinite(curves).all(0) & (linear | (curves > 0).all(0))
    if not known.any():
        return
    of = mean_interval if linear else geometric_interval
    means = np.array([of(column) for column in curves[:, known].T])
    ax.plot(x[known], means[:, 0], lw=1.4, **look)
    ax.fill_between(x[known], means[:, 1], means[:, 2], color=look["color"], alpha=0.18, lw=0)


def dots(
    ax: Axes, means: Sequence[Interval], places: Any, *, color: Any, label: str = "", upright: bool = False
) -> None:
    """Means with their intervals, side by side if `upright`."""
    values = np.array(means)
    errors = style.error_bars(*values.T)
    look = {"fmt": "o", "ms": 4, "lw": 1, "color": color, "label": label or None}
    if upright:
        ax.errorbar(places, values[:, 0], yerr=errors, **look)
    else:
        ax.errorbar(values[:, 0], places, xerr=errors, **look)


def _merged(result: Reviewers) -> Figure:
    """Draw indefiniteness, and training with each optimizer."""
    curvature = result.of(Curved)["merged.curvature"]
    figure, axes = style.subplots(1, 1 + len(RATES), figsize=(12, 3.6))
    for way, words in enumerate(WAYS):
        band(axes[0], curvature.sigma, curvature.negative[:, :, way], color=PALETTE[way], label=words)
        for ax, how in zip(axes[1:], RATES, strict=True):
            losses = result.of(TrainingLosses)[f"merged.{how}"].best()[way]
            band(ax, np.arange(1, losses.shape[-1] + 1), losses, linear=True, color=PALETTE[way], label=words)
    for ax, how in zip(axes[1:], RATES, strict=True):
        ax.set(title=f"loss, {how}", xscale="log", xlabel="step")
        ax.grid(visible=True)
    axes[0].set(xscale="log", yscale="log")
    axes[0].grid(visible=True)
    axes[0].set(title="−λ_min(H)/λ_max(H_o)", xlabel="σ")
    axes[0].legend()
    return figure


def _softmax(result: Reviewers) -> Figure:
    """Draw ratios of all blocks against temperature, for both kinds of attention without softmax."""
    heads = result.of(HeadBlockNorms)["softmax"]
    figure, axes = style.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    titles = {"linear": "against the scores as weights", "mean": "against their mean over tokens"}
    for ax, (over, title) in zip(axes, titles.items(), strict=True):
        for i, block in enumerate(NAMES):
            ratios = np.stack([heads.ratio(block, t, over=over) for t in range(len(heads.temperatures))], 1)
            color = (*PALETTE, "0.35")[i]
            look = {"color": color, "label": f"({block[0]}, {block[1]})", "marker": "o", "ms": 3.5}
            band(ax, heads.temperatures, ratios, **look)
        ax.set(xscale="log", yscale="log")
        ax.grid(visible=True)
        ax.axhline(1, color="0.4", lw=0.8, ls=":")
        ax.set(title=title, xlabel="temperature τ")
    axes[0].set_ylabel("‖H(block)‖ with softmax / without")
    style.shared_legend(figure, axes[0], loc="outside right center")
    return figure


def _depth(result: Reviewers) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(10, 4.6), sharey=True)
    for ax, part in zip(axes, ("H_o", "H"), strict=True):
        for (of, role), power in orders.ORDERS.items():
            if of == part:
                ax.axvline(power, color=ROLE_COLORS[role], lw=0.8, ls=":", zorder=0)
        for row, case in enumerate(orders.DEPTH_CASES):
            found = result.of(NormSweep)[f"depth.{case}"]
            for block in found.blocks:
                role = block.partition(".")[2]
                mean = mean_interval(exponents(found.sigma, found.curve(part, block)))
                place = -row + 0.22 * (list(ROLE_COLORS).index(role) - 1)
                label = role if not row and block[1] == "0" else ""
                dots(ax, [mean], [place], color=ROLE_COLORS[role], label=label)
        ax.set(title=f"exponents of ‖{part}‖", xlabel="power of σ")
        ax.grid(visible=True)
    axes[0].set_yticks([-row for row in range(len(orders.DEPTH_CASES))], list(orders.DEPTH_CASES))
    axes[1].legend(loc="upper right")
    return figure


def _dropped(result: Reviewers) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(10.5, 4))
    for i, case in enumerate(orders.TARGETS):
        found = result.of(NormSweep)[f"dropped.{case}"]
        divided = found.curve("H_f", orders.BLOCK) / found.sigma**5
        color, dashes = (*PALETTE, "0.35")[i], DASHES.get(case, "-")
        for ax, curves in zip(axes, (found.slope, divided), strict=True):
            above = 3 if case in DASHES else 2  # draws dashed lines above the lines they coincide with
            band(ax, found.sigma, curves, color=color, label=case, ls=dashes, zorder=above)
    titles = "‖∂ℓ/∂F‖ of a term", "‖H_f(W_Q)‖/σ⁵: level where the order holds"
    for ax, title in zip(axes, titles, strict=True):
        ax.set(xscale="log", yscale="log")
        ax.grid(visible=True)
        ax.set(title=title, xlabel="σ")
    style.shared_legend(figure, axes[0], loc="outside right center")
    return figure


def _architectures(result: Reviewers) -> Figure:
    names = list(orders.ARCHITECTURES)
    sweeps = {name: result.of(NormSweep)[f"architecture.{name}"] for name in names}
    figure, axes = style.subplots(1, len(names), figsize=(13, 3.4), sharey=True,
        width_ratios=[len(one.blocks) for one in sweeps.values()],
    )  # fmt: skip
    for ax, (name, one) in zip(axes, sweeps.items(), strict=True):
        for i, part in enumerate(("H_o", "H")):
            means = [mean_interval(values) for values in orders.block_orders(one, part).T]
            places = np.arange(len(one.blocks)) + 0.2 * (i - 0.5)
            dots(ax, means, places, color=PALETTE[i], label=part, upright=True)
        labels = [block.removeprefix("L0.") for block in one.blocks]
        ax.set_xticks(range(len(labels)), labels)
        ax.set(xlim=(-0.6, len(labels) - 0.4), title=f"{name}\n{sum(one.sizes)} parameters")
        ax.grid(visible=True)
    axes[0].set(ylabel="power of σ", ylim=(0, 6.6))
    axes[0].legend(loc="upper right")
    return figure


def _regimes(result: Reviewers) -> Figure:
    figure, axes = style.subplots(1, len(orders.SETTINGS), figsize=(13, 3.6), sharey=True)
    for ax, case in zip(axes, orders.SETTINGS, strict=True):
        found = result.of(NormSweep)[f"regime.{case}"]
        middle = np.sqrt(found.sigma[1:] * found.sigma[:-1])
        for i, block in enumerate(found.blocks):
            slopes = np.array([local_slopes(found.sigma, curve) for curve in found.curve("H", block)])
            known = np.isfinite(slopes).all(0)
            label, dashes = block.removeprefix("L0."), "--" if i % 2 else "-"
            band(ax, middle[known], slopes[:, known], linear=True, color=PALETTE[i], label=label, ls=dashes)
        ax.set(xscale="log", title=case, xlabel="σ")
        ax.axhline(0, color="0.6", lw=0.6)
        ax.axvline(1, color="0.4", lw=0.8, ls=":")
        ax.legend(loc="lower left", ncols=2)
        ax.grid(visible=True)
    axes[0].set(ylabel="local slope of ‖H‖", ylim=(-8, 8))
    return figure


def _gradient(result: Reviewers) -> Figure:
    found = result.of(NormSweep)["regime.softmax"]
    figure, axes = style.subplots(1, 3, figsize=(12, 3.8), sharex=True)
    for ax, part in zip(axes, ("gradient", "H_o", "H"), strict=True):
        for role in orders.ROLES:
            slope = mean_interval(orders.gradient_order(found, part, role)).value
            curves = found.curve(part, f"L0.{role}")
            label, ls = f"{role}: σ$^{{{slope:.1f}}}$", "--" if role in ("W_K", "W_O") else "-"
            band(ax, found.sigma, curves, color=ROLE_COLORS[role], label=label, ls=ls)
        ax.set(xscale="log", yscale="log")
        ax.grid(visible=True)
        ax.set_ylim(found.curve(part, "L0.W_Q")[:, 0].min() / 10, 1e6)
        ax.axvline(1, color="0.4", lw=0.8, ls=":")
        ax.set(title="gradient" if part == "gradient" else f"${part}$", xlabel="σ")
        ax.legend(loc="upper left")
    axes[0].set_ylabel("norm of the block")
    return figure

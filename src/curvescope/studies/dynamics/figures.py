"""The figures of the study `dynamics`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.dynamics.checkpoint_figures import draw as draw_checkpoints
from curvescope.studies.dynamics.checkpoint_figures import panels, plain
from curvescope.studies.dynamics.edge import NEAR
from curvescope.studies.dynamics.grokking import phases
from curvescope.studies.dynamics.spikes import SIGNALS, alarms, onset
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.dynamics.course import Course
    from curvescope.studies.dynamics.study import Dynamics


def draw(result: Dynamics) -> dict[str, Figure]:
    """One figure an experiment; of checkpoints their course and the map of blocks."""
    if result.sequence is not None:
        return draw_checkpoints(result.sequence)
    found: dict[str, Figure] = {}
    if runs := result.of("edge"):
        found["edge"] = _edge(runs)
    if runs := result.of("adam"):
        found["adam"] = _adam(runs[0])
    if result.of("warmup"):
        found["warmup"] = _warmup(result)
    if result.of("spikes"):
        found["spikes"] = _spikes(result)
    if runs := result.of("grokking"):
        found["grokking"] = _grokking(runs)
    return found


def _with_threshold(ax: Axes, bound: float, words: str) -> None:
    ax.axhspan(bound * (1 - NEAR), bound * (1 + NEAR), color="0.93", lw=0)
    ax.axhline(bound, color="0.3", lw=1, ls="--", label=words)


def _points(ax: Axes, run: Course, name: str, color: str, label: str) -> None:
    errors = run.seen.history.get(f"{name}_error")
    ax.errorbar(
        run.measured, run.column(name), yerr=None if errors is None else np.nan_to_num(errors), fmt="-o",
        ms=3, lw=1.2, color=color, label=label,
    )  # fmt: skip


def _loss(ax: Axes, run: Course, color: str = PALETTE[0], **options: Any) -> None:
    ax.plot(np.arange(len(run.loss)), run.loss, color=color, **{"lw": 1.0, **options})
    ax.set_yscale("log")
    ax.set_xlabel("step")


def _edge(runs: list[Course]) -> Figure:
    figure, axes = panels(2, len(runs), figsize=(1 + 4.3 * len(runs), 5.4), sharex=True)
    for j, run in enumerate(runs):
        rate = float(run.lr[-1])
        top, bottom = axes[0][j], axes[1][j]
        _with_threshold(top, 2 / rate, f"2/η = {2 / rate:.1f}")
        _points(top, run, "lambda_max", PALETTE[1], "λ_max")
        plain(top, f"gradient descent, η = {rate:.3g}")
        top.set_ylim(bottom=0)
        top.legend(fontsize=8, frameon=False, loc="lower right")
        _loss(bottom, run)
        plain(bottom)
    axes[0][0].set_ylabel("λ_max")
    axes[1][0].set_ylabel("loss")
    return figure


def _adam(run: Course) -> Figure:
    figure, axes = panels(2, 2, figsize=(9.6, 5.4), sharex=True)
    rate = float(run.lr[-1])
    bound = float(np.nanmax(run.column("sharpness_threshold"))) / rate
    _with_threshold(axes[0][0], bound, f"{bound * rate:.0f}/η = {bound:,.0f}")
    _points(axes[0][0], run, "sharpness", PALETTE[1], "λ_max of P^(−½) H P^(−½)")
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8, frameon=False, loc="lower right")
    _points(axes[0][1], run, "lambda_max", PALETTE[0], "λ_max of H")
    axes[0][1].set_ylim(bottom=0)
    plain(axes[0][0], f"Adam, η = {rate:.3g}: preconditioned sharpness")
    plain(axes[0][1], "λ_max of H itself")
    _loss(axes[1][0], run)
    axes[1][0].set_ylabel("loss")
    plain(axes[1][0])
    axes[1][1].plot(run.measured, run.column("grad_share"), "-o", ms=3, lw=1.2, color=PALETTE[2])
    axes[1][1].set_xlabel("step")
    axes[1][1].set_ylim(-0.02, 1.02)
    plain(axes[1][1], "share of ‖g‖² in the top eigenspace")
    return figure


def _warmup(result: Dynamics) -> Figure:
    figure, axes = panels(2, 2, figsize=(9.6, 5.4), sharex=True, sharey="row")
    for j, (way, words) in enumerate({"without": "without warm-up", "with": "with warm-up"}.items()):
        runs = result.of("warmup", way)
        for i, run in enumerate(runs):
            _loss(
                axes[0][j], run, PALETTE[1] if onset(run) is not None else PALETTE[0], alpha=0.8, zorder=3 - i
            )
        spiked = sum(onset(run) is not None for run in runs)
        axes[0][j].set_xlabel("")
        plain(axes[0][j], f"{words}: {spiked} of {len(runs)} runs spike (orange)")
        one = runs[0]
        ratio = one.column("lr_sharpness") / one.column("sharpness_threshold")
        axes[1][j].plot(one.measured, ratio, "-o", ms=3, lw=1.2, color=PALETTE[2])
        axes[1][j].axhline(1, color="0.3", lw=1, ls="--")
        axes[1][j].set_xlabel("step")
        axes[1][j].set_yscale("log")
        plain(axes[1][j], "η · sharpness over its threshold, first run")
    axes[0][0].set_ylabel("loss")
    return figure


def _spikes(result: Dynamics) -> Figure:
    columns = {"above": result.of("spikes", "above")[0], "below": result.of("spikes", "below")[0]}
    figure, axes = panels(3, 2, figsize=(10.4, 6.6), sharex=True, sharey="row", height_ratios=[2, 2, 1.3])
    for j, (way, run) in enumerate(columns.items()):
        loss, ratio, marks = (axes[i][j] for i in range(3))
        _loss(loss, run)
        loss.set_xlabel("")
        plain(loss, f"η rises to {run.lr[-1]:.3g}, {way} the ceiling")
        ratio.plot(run.measured, run.column("lr_lambda_max"), "-o", ms=3, lw=1.2, color=PALETTE[1])
        ratio.axhline(2, color="0.3", lw=1, ls="--")
        plain(ratio, "η λ_max, threshold 2")
        for i, (_, on) in enumerate(alarms(run).items()):
            marks.plot(run.measured[on], np.full(int(on.sum()), i), "s", ms=4, color=PALETTE[1])
        marks.set_yticks(range(len(SIGNALS)), list(SIGNALS), fontsize=8)
        marks.set_ylim(len(SIGNALS) - 0.5, -0.5)
        marks.set_xlabel("step")
        plain(marks, "beyond its threshold")
        if (step := onset(run)) is not None:
            for ax in (loss, ratio, marks):
                ax.axvline(step, color=PALETTE[0], lw=0.8)
    axes[0][0].set_ylabel("loss")
    return figure


def _grokking(runs: list[Course]) -> Figure:
    figure, axes = panels(3, len(runs), figsize=(1 + 4.3 * len(runs), 7.2), sharex=True, sharey="row")
    for j, run in enumerate(runs):
        found = phases(run)
        axes[0][j].plot(run.evaluated, run.accuracy, color=PALETTE[0], lw=1.4, label="trained on")
        axes[0][j].plot(run.evaluated, run.held_out_accuracy, color=PALETTE[1], lw=1.4, label="held out")
        axes[0][j].legend(fontsize=8, frameon=False, loc="lower right")
        plain(axes[0][j], f"accuracy, seed {run.seed}")
        _points(axes[1][j], run, "lambda_max", PALETTE[1], "")
        plain(axes[1][j], "λ_max of the training loss")
        axes[2][j].plot(
            run.measured, run.column("lambda_max") / run.column("loss"), "-o", ms=3, lw=1.2, color=PALETTE[2]
        )
        plain(axes[2][j], "λ_max over the loss")
        for ax in (axes[1][j], axes[2][j]):
            ax.set_yscale("log")
        axes[2][j].set_xlabel("step")
        if found.delayed:
            assert found.memorized is not None
            assert found.generalized is not None
            ends = run.evaluated[[found.memorized, found.generalized]]
            for i in range(3):
                axes[i][j].axvspan(*ends, color="0.92", lw=0)
    return figure

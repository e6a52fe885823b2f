"""The history of a training run: its columns, what the loss shows by itself, and the largest stable rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from curvescope.core.number_format import rounded
from curvescope.core.result import Result
from curvescope.runs.live_history import BLOCKS, STEPS, LiveHistory

Columns = Mapping[str, np.ndarray]

FORMED = 0.05  # 1 − β₂ᵗ below which Adam's preconditioner is not formed, and its sharpness says nothing
FIRST_STEPS = 10  # of a run: no sharpness of an adaptive optimizer counts before
WINDOW = 20  # steps of the running median of the loss
BACK = 20  # steps within which the loss returns after a spike that a batch made
MOST_LOSSES = 20_000  # training steps that are kept one by one; beyond, the largest of each bin


@dataclass(frozen=True)
class RunHistory:
    """Columns that a monitor has written, by name. A missing column counts as not measured."""

    columns: Columns  # (S,) each: measurements
    blocks: Columns = field(default_factory=dict)  # (R,) each: blocks of measurements
    steps: Columns = field(default_factory=dict)  # (N,) each: training steps that told their loss

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        block_rows: Sequence[Mapping[str, Any]] = (),
        step_rows: Sequence[Mapping[str, Any]] = (),
    ) -> RunHistory:
        """A history from the rows of `history.csv`, `blocks.csv` and `steps.csv`."""
        return cls(*(_as_columns(some) for some in (rows, block_rows, step_rows)))

    @property
    def at(self) -> np.ndarray:
        """Steps (S,) of the measurements."""
        return self.columns.get("step", np.zeros(0))

    def column(self, name: str) -> np.ndarray:
        """A column (S,); nan marks rows that did not measure it."""
        return self.columns.get(name, np.full(len(self.at), np.nan))

    def until(self, step: float) -> RunHistory:
        """The history up to a step."""
        return RunHistory(*(_until(some, step) for some in (self.columns, self.blocks, self.steps)))

    @property
    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and losses: those of all training steps, or else those on the probe batches."""
        if not len(self.steps.get("step", ())):
            return self.at, self.column("loss")
        at, loss = self.steps["step"], self.steps["loss"]
        if len(at) <= MOST_LOSSES:
            return at, loss
        bins = np.linspace(0, len(at), MOST_LOSSES + 1).astype(int)[:-1]
        return at[bins], np.maximum.reduceat(loss, bins)  # the largest of each, so that a spike is seen

    @cached_property
    def trouble(self) -> Trouble:
        """Signs of trouble in the loss alone."""
        return _read_trouble(self)

    @property
    def num_steps(self) -> float:
        """Steps from the first to the last that is known."""
        ends = [float(s[-1]) for s in (self.at, self.losses[0]) if len(s)]
        return max(ends, default=0.0) - (float(self.at[0]) if len(self.at) else 0.0) + 1

    def ratio(self) -> np.ndarray:
        """η · sharpness over the optimizer's threshold, (S,), minus its error.

        The first steps of an adaptive optimizer are left out: its preconditioner is not formed yet.
        """
        seen, limit, name = self.column("lr_sharpness"), self.column("sharpness_threshold"), "sharpness"
        if not np.isfinite(seen).any():
            seen, limit, name = self.column("lr_lambda_max"), self.column("threshold"), "lambda_max"
        top = np.where(self.column(name) != 0, self.column(name), np.nan)
        low = 1 - np.nan_to_num(self.column(f"{name}_error") / np.abs(top))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = seen / limit * np.clip(low, 0.0, 1.0)
        return np.where(self.is_formed(), ratio, np.nan)

    def is_formed(self) -> np.ndarray:
        """True for each measurement whose sharpness counts, (S,)."""
        formed = self.column("preconditioner_formed")
        plain = formed == 1.0
        known = np.where(np.isnan(formed), True, formed >= FORMED)
        late = self.at >= (self.at[0] if len(self.at) else 0) + FIRST_STEPS
        adaptive = np.isnan(self.column("threshold")) & np.isfinite(self.column("sharpness_threshold"))
        return plain | (known & (late | ~adaptive))

    def blocks_at(self, step: float, column: str) -> dict[str, float]:
        """A column of the blocks at a measurement, where it is known."""
        if column not in self.blocks:
            return {}
        known = (self.blocks["step"] == step) & np.isfinite(self.blocks[column])
        names, values = self.blocks["block"][known], self.blocks[column][known]
        return {str(name): float(value) for name, value in zip(names, values, strict=True)}


def read_run(folder: Path) -> RunHistory:
    """The history in the folder of a monitor, finished or not."""
    run = LiveHistory(folder)
    return RunHistory.from_rows(run.rows, run.table(BLOCKS), run.table(STEPS))


def _as_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row)
    words = {"block", "left_out"}
    return {
        name: np.array([row.get(name, "" if name in words else math.nan) for row in rows])
        if name in words
        else np.array([row.get(name, math.nan) for row in rows], float)
        for name in names
    }


def _until(columns: Columns, step: float) -> Columns:
    if "step" not in columns:
        return columns
    known = columns["step"] <= step
    return {name: values[known] for name, values in columns.items()}


# ------------------------------------------------------------------------------------------------- the loss


class Trouble(NamedTuple):
    """Signs of trouble in the loss alone."""

    spikes: list[int]  # steps at which a spike begins
    sizes: list[float]  # of each: height over the usual spread
    diverged: int | None  # first step from which on the loss is beyond all that it was, or not finite
    lowest: float  # of the running median

    @property
    def first(self) -> int | None:
        """The first step with a sign of it."""
        steps = [*self.spikes, *([] if self.diverged is None else [self.diverged])]
        return min(steps, default=None)


SPIKE = 6.0  # height over the usual spread of the loss around its running median: 3.9 in healthy runs
HIGHER = 1.15  # and over the median itself
ABOVE_START = 1.1  # times the first loss: 1.02 in healthy runs
DIVERGED = 2.0  # times the first loss, and it stays there
SETTLED = 10  # steps before which the usual spread is not known


def _read_trouble(history: RunHistory) -> Trouble:
    """Spikes of the loss, and where it diverges."""
    at, loss = history.losses
    known = np.isfinite(loss) if len(loss) else np.zeros(0, bool)
    broken = int(at[np.flatnonzero(~known)[0]]) if len(loss) and not known.all() else None
    if len(at) == len(history.at) and broken is not None and not _is_bad(history, broken):
        broken = None  # the probe loss was not measured there
    at, loss = at[known], loss[known]
    if len(loss) < 2:
        return Trouble([], [], broken, math.nan)
    every_step = len(history.steps.get("step", ())) > 0
    window, settled = (WINDOW, SETTLED) if every_step else (3, 4)
    middle = _medians_before(loss, window)
    rest, begun = loss - middle, max(float(loss[0]), float(np.median(loss[:5] if every_step else loss[:1])))
    spread = 1.4826 * _medians_before(np.abs(rest), 2 * window)
    spread = np.maximum(np.maximum(spread, 0.01 * np.abs(middle)), 1e-12)
    jumps = (rest > SPIKE * spread) & (loss > HIGHER * middle) & (np.arange(len(loss)) >= settled)
    spikes, sizes = [], []
    for i in np.flatnonzero(jumps | (loss > ABOVE_START * begun)):
        if not spikes or at[i] - spikes[-1] > BACK:
            spikes.append(int(at[i]))
            sizes.append(float(rest[i] / spread[i]))
    beyond = loss > DIVERGED * begun
    tail = np.flatnonzero(~beyond)
    start = int(tail[-1]) + 1 if len(tail) else 0
    if start < len(loss) and len(loss) - start >= min(3, len(loss) - 1):
        broken = min(int(at[start]), broken) if broken is not None else int(at[start])
    return Trouble(spikes, sizes, broken, float(middle.min()))


def _medians_before(values: np.ndarray, window: int) -> np.ndarray:
    """The median (N,) of up to `window` values before each one; of the first, itself."""
    few = [np.median(values[max(i - window, 0) : max(i, 1)]) for i in range(min(window, len(values)))]
    if len(values) <= window:
        return np.array(few)
    windows = np.lib.stride_tricks.sliding_window_view(values[:-1], window)
    return np.concatenate([few, np.median(windows, axis=1)])


def _is_bad(history: RunHistory, step: int) -> bool:
    """Return True if a measurement has no probe loss because its weights are not finite."""
    i = int(np.flatnonzero(history.at == step)[0])
    norm = history.column("weight_norm")
    return bool(i == len(history.at) - 1 and not np.isfinite(norm[i]) and np.isfinite(norm[:i]).any())


# ------------------------------------------------------------------------------------ the largest stable rate


@dataclass(frozen=True)
class StableRate(Result):
    """The learning rate below which steps on the quadratic are stable, from the sharpness at one step."""

    value: float  # η
    low: float  # for the sharpness plus its error
    high: float  # for the sharpness minus its error
    step: int  # of the measurement
    num_measurements: int  # of which it is the least

    def sentence(self) -> str:
        """The rate with its interval, and where it is from."""
        low, high = rounded(self.low, 3), rounded(self.high, 3)
        ends = f" ({low} to {high}, by the error of the sharpness)" if low != high else ""
        where = (
            f"the least of {self.num_measurements} measurements"
            if self.num_measurements > 1
            else "of the last measurement"
        )
        return f"largest stable learning rate {rounded(self.value, 3)}{ends}, {where}, at step {self.step}"


def stable_rate(history: RunHistory, *, last: bool = False) -> StableRate | None:
    """The largest rate that would have been stable over training, or at the last measurement.

    η = threshold / sharpness at the measurement with the least such ratio; None if no sharpness is known.
    A run at another rate goes elsewhere, and gradient descent adapts its curvature to its rate (Cohen et al.
    2021): the number is a guide, and `benchmarks/monitor_what_if.py` measures how good a one.
    """
    for name, limit in (("sharpness", "sharpness_threshold"), ("lambda_max", "threshold")):
        top, error = history.column(name), np.nan_to_num(history.column(f"{name}_error"))
        threshold = history.column(limit)
        with np.errstate(invalid="ignore"):
            known = np.flatnonzero((top > 0) & np.isfinite(threshold) & history.is_formed())
        if len(known):
            rates = threshold[known] / top[known]
            i = known[-1] if last else known[int(np.argmin(rates))]
            low, high = threshold[i] / (top[i] + error[i]), threshold[i] / max(top[i] - error[i], 1e-300)
            count = 1 if last else len(known)
            return StableRate(
                float(threshold[i] / top[i]), float(low), float(high), int(history.at[i]), count
            )
    return None

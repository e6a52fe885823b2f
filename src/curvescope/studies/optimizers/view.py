"""Tables, claims, figures and captions of the study `optimizers`, made from the arrays of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.number_format import plural, short_duration
from curvescope.runs.study_result import Claim, Line, Tables
from curvescope.studies.common.statistics import OURS
from curvescope.studies.optimizers.analysis import (
    AXES,
    CONTENDERS,
    FIRST_ORDER,
    SHARE,
    TrainingRun,
    band,
    interval,
    judged,
)
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.optimizers.study import OptimizerComparison


def tables(result: OptimizerComparison) -> Tables:
    """Return every table by name."""
    return {
        "ends": _ends(result),
        "gaps": _gaps(result),
        "trials": _trials(result),
        "courses": _courses(result),
    }


def _ends(result: OptimizerComparison) -> list[dict[str, Any]]:
    """One row for every arena and optimizer."""
    rows = []
    for arena in result.arenas:
        for name in result.optimizers:
            courses = result.of(arena, name)
            mean, low, high = interval(np.array([course.final for course in courses]))
            row: dict[str, Any] = {"arena": arena, "optimizer": name, "lr": courses[0].rate}
            row |= {"at_edge": result.at_edge(arena, name), "loss": mean, "low": low, "high": high}
            for column in ("steps", "work", "products", "seconds", "wall"):
                row[column] = float(np.mean([getattr(course, column)[-1] for course in courses]))
            row |= {"diverged": sum(course.diverged for course in courses), "seeds": len(courses)}
            rows.append(row)
    return rows


def _gaps(result: OptimizerComparison) -> list[dict[str, Any]]:
    """Differences from each first-order optimizer at equal steps, work and time."""
    rows = []
    for arena in result.arenas:
        for other in (name for name in FIRST_ORDER if name in result.optimizers):
            for name in (name for name in result.optimizers if name != other):
                for axis in AXES:
                    difference, verdict = judged(result, arena, name, other, axis)
                    rows.append(
                        {
                            "arena": arena,
                            "optimizer": name,
                            "against": other,
                            "equal": axis,
                            "at": difference.at,
                            "difference": difference.mean,
                            "low": difference.low,
                            "high": difference.high,
                            "lower": verdict,
                        }
                    )
    return rows


def _trials(result: OptimizerComparison) -> list[dict[str, Any]]:
    """One row per trial of the tuning; trials with a part of the budget come first."""
    rows = []
    for arena in result.arenas:
        for name in result.optimizers:
            key, best = f"{arena}/{name}", result.rate(arena, name)
            search = result.searches.get(key)
            rounds = [(SHARE if search else 1.0, result.rates, result.trials[key])]
            rounds += [(1.0, search.rates, search.losses)] if search else []
            rows += [
                {"arena": arena, "optimizer": name, "budget": share, "lr": rate, "loss": loss,
                 "chosen": share == 1 and rate == best}
                for share, rates, losses in rounds
                for rate, loss in zip(rates, losses, strict=True)
            ]  # fmt: skip
    return rows


def _courses(result: OptimizerComparison) -> list[dict[str, Any]]:
    """One row per measurement of every run."""
    columns = ("steps", "work", "products", "seconds", "wall", "loss")
    return [
        {"arena": arena, "optimizer": name, "seed": course.seed}
        | {column: float(getattr(course, column)[k]) for column in columns}
        for arena in result.arenas
        for name in result.optimizers
        for course in result.of(arena, name)
        for k in range(len(course.loss))
    ]


BASE = "adamw"
EQUAL = {"steps": "steps", "work": "work", "seconds": "processor time"}


def claims(result: OptimizerComparison) -> list[Claim]:
    """One claim for every arena, axis and optimizer except AdamW."""
    rows = []
    for arena in result.arenas:
        if BASE not in result.optimizers:
            continue
        for axis, words in EQUAL.items():
            for name in result.optimizers:
                if name == BASE:
                    continue
                difference, verdict = judged(result, arena, name, BASE, axis)
                measured = (
                    f"difference of losses {difference.words} after {_where(axis, difference.at)}, "
                    f"{difference.seeds} seeds"
                )
                if edge := [other for other in (name, BASE) if result.at_edge(arena, other)]:
                    measured += f"; the best rate of {' and '.join(edge)} lies at the edge of the rates tried"
                claim = f"{name} has a lower loss than {BASE} on {arena}, at equal {words}"
                rows.append(Claim(claim, "lower loss", measured, verdict, *OURS))
    return rows


def _where(axis: str, at: float) -> str:
    return {"steps": f"{at:.0f} steps", "work": f"{at:.0f} gradients", "seconds": short_duration(at)}[axis]


FEW = 4  # with fewer seeds, single runs are drawn instead of a band
LABELS = {"steps": "steps", "work": "work (gradients)", "seconds": "processor time (s)"}
COLORS = {
    "sgd": style.GRAY, "adamw": "black", "newton_cg": style.BLUE, "sharpness_gd": style.ORANGE,
    "block_sgd": style.TEAL, "hutchinson_adam": style.PLUM, "clipped_newton": style.GOLD,
    "kfac_descent": style.PINK,
}  # fmt: skip


def figures(result: OptimizerComparison) -> dict[str, Figure]:
    """Return every figure by name."""
    rows = len(result.arenas)
    figure, axes = style.subplots(
        rows, len(LABELS), figsize=(11, 3.1 * rows + 0.4), squeeze=False, sharey="row"
    )
    for row, arena in zip(axes, result.arenas, strict=True):
        for ax, axis in zip(row, LABELS, strict=True):
            _panel(ax, result, arena, axis)
        row[0].set_ylabel(f"{arena}: held-out loss")
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return {"courses": figure}


def _curves(ax: Axes, courses: Sequence[TrainingRun], axis: str, look: dict[str, Any]) -> None:
    """Draw a mean with its band; with few seeds, whose band would fill the panel, draw every run."""
    if len(courses) < FEW:
        for course in courses:
            there = np.isfinite(course.loss)
            ax.plot(getattr(course, axis)[there], course.loss[there], lw=1.0, **look)
            look = look | {"label": "_"}  # one legend entry for all runs
        return
    x, mean, low, high = band(courses, axis)
    there = np.isfinite(mean)
    ax.plot(x[there], mean[there], lw=1.4, **look)
    ax.fill_between(x[there], low[there], high[there], color=look["color"], alpha=0.15, lw=0)


def _panel(ax: Axes, result: OptimizerComparison, arena: str, axis: str) -> None:
    for name in result.optimizers:
        _curves(ax, result.of(arena, name), axis, {"color": COLORS[name], "label": name})
    top = max(float(course.loss[0]) for name in result.optimizers for course in result.of(arena, name))
    least = min(float(course.loss.min()) for name in result.optimizers for course in result.of(arena, name))
    ax.set(ylim=(least - 0.05 * (top - least), top + 0.15 * (top - least)), xlabel=LABELS[axis])
    ax.set_xlim(left=0)


def summary(result: OptimizerComparison) -> list[Line]:
    """Losses at the end of the budget, lowest first."""
    rows: list[Line] = []
    for arena in result.arenas:
        ends = {
            name: interval(np.array([c.final for c in result.of(arena, name)])) for name in result.optimizers
        }
        for name in sorted(ends, key=lambda name: ends[name][0]):
            mean, low, high = ends[name]
            course = result.of(arena, name)[0]
            edge = ", at the edge of the rates tried" if result.at_edge(arena, name) else ""
            steps, seconds = course.end("steps"), course.end("seconds")
            words = (
                f"[{low:.3f}, {high:.3f}] after {steps:.0f} steps in {seconds:.1f} s, "
                f"lr {course.rate:g}{edge}: {CONTENDERS[name].words}"
            )
            rows.append((f"{arena}, {name}", f"{mean:.3f}", words))
    return [*rows, *(("note", "", note) for note in result.notes)]


def captions(result: OptimizerComparison) -> dict[str, str]:
    """Return the caption of each figure and table."""
    first = f"{plural(len(result.rates), 'rate')} from {min(result.rates):g} to {max(result.rates):g}"
    tried = (
        (
            f"tries {first} with {SHARE:g} of the budget; then, with the full budget, the better half of "
            "them and neighbors of the best rate until both neighbors are worse"
        )
        if result.searches
        else f"tries {first}"
    )
    how = (
        f"Every optimizer {tried}. The trials use a seed of their own and are ranked by the held-out "
        f"loss at the end. The best rate is run on {plural(result.seeds, 'other seed')}, each with its "
        "own weights and batches. The budget is the same work for all, in gradients: a forward pass "
        "counts 1/3, a gradient 2/3, a Hessian-vector product 4/3, a product of one tensor 1/2"
    )
    ends = "low and high: ends of Student's 95 % interval over seeds"
    return {
        "courses": "Held-out loss against steps, work (in gradients) and processor time. Lines are means "
        "over seeds; bands are 95 % intervals of the logarithm of the mean. With fewer than four seeds, "
        f"each line is a run. {how}. A mean ends where its shortest run ends. Held-out sums of addition "
        "are drawn independently, and some of them also occur in training.",
        "ends": f"Results at the end of the budget. {how}. {ends}. at_edge: the best rate is the smallest or "
        "the largest that was tried, so no verdict is given. products: full Hessian-vector products. "
        "wall: wall-clock seconds.",
        "gaps": "Differences in held-out loss from SGD and from AdamW, paired over seeds, at the farthest "
        f"point of an axis that both reach; negative means lower loss. {ends}. lower: verdict of this "
        "interval. Rates are tuned for the end of the budget. At equal steps, an optimizer that takes "
        "fewer steps in total is compared at its best, the other one is not. If there is no difference, "
        "one verdict in twenty is wrong by chance.",
        "trials": "Held-out loss at the end of every trial of the tuning. budget: share of the full budget.",
    }

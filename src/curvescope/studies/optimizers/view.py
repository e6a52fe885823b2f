"""Tables, claims, figures and captions of the study `optimizers`, made from the arrays of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.numbers import plural, short_duration
from curvescope.runs.shown import Claim, Line, Origin
from curvescope.studies.optimizers.analysis import (
    AXES,
    CONTENDERS,
    FIRST_ORDER,
    SHARE,
    Course,
    band,
    interval,
    judged,
)
from curvescope.viz import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.optimizers.study import Compared


def tables(result: Compared) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    return {
        "ends": pd.DataFrame(_ends(result)),
        "gaps": pd.DataFrame(_gaps(result)),
        "trials": pd.DataFrame(_trials(result)),
        "courses": pd.DataFrame(_courses(result)),
    }


def _ends(result: Compared) -> list[dict[str, Any]]:
    """One row for every arena and optimizer."""
    found = []
    for arena in result.arenas:
        for name in result.optimizers:
            courses = result.of(arena, name)
            mean, low, high = interval(np.array([course.final for course in courses]))
            row: dict[str, Any] = {"arena": arena, "optimizer": name, "lr": courses[0].rate}
            row |= {"at_edge": result.at_edge(arena, name), "loss": mean, "low": low, "high": high}
            for column in ("steps", "work", "products", "seconds", "wall"):
                row[column] = float(np.mean([getattr(course, column)[-1] for course in courses]))
            row |= {"diverged": sum(course.diverged for course in courses), "seeds": len(courses)}
            found.append(row)
    return found


def _gaps(result: Compared) -> list[dict[str, Any]]:
    """Against each of the first-order optimizers, at equal steps, work and time."""
    found = []
    for arena in result.arenas:
        for other in (name for name in FIRST_ORDER if name in result.optimizers):
            for name in (name for name in result.optimizers if name != other):
                for axis in AXES:
                    one, verdict = judged(result, arena, name, other, axis)
                    found.append(
                        {"arena": arena, "optimizer": name, "against": other, "equal": axis, "at": one.at,
                         "difference": one.mean, "low": one.low, "high": one.high, "lower": verdict}
                    )  # fmt: skip
    return found


def _trials(result: Compared) -> list[dict[str, Any]]:
    """Every trial of the tuning, first those at a part of the budget."""
    found = []
    for arena in result.arenas:
        for name in result.optimizers:
            key, best = f"{arena}/{name}", result.rate(arena, name)
            search = result.searches.get(key)
            rounds = [(SHARE if search else 1.0, result.rates, result.trials[key])]
            rounds += [(1.0, search.rates, search.losses)] if search else []
            found += [
                {"arena": arena, "optimizer": name, "budget": share, "lr": rate, "loss": loss,
                 "chosen": share == 1 and rate == best}
                for share, rates, losses in rounds
                for rate, loss in zip(rates, losses, strict=True)
            ]  # fmt: skip
    return found


def _courses(result: Compared) -> list[dict[str, Any]]:
    """Every look at every run."""
    columns = ("steps", "work", "products", "seconds", "wall", "loss")
    return [
        {"arena": arena, "optimizer": name, "seed": course.seed}
        | {column: float(getattr(course, column)[k]) for column in columns}
        for arena in result.arenas
        for name in result.optimizers
        for course in result.of(arena, name)
        for k in range(len(course.loss))
    ]


# ----------------------------------------------------------------------------------------------------- claims

OURS: Origin = ("ours", "ours")
BASE = "adamw"
EQUAL = {"steps": "steps", "work": "work", "seconds": "processor time"}


def claims(result: Compared) -> list[Claim]:
    """One for every arena, axis and optimizer other than AdamW."""
    found = []
    for arena in result.arenas:
        if BASE not in result.optimizers:
            continue
        for axis, words in EQUAL.items():
            for name in result.optimizers:
                if name == BASE:
                    continue
                one, verdict = judged(result, arena, name, BASE, axis)
                said = f"difference of losses {one.words} after {_where(axis, one.at)}, {one.seeds} seeds"
                if edge := [other for other in (name, BASE) if result.at_edge(arena, other)]:
                    said += f"; the rate of {' and '.join(edge)} is the last that was tried"
                claim = f"{name} has a lower loss than {BASE} on {arena}, at equal {words}"
                found.append(Claim(claim, "lower loss", said, verdict, *OURS))
    return found


def _where(axis: str, at: float) -> str:
    return {"steps": f"{at:.0f} steps", "work": f"{at:.0f} gradients", "seconds": short_duration(at)}[axis]


# ---------------------------------------------------------------------------------------------------- figures

FEW = 4  # seeds that a band is drawn of
LABELS = {"steps": "steps", "work": "work, in gradients", "seconds": "processor time, s"}
COLORS = {
    "sgd": style.GRAY, "adamw": "black", "newton_cg": style.BLUE, "sharpness_gd": style.ORANGE,
    "block_sgd": style.TEAL, "hutchinson_adam": style.PLUM, "clipped_newton": style.GOLD,
    "kfac_descent": style.PINK,
}  # fmt: skip


def figures(result: Compared) -> dict[str, Figure]:
    """By name."""
    import matplotlib.pyplot as plt

    rows = len(result.arenas)
    figure, axes = plt.subplots(
        rows, len(LABELS), figsize=(11, 3.1 * rows + 0.4), layout="constrained", squeeze=False, sharey="row"
    )
    for row, arena in zip(axes, result.arenas, strict=True):
        for ax, axis in zip(row, LABELS, strict=True):
            _panel(ax, result, arena, axis)
        row[0].set_ylabel(f"{arena}: held-out loss")
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return {"courses": figure}


def _curves(ax: Axes, courses: Sequence[Course], axis: str, look: dict[str, Any]) -> None:
    """A mean with its band; of few seeds, whose band would fill the panel, every run by itself."""
    if len(courses) < FEW:
        for course in courses:
            there = np.isfinite(course.loss)
            ax.plot(getattr(course, axis)[there], course.loss[there], lw=1.0, **look)
            look = look | {"label": "_"}  # one entry of the legend
        return
    x, mean, low, high = band(courses, axis)
    there = np.isfinite(mean)
    ax.plot(x[there], mean[there], lw=1.4, **look)
    ax.fill_between(x[there], low[there], high[there], color=look["color"], alpha=0.15, lw=0)


def _panel(ax: Axes, result: Compared, arena: str, axis: str) -> None:
    for name in result.optimizers:
        _curves(ax, result.of(arena, name), axis, {"color": COLORS[name], "label": name})
    top = max(float(course.loss[0]) for name in result.optimizers for course in result.of(arena, name))
    least = min(float(course.loss.min()) for name in result.optimizers for course in result.of(arena, name))
    ax.set_ylim(least - 0.05 * (top - least), top + 0.15 * (top - least))
    ax.set_xlabel(LABELS[axis])
    ax.set_xlim(left=0)
    ax.tick_params(labelsize=7)


# --------------------------------------------------------------------------------------------------- captions


def summary(result: Compared) -> list[Line]:
    """Losses at the end of the budget, the lowest first."""
    found: list[Line] = []
    for arena in result.arenas:
        ends = {
            name: interval(np.array([c.final for c in result.of(arena, name)])) for name in result.optimizers
        }
        for name in sorted(ends, key=lambda name: ends[name][0]):
            mean, low, high = ends[name]
            course = result.of(arena, name)[0]
            edge = ", the last that was tried" if result.at_edge(arena, name) else ""
            steps, seconds = course.end("steps"), course.end("seconds")
            words = (
                f"[{low:.3f}, {high:.3f}] after {steps:.0f} steps in {seconds:.1f} s, "
                f"lr {course.rate:g}{edge}: {CONTENDERS[name].words}"
            )
            found.append((f"{arena}, {name}", f"{mean:.3f}", words))
    return [*found, *(("note", "", note) for note in result.notes)]


def captions(result: Compared) -> dict[str, str]:
    """What each figure and table shows."""
    first = f"{plural(len(result.rates), 'rate')} from {min(result.rates):g} to {max(result.rates):g}"
    tried = (
        f"tries {first} at {SHARE:g} of the budget, then, at all of it, the better half of them and rates "
        "beside the best until it lies between two that are no better"
        if result.searches
        else f"tries {first}"
    )
    how = (
        f"Every optimizer {tried}; by the held-out loss at the end, on a seed of their own. The best rate is "
        f"run on {plural(result.seeds, 'other seed')}, with weights and batches of each. The budget is the "
        "same work for all: forward passes 1, gradients 2, products 4, products of one tensor 1.5, all over 3"
    )
    ends = "low and high: Student's 95 % interval over seeds"
    return {
        "courses": "Held-out loss against steps, work (in gradients) and processor time: means over seeds, "
        "bands are 95 % intervals, of the mean's logarithm; below four seeds a line is a run. "
        f"{how}. A mean ends where its shortest run does. Held-out "
        "sums of addition are drawn anew, and some of them are among those of training.",
        "ends": f"At the end of the budget. {how}; {ends}. at_edge: the best rate is the smallest or the "
        "largest that was tried, and no verdict is given; products are whole ones of the Hessian; wall is by "
        "the clock.",
        "gaps": "Differences of held-out losses from SGD and from AdamW, paired over seeds, at the farthest "
        f"point of an axis that both reach; negative is lower. {ends}; lower: what that interval decides. "
        "Rates are tuned for the end of the budget: at equal steps, one that takes fewer steps by then is at "
        "its best and the other is not. Of many differences that are none, one in twenty is decided wrongly.",
        "trials": "Held-out loss at the end of every trial of the tuning; budget: of the run, as a share.",
    }

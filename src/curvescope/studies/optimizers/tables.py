"""The tables of the study `optimizers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.optimizers.comparison import interval, judged
from curvescope.studies.optimizers.contenders import FIRST_ORDER
from curvescope.studies.optimizers.course import AXES
from curvescope.studies.optimizers.tuning import SHARE

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.optimizers.study import Compared


def frames(result: Compared) -> dict[str, pd.DataFrame]:
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

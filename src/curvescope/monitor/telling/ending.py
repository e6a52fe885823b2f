"""Where the loop of a monitor stands, whether or not something was measured there.

step       the last that the loop told of
seconds    since the start, of all processes
share      of them that was spent measuring
skipped    measurements that came due and were not made, to keep the budget
next_step  at which the one that waits would be affordable, at the pace of the loop; only where one waits
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from curvescope.monitor.budget import Budget
from curvescope.monitor.look import PARTS


def end_of(step: int, rows: Sequence[Mapping[str, Any]], budget: Budget, waiting: int) -> dict[str, float]:
    """The numbers above.

    Args:
        step: the last.
        rows: of the history, with what each of them skipped.
        waiting: skipped since the last row, the one that is due now among them.
    """
    before = sum(row["skipped"] for row in rows if not math.isnan(row["skipped"]))
    found = {
        "step": step,
        "seconds": budget.elapsed,
        "share": budget.share,
        "skipped": int(before) + waiting,
    }
    if waiting and rows and step > rows[0]["step"]:
        first = rows[0]
        measuring = budget.spent - first["share"] * first["seconds"]
        pace = (budget.elapsed - first["seconds"] - measuring) / (step - first["step"])  # seconds of a step
        wait = budget.ready_at(PARTS[0]) - budget.elapsed
        if pace > 0:
            found["next_step"] = step + max(1, math.ceil(wait / pace))
    return found

"""Who is ahead, next to AdamW: verdicts computed from intervals over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.numbers import short_duration
from curvescope.runs.shown import Claim, Origin
from curvescope.studies.optimizers.comparison import judged

if TYPE_CHECKING:
    from curvescope.studies.optimizers.study import Compared

OURS: Origin = ("ours", "ours")
BASE = "adamw"
EQUAL = {"steps": "steps", "work": "work", "seconds": "processor time"}


def judge(result: Compared) -> list[Claim]:
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

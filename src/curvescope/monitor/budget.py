"""How much of the time a monitor takes, and what it can afford next.

With the time `elapsed` since it began, `spent` of it on measuring, a measurement of cost c keeps the share at
most b if (spent + c) / (elapsed + c) ≤ b: c may be as large as (b · elapsed − spent) / (1 − b). What a part
may cost is the largest of its last few costs and a margin; where it is not known, that of the dearest part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

Clock = Callable[[], float]
"""Seconds, from any beginning."""
KEPT = 3  # costs of a part, of which the largest counts
MARGIN = 1.25  # what a part may cost, beside the largest of its last costs
PATIENCE = 3  # times in a row that a part is left out before the next measurement waits until it fits


@final
class Budget:
    """The account of a monitor's time.

    Args:
        share: of the time that measuring may take, above 0; 1 is no limit.
        clock: of seconds.
    """

    def __init__(self, share: float, clock: Clock = time.perf_counter):
        self.limit, self.clock = share, clock
        self._begun, self._before = clock(), 0.0
        self.spent = 0.0
        self.costs: dict[str, list[float]] = {}  # of each part, the last few times
        self.missed: dict[str, int] = {}  # measurements in a row that a part was due and left out

    @property
    def elapsed(self) -> float:
        """Seconds that the loop has run, over all processes that worked on it."""
        return self._before + self.clock() - self._begun

    @property
    def share(self) -> float:
        """Of the time so far."""
        elapsed = self.elapsed
        return min(self.spent / elapsed, 1.0) if elapsed > 0 else 0.0

    def allowance(self) -> float:
        """Seconds that a measurement may take now."""
        if self.limit >= 1:
            return math.inf
        return max((self.limit * self.elapsed - self.spent) / (1 - self.limit), 0.0)

    def upper(self, part: str) -> float:
        """Seconds that a part may cost; before anything was measured, 0."""
        known = self.costs.get(part) or [cost for costs in self.costs.values() for cost in costs]
        return MARGIN * max(known, default=0.0)

    def ready_at(self, part: str) -> float:
        """Seconds of `elapsed` from which a part may begin: where `allowance` is what it may cost."""
        return ((1 - self.limit) * self.upper(part) + self.spent) / self.limit

    def affordable(self, due: Sequence[str]) -> tuple[str, ...] | None:
        """Which of the parts that are due to measure now; None where the measurement has to wait.

        The first time all of them, whatever they cost. Later the first part must fit, and of the others
        those that do, the one left out most often first; one that was left out three times makes the
        measurement wait until it fits.
        """
        first = due[0]
        if not self.costs:
            return tuple(due)
        left = self.allowance() - self.upper(first)
        if left < 0:
            return None
        chosen = {first}
        for part in sorted(due[1:], key=lambda part: -self.missed.get(part, 0)):
            if self.upper(part) <= left:
                chosen.add(part)
                left -= self.upper(part)
            elif self.missed.get(part, 0) >= PATIENCE:
                return None
        return tuple(part for part in due if part in chosen)

    def note(self, due: Sequence[str], costs: Mapping[str, float], whole: float) -> None:
        """A measurement is done: seconds that its parts cost, of those that were due, and all of it."""
        self.spent += whole
        for part, cost in costs.items():
            self.costs[part] = [*self.costs.get(part, []), cost][-KEPT:]
        self.missed |= {part: 0 if part in costs else self.missed.get(part, 0) + 1 for part in due}

    def state(self) -> dict[str, Any]:
        """What `resume` takes."""
        return {"elapsed": self.elapsed, "spent": self.spent, "costs": self.costs, "missed": self.missed}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from an account of another process, whose time counts."""
        self._before, self._begun = float(state["elapsed"]), self.clock()
        self.spent, self.costs, self.missed = float(state["spent"]), state["costs"], state["missed"]

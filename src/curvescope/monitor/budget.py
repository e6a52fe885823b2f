"""How much of the time a monitor takes, and what it can afford next.

With the time `elapsed` since it began, `spent` of it on measuring, a measurement of cost c keeps the share at
most b if (spent + c) / (elapsed + c) ≤ b: c may be as large as (b · elapsed − spent) / (1 − b). Costs are
those of the last time, part by part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import final

Clock = Callable[[], float]
"""Seconds, from any beginning."""
PATIENCE = 3  # times in a row that a part is left out before the next measurement waits until it fits


@final
class Budget:
    """The account of a monitor's time.

    Args:
        share: of the time that measuring may take, above 0; 1 is no limit.
        parts: what a measurement is made of, the first always.
        clock: of seconds.
    """

    def __init__(self, share: float, parts: tuple[str, ...], clock: Clock = time.perf_counter):
        self.limit, self.parts, self.clock = share, parts, clock
        self._begun, self._before = clock(), 0.0
        self.spent = 0.0
        self.costs: dict[str, float] = {}  # of each part, the last time
        self.missed: dict[str, int] = dict.fromkeys(parts, 0)  # measurements in a row without it

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

    def affordable(self) -> tuple[str, ...] | None:
        """The parts to measure now; None where the measurement has to wait.

        The first time all parts are measured, whatever they cost. Later the first part must fit, and the
        others in the order in which they were left out; one that was left out three times makes the
        measurement wait until it fits.
        """
        if not self.costs:
            return self.parts
        left = self.allowance() - self.costs[self.parts[0]]
        if left < 0:
            return None
        chosen = {self.parts[0]}
        for part in sorted(self.parts[1:], key=lambda part: -self.missed[part]):
            cost = self.costs.get(part, 0.0)
            if cost <= left:
                chosen.add(part)
                left -= cost
            elif self.missed[part] >= PATIENCE:
                return None
        return tuple(part for part in self.parts if part in chosen)

    def note(self, costs: Mapping[str, float], whole: float) -> None:
        """A measurement is done: seconds of its parts, and of all of it."""
        self.spent += whole
        rest = max(whole - sum(costs.values()), 0.0)  # what belongs to no part belongs to the first
        for part in self.parts:
            if part in costs:
                self.costs[part] = costs[part] + (rest if part == self.parts[0] else 0.0)
                self.missed[part] = 0
            else:
                self.missed[part] += 1

    def state(self) -> dict[str, object]:
        """What `resume` takes."""
        return {"elapsed": self.elapsed, "spent": self.spent, "costs": self.costs, "missed": self.missed}

    def resume(self, state: Mapping[str, object]) -> None:
        """Go on from an account of another process, whose time counts."""
        self._before, self._begun = float(state["elapsed"]), self.clock()  # pyright: ignore
        self.spent = float(state["spent"])  # pyright: ignore
        self.costs = dict(state["costs"])  # pyright: ignore
        self.missed |= dict(state["missed"])  # pyright: ignore

"""Account of a monitor's share of the time, and the choice of the parts that it measures next.

With the time `elapsed` since it began, `spent` of it on measuring, a measurement of cost c keeps the share at
most b if (spent + c) / (elapsed + c) ≤ b: c may be as large as (b · elapsed − spent) / (1 − b).

The first part, λ_max and sharpness, is measured whenever it fits, up to `FIRST_SHARE` of the budget. The
other parts get what it leaves, one after the other: the part that has had the least time is next, and the
others wait until it fits. The cost of a part is the largest of its last few costs and a margin; before it is
known, its usual number of products times what a product has cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

Clock = Callable[[], float]
"""Seconds, from any beginning."""
LAST_COSTS = 3  # number of costs of a part that are kept; the largest counts
MARGIN = 1.25  # what a part may cost, beside the largest of its last costs
FIRST_SHARE = 0.9  # of the budget that the first part may take while others wait
PACE_STEPS = 3  # steps of training that are timed before the first measurement
DEBT_STEPS = 100  # steps of training after which the first measurement is within the budget


@final
class Budget:
    """The account of a monitor's time.

    Args:
        share: Share of the time that measuring may take, above 0; 1 means without a limit.
        clock: of seconds.
    """

    def __init__(self, share: float, clock: Clock = time.perf_counter):
        self.limit, self.clock = share, clock
        self._begun, self._before = clock(), 0.0
        self.spent = 0.0
        self.costs: dict[str, list[float]] = {}  # of each part, the last few times
        self.used: dict[str, float] = {}  # by each part, without the first measurement
        self.product_seconds = 0.0  # of one product, as the last measurement had it
        self.steps, self.training_seconds = 0, 0.0  # steps of training that were timed
        self.fastest_step = math.inf

    @property
    def elapsed(self) -> float:
        """Seconds that the loop has run, over all processes that worked on it."""
        return self._before + self.clock() - self._begun

    @property
    def share(self) -> float:
        """Share of the time so far."""
        elapsed = self.elapsed
        return min(self.spent / elapsed, 1.0) if elapsed > 0 else 0.0

    @property
    def step_seconds(self) -> float:
        """Mean time of a training step; nan before one was timed."""
        return self.training_seconds / self.steps if self.steps else math.nan

    def note_training(self, steps: int, seconds: float) -> None:
        """Add steps of training and the time that they took, without measuring."""
        self.steps += steps
        self.training_seconds += seconds
        self.fastest_step = min(self.fastest_step, seconds / steps)

    def allowance(self) -> float:
        """Seconds that a measurement may take now.

        The first one may take what is within the budget after `DEBT_STEPS` steps more.
        """
        if self.limit >= 1:
            return math.inf
        ahead = 0.0
        if not self.costs and self.steps >= PACE_STEPS:
            ahead = DEBT_STEPS * self.fastest_step
        return max((self.limit * (self.elapsed + ahead) - self.spent) / (1 - self.limit), 0.0)

    def upper(self, part: str, products: Mapping[str, float]) -> float:
        """Seconds that a part may cost; `products` it usually takes, where it was not measured yet."""
        if known := self.costs.get(part):
            return MARGIN * max(known)
        return MARGIN * self.product_seconds * products.get(part, 0.0)

    def affordable(
        self, due: Sequence[str], products: Mapping[str, float], *, every: int = 1
    ) -> tuple[str, ...] | None:
        """Choose the parts to measure now; None if the measurement has to wait.

        Args:
            due: parts, the one that every measurement has first.
            products: that each usually takes.
            every: steps from now until the next measurement is due.
        """
        if self.limit >= 1:
            return tuple(due)
        first, left = due[0], self.allowance()
        if not self.costs:  # of a resumed run too, whose account is gone
            enough = self.steps >= PACE_STEPS and left >= self.upper(first, products)
            return (first,) if enough else None
        cost = self.upper(first, products)
        left -= cost
        own = FIRST_SHARE * self.limit * (self.elapsed + cost)
        if left < 0 or (len(due) > 1 and self.used.get(first, 0.0) + cost > own):
            return None
        refill = self.limit / (1 - self.limit) * every * self.step_seconds if self.steps else 0.0
        left -= max(cost - refill, 0.0)  # for the first part, the next time
        chosen = [first]
        for part in sorted(due[1:], key=lambda part: self.used.get(part, 0.0)):
            left -= self.upper(part, products)
            if left < 0:
                break
            chosen.append(part)
        return tuple(part for part in due if part in chosen)

    def note(
        self,
        costs: Mapping[str, float],
        whole: float,
        product_seconds: float = 0.0,
        pieces: Mapping[str, float] | None = None,
    ) -> None:
        """A measurement is done.

        Args:
            costs: seconds that each of its parts took.
            whole: seconds that all of it took.
            product_seconds: of one of its products, 0 if it is not known.
            pieces: seconds that a part is expected to take instead, such as the dearest piece of one that is
                made of pieces.
        """
        if self.costs:
            for part, cost in costs.items():
                self.used[part] = self.used.get(part, 0.0) + cost
        self.spent += whole
        for part, cost in costs.items():
            self.costs[part] = [*self.costs.get(part, []), (pieces or {}).get(part, cost)][-LAST_COSTS:]
        if product_seconds > 0:
            self.product_seconds = product_seconds

    def steps_between(self, parts: Sequence[str], products: Mapping[str, float]) -> float:
        """Steps of training from one measurement of these parts to the next, as far as their cost allows."""
        cost = sum(self.upper(part, products) / MARGIN for part in parts)
        return cost * (1 - self.limit) / self.limit / self.step_seconds if self.steps else math.nan

    def wait(self, part: str, products: Mapping[str, float]) -> float:
        """Seconds until a part may begin."""
        ready = ((1 - self.limit) * self.upper(part, products) + self.spent) / self.limit
        return ready - self.elapsed

    def wait_first(self, part: str, products: Mapping[str, float]) -> float:
        """Seconds until a part may be the first measurement."""
        return self.wait(part, products) - DEBT_STEPS * self.fastest_step

    def state(self) -> dict[str, Any]:
        """Return the account as `resume` takes it."""
        return {
            "elapsed": self.elapsed,
            "spent": self.spent,
            "costs": self.costs,
            "used": self.used,
            "product_seconds": self.product_seconds,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue an account of another process, whose time counts."""
        self._before, self._begun = float(state["elapsed"]), self.clock()
        self.spent, self.costs = float(state["spent"]), state["costs"]
        self.used, self.product_seconds = state["used"], float(state["product_seconds"])

"""The search for a learning rate, the same for every optimizer.

Some rates at a part of the budget; at all of it the better half of them, since what is best early need not be
in the end; then neighbors of the best one on a ladder, 1 and 3 times powers of ten, until it lies between
two that are no better, or too many were tried. A valley that neither half has seen can be missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from curvescope.core.result import Result

SHARE = 0.25  # of the budget, for the first rates


@dataclass(frozen=True)
class Search(Result):
    """Rates that were tried at the whole budget, in this order, on the seed of the tuning."""

    rates: np.ndarray  # (K,)
    losses: np.ndarray  # (K,) at the end; infinite where it diverged

    @property
    def best(self) -> float:
        """The rate of the lowest loss; the smallest one where all have diverged."""
        return lowest(self.rates, self.losses)

    @property
    def missing(self) -> list[float]:
        """The neighbors of the best that were not tried."""
        return [rate for rate in neighbors(self.best) if not np.isclose(self.rates, rate).any()]

    @property
    def inside(self) -> bool:
        """Whether the best was better than a smaller and a larger one, which did not diverge all alike."""
        return not self.missing and bool(np.isfinite(self.losses).any())


def lowest(rates: Sequence[float] | np.ndarray, losses: Sequence[float] | np.ndarray) -> float:
    """The rate of the lowest loss, the smaller one of two."""
    known = [math.inf if math.isnan(loss) else float(loss) for loss in losses]
    return float(min(zip(known, rates, strict=True))[1])


def rung(rate: float) -> float:
    """The nearest rate of the ladder."""
    return _rate(round(2 * math.log10(rate)))


def neighbors(rate: float) -> tuple[float, float]:
    """The next larger and the next smaller rate of the ladder."""
    number = round(2 * math.log10(rate))
    return _rate(number + 1), _rate(number - 1)


def _rate(number: int) -> float:
    return float(f"{(1, 3)[number % 2]}e{number // 2}")


def begin(rates: Sequence[float], losses: Sequence[float], trial: Callable[[float], float]) -> Search:
    """The first trials at the whole budget: the better half of the first rates that did not diverge."""
    known = [math.inf if math.isnan(loss) else float(loss) for loss in losses]
    order = sorted(zip(known, rates, strict=True))[: -(-len(rates) // 2)]
    chosen = dict.fromkeys(rung(rate) for i, (loss, rate) in enumerate(order) if i == 0 or loss < math.inf)
    return Search(np.array(list(chosen)), np.array([trial(rate) for rate in chosen]))


def go_on(search: Search, trial: Callable[[float], float]) -> Search:
    """One more rate, a neighbor of the best; nothing where both were tried."""
    if not search.missing:
        return search
    rate = search.missing[0]
    return Search(np.append(search.rates, rate), np.append(search.losses, trial(rate)))

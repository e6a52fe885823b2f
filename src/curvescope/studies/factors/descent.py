"""Descent with a preconditioner, θ ← θ − η (A + δ I)⁻¹ g: single steps, whole runs, and their tuning.

A is made anew every few steps, δ is a multiple of its mean diagonal, g is the gradient over all data. There
is no momentum and no schedule, so that two optimizers differ in A alone. For the identity A + δ I is I.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from curvescope.core.result import Result
from curvescope.problem import Problem
from curvescope.studies.factors.distances import direction, roots
from curvescope.studies.factors.matrices import IDENTITY, Blocked, Loss, approximation

LENGTHS = 2.0 ** np.arange(-6, 7)  # of a single step, in units of the quadratic model's own
START = 0.3, 1.0  # rate and damping where tuning begins
RATE, DAMPING = 10**0.5, 10.0  # factors between neighbors in it
FARTHEST = 8, 4  # so many of these to either side
LOST = 1e3  # a loss above is as good as infinite

Cell = tuple[int, int]
"""A place (i, j) of the tuning: START times RATE^i and DAMPING^j."""


@dataclass(frozen=True)
class Descent(Result):
    """One run: the loss before every step and after the last."""

    method: str
    rate: float
    damping: float
    loss: np.ndarray  # (steps + 1,) infinite from where it diverged

    @property
    def final(self) -> float:
        """The loss at the end."""
        return float(self.loss[-1])


@dataclass(frozen=True)
class Tuned(Result):
    """What tuning found: every trial, and the best of them."""

    method: str
    rates: np.ndarray  # (trials,)
    dampings: np.ndarray  # (trials,)
    loss: np.ndarray  # (trials,) at the end of each
    rate: float
    damping: float
    settled: bool  # no neighbor is better


def best_step(
    loss: Loss, theta: Tensor, A: Blocked, G: Tensor, g: Tensor, dampings: tuple[float, ...]
) -> float:
    """The largest decrease of the loss by one step along (A + δ I)⁻¹ g, over dampings and LENGTHS.

    Lengths are multiples of gᵀd / dᵀGd, where the GGN's quadratic model is lowest along d.
    """
    start, least = loss.value(theta), math.inf
    for damping in dampings:
        d = direction(A.slices, roots(A, damping), g)
        unit = float((g @ d) / (d @ G @ d))
        ends = [loss.value(theta - unit * float(length) * d) for length in LENGTHS]
        least = min([least, *filter(math.isfinite, ends)])
    return start - least


def descend(problem: Problem, method: str, *, rate: float, damping: float, steps: int, every: int) -> Descent:
    """A run from the model's own parameters, with an approximation that is made anew every few steps."""
    loss, space = Loss(problem), problem.space().in_blocks()
    theta = space.gather({name: p.detach() for name, p in problem.named_parameters()})
    found = np.full(steps + 1, math.inf)
    slices: list[slice] = []
    factors: list[Tensor] = []
    for step in range(steps):
        value, g = loss.gradient(theta)
        if not value < LOST:
            break
        found[step] = value
        if method != IDENTITY and step % every == 0:
            A = approximation(method, problem.at(space.scatter(theta)))
            slices, factors = A.slices, roots(A, damping)
        theta = theta - rate * (g if method == IDENTITY else direction(slices, factors, g))
    else:
        end = loss.value(theta)
        found[steps] = end if end < LOST else math.inf
    return Descent(method, rate, damping, found)


def tune(problem: Problem, method: str, *, steps: int, every: int, trials: int) -> Tuned:
    """The rate and the damping with the lowest loss at the end, by `search`; the identity has no damping."""

    def final(cell: Cell) -> float:
        rate, damping = settings_of(cell)
        return descend(problem, method, rate=rate, damping=damping, steps=steps, every=every).final

    tried, settled = search(final, trials, both=method != IDENTITY)
    pairs = np.array([settings_of(cell) for cell in tried])
    best = settings_of(lowest(tried))
    return Tuned(method, pairs[:, 0], pairs[:, 1], np.array(list(tried.values())), *best, settled)


def settings_of(cell: Cell) -> tuple[float, float]:
    """Rate and damping of a place."""
    return START[0] * RATE ** cell[0], START[1] * DAMPING ** cell[1]


def lowest(tried: dict[Cell, float]) -> Cell:
    """The place of the lowest value; of equal ones, and where all are infinite, the smallest rate."""
    return min(tried, key=lambda cell: (tried[cell], cell[0]))


def search(value: Callable[[Cell], float], most: int, *, both: bool) -> tuple[dict[Cell, float], bool]:
    """Go from (0, 0) to the best neighbor until none is better, or `most` places have been tried.

    Returns:
        The places with their values, and whether no neighbor of the best is better.
    """
    tried = {(0, 0): value((0, 0))}
    while True:
        i, j = lowest(tried)
        near = [(i - 1, j), (i + 1, j)] + ([(i, j - 1), (i, j + 1)] if both else [])
        near = [cell for cell in near if abs(cell[0]) <= FARTHEST[0] and abs(cell[1]) <= FARTHEST[1]]
        for cell in near:
            if cell not in tried:
                if len(tried) == most:
                    return tried, False
                tried[cell] = value(cell)
        if lowest(tried) == (i, j):
            return tried, len(near) == (4 if both else 2) and math.isfinite(tried[i, j])

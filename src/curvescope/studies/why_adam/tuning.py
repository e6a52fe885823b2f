"""Learning rates: a grid that grows until the best one is inside, and a choice that does not judge itself.

Rates are …, 0.01, 0.03, 0.1, 0.3, … . The rate of a seed is the one with the lowest mean of the final losses
of the *other* seeds, so that the noise that chooses is not the noise that is judged. A rate that diverges for
one of them is not chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.core.result import Result
from curvescope.studies.why_adam.ensemble import Courses

FIRST = {"adam": (-5, -4, -3), "sgd": (-4, -3, -2, -1)}
"""Rungs of the ladder that are tried first; those beside them follow where the best is an end."""
MOST = 6  # rungs that a grid may grow by
LAST = 4  # looks whose mean is the final loss


def rate_of(rung: int) -> float:
    """… −2: 0.1, −1: 0.3, 0: 1, 1: 3, …"""
    power, half = divmod(rung, 2)
    return float(f"{3 if half else 1}e{power}")


@dataclass(frozen=True)
class Tuned(Result):
    """Runs of one configuration with one optimizer: S seeds, R rates, what the chosen ones kept."""

    rates: np.ndarray  # (R,)
    course: np.ndarray  # (S, R, K) loss on the evaluated sums
    chosen: np.ndarray  # (S,) index of the rate that the other seeds choose
    at_edge: bool  # a chosen rate is the first or the last, and the grid has stopped growing
    parameters: np.ndarray  # (C, S, n) of the chosen runs at the checkpoints; empty in the study's result

    @property
    def final(self) -> np.ndarray:
        """Mean loss of the last looks, (S, R); infinite where a run diverged."""
        return self.course[..., -LAST:].mean(axis=-1)

    @property
    def loss(self) -> np.ndarray:
        """Final loss of the chosen run of each seed, (S,)."""
        return self.final[np.arange(len(self.chosen)), self.chosen]


def choose(final: np.ndarray) -> np.ndarray:
    """For each seed the rate with the lowest mean over the others: (S, R) to (S,), the smaller of equals."""
    total = np.stack([np.delete(final, s, axis=0).mean(axis=0) for s in range(len(final))])
    return total.argmin(axis=1)


def tune(first: tuple[int, ...], train: Callable[[list[float]], Courses]) -> Tuned:
    """Train with the first rates, then with further ones at an end where a seed has chosen it."""
    rungs = list(first)
    found = train([rate_of(rung) for rung in rungs])
    for _ in range(MOST):
        picked = choose(_final(found.loss))
        low, high = int(picked.min()) == 0, int(picked.max()) == len(rungs) - 1
        if not low and not high:
            break
        new = ([rungs[0] - 1] if low else []) + ([rungs[-1] + 1] if high else [])
        found = _joined(found, train([rate_of(rung) for rung in new]), low=low)
        rungs = sorted(rungs + new)
    picked = choose(_final(found.loss))
    seeds = torch.arange(len(picked))
    return Tuned(
        rates=np.array([rate_of(rung) for rung in rungs]),
        course=found.loss.double().cpu().numpy(),
        chosen=picked,
        at_edge=bool(picked.min() == 0 or picked.max() == len(rungs) - 1),
        parameters=found.kept.cpu()[:, seeds, torch.as_tensor(picked)].numpy(),
    )


def _final(loss: Tensor) -> np.ndarray:
    return loss[..., -LAST:].double().mean(dim=-1).cpu().numpy()


def _joined(found: Courses, new: Courses, *, low: bool) -> Courses:
    """One rate before all others where `low`, one after them where there is another."""
    parts = []
    for old, fresh, axis in ((found.loss, new.loss, 1), (found.kept, new.kept, 2)):
        before, after = fresh.split([int(low), fresh.shape[axis] - int(low)], dim=axis)
        parts.append(torch.cat([before, old, after], dim=axis))
    return Courses(*parts)


def log_ratio(sgd: np.ndarray, adam: np.ndarray) -> np.ndarray:
    """log₁₀ (loss with SGD / loss with Adam), (S,); ±∞ where one has diverged, nan where both have."""
    with np.errstate(invalid="ignore"):
        return np.log10(sgd) - np.log10(adam)

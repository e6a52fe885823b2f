"""Rank correlations of predictions with measured increases, over blocks; with intervals by the bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation, difference, rank_correlation
from curvescope.studies.prune.heads import Heads
from curvescope.studies.prune.pieces import AT_MINIMUM
from curvescope.studies.prune.removals import Samples
from curvescope.studies.weight_changes import Effects

if TYPE_CHECKING:
    from curvescope.studies.prune.study import Pruned

Some = Samples | Heads
PREDICTORS = {
    "magnitude": "Σ w²",
    "fisher": "½ Σ F_qq w²",
    "obd": "½ Σ G_qq w²",
    "second order": "½ δᵀHδ",
    "both orders": "gᵀδ + ½ δᵀHδ",
    "obs": "½ w_Qᵀ ([H⁻¹]_QQ)⁻¹ w_Q",
    "obs + first order": "gᵀδ + ½ w_Qᵀ ([H⁻¹]_QQ)⁻¹ w_Q",
}
PLACE = ", at a minimum"
PLAIN = ("magnitude", "fisher", "obd", "second order", "both orders")
COMPENSATED = ("obs", "obs + first order", "second order", "both orders")


class Row(NamedTuple):
    """One rank correlation."""

    removed: str  # `single weights`, `random groups`, either `at a minimum`, `heads`
    how: str  # `plain` or `compensated`
    predictor: str
    correlation: Correlation


def removed_kinds(result: Pruned) -> dict[str, list[Some]]:
    """What was removed without a method's choice, by its name."""
    found: dict[str, list[Some]] = {}
    for kind, samples in (("single weights", result.singles), ("random groups", result.groups)):
        for key, some in samples.items():
            found.setdefault(kind + PLACE * key.endswith(AT_MINIMUM), []).append(some)
    if result.heads:
        found["heads"] = list(result.heads.values())
    return found


def of_effects(some: Some, how: str) -> Effects:
    """What came out of plain removals, or of compensated ones."""
    return some.plain if how == "plain" else some.compensated


def predicted(some: Some, how: str, predictor: str) -> np.ndarray:
    """What a predictor says of each removal: (K,)."""
    found = of_effects(some, how)
    values: dict[str, Callable[[], np.ndarray]] = {
        "second order": lambda: found.second.mean(1),
        "both orders": lambda: found.predicted.mean(1),
        "obs + first order": lambda: some.obs + found.first.mean(1),
    }
    return values[predictor]() if predictor in values else getattr(some, predictor)


def measured(some: Some, how: str) -> np.ndarray:
    """The increase of the loss: (K,)."""
    return of_effects(some, how).measured.mean(1)


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Removals of all blocks in one row."""
    return np.concatenate(list(parts))


def rows(result: Pruned) -> Iterator[Row]:
    """All of them: what is removed, how, and by which predictor."""
    for kind, parts in removed_kinds(result).items():
        for how, predictors in (("plain", PLAIN), ("compensated", COMPENSATED)):
            truth = joined(measured(some, how) for some in parts)
            for predictor in predictors:
                said = joined(predicted(some, how, predictor) for some in parts)
                found = rank_correlation(said, truth, draws=result.draws, seed=result.seed)
                yield Row(kind, how, predictor, found)


def better(result: Pruned, kind: str, one: str, other: str) -> Correlation:
    """ρ of one predictor less that of another, of plain removals."""
    parts = removed_kinds(result)[kind]
    a, b = (joined(predicted(some, "plain", name) for some in parts) for name in (one, other))
    truth = joined(measured(some, "plain") for some in parts)
    return difference(a, b, truth, draws=result.draws, seed=result.seed)

"""An operator as the weighted mean of the operators on groups of its sequences.

A sample is drawn sequence by sequence, so sequences are the unit of resampling. Texts of one document are
correlated: `unit=4` keeps four consecutive sequences of the data together in one group.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import check_count
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.data.batches import Batch, Batches
from curvescope.operators import MonteCarloFisher
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.samples.batch_coupling import refuse_coupled
from curvescope.problem import Problem

MOST_GROUPS = 16  # more groups would hardly narrow an interval: Student's t is 2.1 already
MOST_BYTES = 2**30  # memory for the products of all groups with the columns of one pass


@final
class Split:
    """C = Σ_g w_g C_g: an operator and its parts on G groups of the sample.

    Attributes:
        op: The operator C on the whole sample.
        groups: The operators C_g.
        weights: The weights w_g, (G,); they add up to 1.
        unit: Number of consecutive sequences that are drawn together.
        num_terms: Total weight of all terms of the sample.
    """

    def __init__(
        self,
        op: LinearOperator,
        groups: Sequence[LinearOperator],
        weights: np.ndarray,
        unite: Callable[[Sequence[int]], LinearOperator],
        *,
        unit: int = 1,
        num_terms: float = math.nan,
    ):
        self.op, self.groups, self._unite = op, list(groups), unite
        self.weights, self.unit, self.num_terms = weights / weights.sum(), unit, num_terms

    def __len__(self) -> int:
        return len(self.groups)

    def union(self, groups: Sequence[int]) -> LinearOperator:
        """Return the operator on several groups together."""
        return self._unite(groups)

    def cuts(self, parts: int) -> list[list[int]]:
        """Cut the groups into consecutive parts of about one size; empty if there are fewer groups."""
        G = len(self)
        if parts > G:
            return []
        return [list(range(G * i // parts, G * (i + 1) // parts)) for i in range(parts)]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare model and data constant for all products inside, see `CurvatureOperator.frozen`."""
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.frozen())
            yield

    def products(self, V: Tensor) -> Iterator[Tensor]:
        """Yield C_g V of each group, (n, k)."""
        for group in self.groups:
            yield group @ V

    def projected(self, U: Tensor) -> np.ndarray:
        """Uᵀ C_g U of every group: (G, k, k)."""
        matrices = [(U.T @ product).double().cpu().numpy() for product in self.products(U)]
        return np.stack([(A + A.T) / 2 for A in matrices])

    def forms(self, V: Tensor, slices: Sequence[slice] | None = None) -> np.ndarray:
        """vᵀ C_g v for each column v, (k, G); with slices the part of each block, (k, G, B)."""
        rows = [slice(None)] if slices is None else list(slices)
        forms = [
            torch.stack([(V[r] * product[r]).double().sum(0) for r in rows], dim=1)
            for product in self.products(V)
        ]
        stacked = torch.stack(forms, dim=1).cpu().numpy()
        return stacked[..., 0] if slices is None else stacked

    def grams(self, V: Tensor) -> np.ndarray:
        """⟨C_g v, C_h v⟩ for each column v, (k, G, G)."""
        return self.forms_and_grams(V)[1]

    def forms_and_grams(self, V: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """vᵀ C_g v, (k, G), and ⟨C_g v, C_h v⟩, (k, G, G), from the same products with each column v.

        Columns go through in batches whose products fit into `MOST_BYTES`.
        """
        size = max(1, V.shape[0] * len(self) * V.element_size())
        step = max(1, MOST_BYTES // size)
        forms: list[np.ndarray] = []
        grams: list[np.ndarray] = []
        for start in range(0, V.shape[1], step):
            columns = V[:, start : start + step]
            stacked = torch.stack(list(self.products(columns)))
            forms.append((stacked * columns).double().sum(1).T.cpu().numpy())
            grams += [torch.mm(S, S.T).double().cpu().numpy() for S in stacked.unbind(-1)]
        return np.concatenate(forms), np.stack(grams)


def split_sample(op: CurvatureOperator, *, unit: int = 1, most: int = MOST_GROUPS) -> Split:
    """Split the sequences of an operator's data into groups.

    Args:
        op: An operator on a problem.
        unit: Number of consecutive sequences of the data that are drawn together.
        most: Most groups. A group has one unit or several.
    """
    check_count("unit", unit, at_least=1)
    check_count("most", most, at_least=1)
    if not isinstance(op, CurvatureOperator) or isinstance(op, MonteCarloFisher):
        raise UsageError(
            f"expected a Hessian, GGN or another operator without random targets, got a {type(op).__name__}"
        )
    problem = op.problem
    if problem.model.spread is not None or problem.batches.share is not None:
        raise UsageError("expected all data and the whole model in one process to split a sample")
    if problem.loss.has_outputs:
        refuse_coupled(problem)
    members = groups_of(problem, unit, most)
    groups = [op.on(taken(problem, numbers)) for numbers in members]
    counts = np.array([group.problem.num_terms for group in groups])

    def unite(numbers: Sequence[int]) -> CurvatureOperator:
        return op.on(taken(problem, np.concatenate([members[g] for g in numbers])))

    return Split(op, groups, counts, unite, unit=unit, num_terms=float(counts.sum()))


def groups_of(problem: Problem, unit: int, most: int = MOST_GROUPS) -> list[np.ndarray]:
    """Return the numbers of the sequences of each group, without sequences that have no weight.

    If the loss takes whole batches, the batches are the units.
    """
    counted: list[int] = []
    first = 0
    for batch in problem.batches:
        count = batch.num_sequences
        if problem.loss.has_outputs:
            sequences = (batch[i : i + 1] for i in range(count))
            weights = [problem.loss.total_weight(s.targets, s.weights) for s in sequences]
            counted += [first + i for i, weight in enumerate(weights) if weight > 0]
        else:
            counted.append(first)
        first += count
    units = [counted[i : i + unit] for i in range(0, len(counted), unit)]
    if len(units) > 1 and len(units[-1]) < unit:
        incomplete = units.pop()
        units[-1] = units[-1] + incomplete
    G = min(len(units), most)
    return [np.concatenate(units[len(units) * g // G : len(units) * (g + 1) // G]) for g in range(G)]


def taken(problem: Problem, members: np.ndarray) -> Problem:
    """Return the problem on the sequences with these numbers."""
    part, wanted = copy.copy(problem), set(members.tolist())
    batches: list[Batch] = []
    first = 0
    for batch in problem.batches:
        count = batch.num_sequences
        if not problem.loss.has_outputs:
            batches += [batch] if first in wanted else []
        elif rows := [i for i in range(count) if first + i in wanted]:
            index = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
            batches.append(batch.map(lambda t, index=index: t[index]))
        first += count
    part.batches = Batches(batches, name=problem.batches.name, notes=problem.batches.notes)
    return part

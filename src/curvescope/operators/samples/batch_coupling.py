"""Detect batches whose sequences influence each other; such a batch cannot be cut into sequences.

A mixture of experts with a limited capacity, or a batch's own statistics, make outputs of a sequence depend
on those beside it. Everything that takes sequences out of their batches asks here first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.data.batches import Batch
from curvescope.models.capture.activation_points import is_zoo
from curvescope.operators.samples.stacked import TOLERANCE
from curvescope.problem import Problem, differentiating


def refuse_coupled(problem: Problem, batches: Iterable[Batch] | None = None) -> None:
    """Raise if the outputs or the loss of a sequence depend on the other sequences of its batch.

    Args:
        problem: Every sequence is computed once more, by itself.
        batches: Some of the problem's, by default all.
    """
    loss = problem.loss
    for some in problem.batches if batches is None else batches:
        if some.num_sequences < 2:
            continue
        batch = some.map(problem.placed)
        singles = [batch[i : i + 1] for i in range(batch.num_sequences)]
        with differentiating(), torch.no_grad():
            z = problem.outputs(batch)
            apart = any(_far(z[i : i + 1], problem.outputs(single), z) for i, single in enumerate(singles))
            whole = loss.sum(z, batch.targets, batch.weights)
            each = [loss.sum(z[i : i + 1], b.targets, b.weights) for i, b in enumerate(singles)]
        if apart or not math.isclose(float(whole), float(sum(each)), rel_tol=TOLERANCE[problem.dtype]):
            raise UsageError(
                f"the {'outputs' if apart else 'loss'} of a sequence of {problem.model.name} depend on the "
                f"other sequences in its batch, so a single sequence has no loss or curvature",
                hint="batches of one sequence each, if that is what is meant",
            )


def refuse_cuts(problem: Problem) -> None:
    """Raise where sequences that are cut out of a batch have other outputs than in it.

    For data in shares (`distributed.share`), the sequences of this rank are compared with their batches. For
    a sharded model of an unknown family, every batch is compared, on all ranks together.
    """
    spread = problem.model.spread
    differences = [
        _differ(problem, *part) for part in cut_sequences(problem)
    ]  # all of them: ranks may compute together
    apart = any(differences)
    if apart if spread is None else not spread.all(not apart, problem.device):
        raise UsageError(
            f"the outputs of a sequence of {problem.model.name} depend on the other sequences in its "
            f"batch, and a batch was split over ranks",
            hint="as many batches as ranks, or a multiple, so that none is cut"
            if spread is None
            else "batches of one sequence each, if that is what is meant",
        )


def cut_sequences(problem: Problem) -> Sequence[tuple[Batch, slice]]:
    """Batches that others have a part of, and the sequences that are here."""
    share, spread = problem.batches.share, problem.model.spread
    if share is not None:
        return share.cut
    if spread is None or spread.ranks == 1 or problem.model.places or is_zoo(problem.model):
        return ()
    rows = [(batch, spread.rows(batch.num_sequences) or range(1)) for batch in problem.batches]
    return [(batch, slice(local.start, local.stop)) for batch, local in rows]


def _differ(problem: Problem, whole: Batch, rows: slice) -> bool:
    batch = whole.map(problem.placed)
    with differentiating(), torch.no_grad():
        z = problem.outputs(batch)
        return _far(z[rows], problem.outputs(batch[rows]), z)


def _far(outputs: Tensor, alone: Tensor, z: Tensor) -> bool:
    return not float((outputs - alone).abs().max()) <= TOLERANCE[z.dtype] * float(z.abs().max())

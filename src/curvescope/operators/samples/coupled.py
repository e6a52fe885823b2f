"""Whether the sequences of a batch know of each other: then a batch cannot be cut, and no sequence is alone.

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
from curvescope.models.capture.points import is_zoo
from curvescope.operators.samples.stacked import NEAR
from curvescope.problem import Problem, differentiating


def refuse_coupled(problem: Problem, batches: Iterable[Batch] | None = None) -> None:
    """Raise where the outputs or the loss of a sequence depend on those beside it in a batch.

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
            apart = any(_far(z[i : i + 1], problem.outputs(one), z) for i, one in enumerate(singles))
            whole = loss.sum(z, batch.targets, batch.weights)
            each = [loss.sum(z[i : i + 1], b.targets, b.weights) for i, b in enumerate(singles)]
        if apart or not math.isclose(float(whole), float(sum(each)), rel_tol=NEAR[problem.dtype]):
            raise UsageError(
                f"the {'outputs' if apart else 'loss'} of a sequence of {problem.model.name} depend on the "
                "sequences beside it, so that no loss and no curvature is that of one sequence",
                hint="batches of one sequence each, if that is what is meant",
            )


def refuse_cuts(problem: Problem) -> None:
    """Raise where sequences that are cut out of a batch have other outputs than in it.

    Of data in shares (`distributed.share`) those of this rank are computed in their batches too; of a model
    that is spread over ranks every batch is, unless its family is known to us: on all ranks together.
    """
    spread = problem.model.spread
    found = [
        _differ(problem, *part) for part in cut_sequences(problem)
    ]  # all of them: ranks may compute together
    apart = any(found)
    if apart if spread is None else not spread.all(not apart, problem.device):
        raise UsageError(
            f"the outputs of a sequence of {problem.model.name} depend on the sequences beside it, and a "
            "batch was cut over ranks",
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
    return [(batch, slice(own.start, own.stop)) for batch, own in rows]


def _differ(problem: Problem, whole: Batch, rows: slice) -> bool:
    batch = whole.map(problem.placed)
    with differentiating(), torch.no_grad():
        z = problem.outputs(batch)
        return _far(z[rows], problem.outputs(batch[rows]), z)


def _far(found: Tensor, alone: Tensor, z: Tensor) -> bool:
    return not float((found - alone).abs().max()) <= NEAR[z.dtype] * float(z.abs().max())

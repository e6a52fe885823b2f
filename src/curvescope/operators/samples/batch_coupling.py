"""Detect batches whose sequences influence each other; such a batch cannot be cut into sequences.

With a mixture of experts of limited capacity, or with batch statistics, the outputs of a sequence depend on
the other sequences of its batch. Functions that take sequences out of their batches call these checks first.
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
        problem: A `cs.Problem`; every sequence is computed once more, alone.
        batches: Some of the problem's batches, by default all.
    """
    loss = problem.loss
    for given_batch in problem.batches if batches is None else batches:
        if given_batch.num_sequences < 2:
            continue
        batch = given_batch.map(problem.placed)
        singles = [batch[i : i + 1] for i in range(batch.num_sequences)]
        with differentiating(), torch.no_grad():
            z = problem.outputs(batch)
            outputs_differ = any(
                _differ_beyond_rounding(z[i : i + 1], problem.outputs(single), z)
                for i, single in enumerate(singles)
            )
            total = loss.sum(z, batch.targets, batch.weights)
            sums = [loss.sum(z[i : i + 1], b.targets, b.weights) for i, b in enumerate(singles)]
        if outputs_differ or not math.isclose(
            float(total), float(sum(sums)), rel_tol=TOLERANCE[problem.dtype]
        ):
            raise UsageError(
                f"the {'outputs' if outputs_differ else 'loss'} of a sequence of {problem.model.name} "
                f"depend on the other sequences in its batch, so a single sequence has no loss or curvature",
                hint="batches of one sequence each, if that is what is meant",
            )


def refuse_cuts(problem: Problem) -> None:
    """Raise if sequences that are cut out of a batch have other outputs than inside it.

    For data divided over ranks (`distributed.share`), this rank's sequences are compared with their batches.
    For a sharded model of an unknown family, all ranks compare every batch.
    """
    spread = problem.model.spread
    differences = [
        _differ(problem, *part) for part in cut_sequences(problem)
    ]  # no short circuit, because ranks may compute together
    outputs_differ = any(differences)
    if outputs_differ if spread is None else not spread.all(not outputs_differ, problem.device):
        raise UsageError(
            f"the outputs of a sequence of {problem.model.name} depend on the other sequences in its "
            f"batch, and a batch was split over ranks",
            hint="as many batches as ranks, or a multiple, so that none is cut"
            if spread is None
            else "batches of one sequence each, if that is what is meant",
        )


def cut_sequences(problem: Problem) -> Sequence[tuple[Batch, slice]]:
    """Batches that are divided over ranks, each with this rank's sequences."""
    share, spread = problem.batches.share, problem.model.spread
    if share is not None:
        return share.cut
    if spread is None or spread.ranks == 1 or problem.model.places or is_zoo(problem.model):
        return ()
    rows = [(batch, spread.rows(batch.num_sequences) or range(1)) for batch in problem.batches]
    return [(batch, slice(local.start, local.stop)) for batch, local in rows]


def _differ(problem: Problem, full_batch: Batch, rows: slice) -> bool:
    batch = full_batch.map(problem.placed)
    with differentiating(), torch.no_grad():
        z = problem.outputs(batch)
        return _differ_beyond_rounding(z[rows], problem.outputs(batch[rows]), z)


def _differ_beyond_rounding(outputs: Tensor, single: Tensor, z: Tensor) -> bool:
    return not float((outputs - single).abs().max()) <= TOLERANCE[z.dtype] * float(z.abs().max())

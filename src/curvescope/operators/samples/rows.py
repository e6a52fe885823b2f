"""Which samples a batch has: its sequences that count, or their single terms."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.data.batches import Batch
from curvescope.losses import CrossEntropy, SquaredError
from curvescope.losses.base import expand_weights
from curvescope.losses.cross_entropy import is_counted
from curvescope.problem import Problem

Each = Literal["sequence", "term"]


class Rows(NamedTuple):
    """Samples of one batch: which sequences they are, and of terms which entries of their targets."""

    sequences: Tensor  # (R,)
    terms: Tensor | None  # (R,)
    weights: np.ndarray  # (R,) N_x

    def batch(self, whole: Batch, rows: slice = slice(None)) -> Batch:
        """The samples as sequences of a batch; a term is its sequence with no other term that counts."""
        chosen = self.sequences[rows]
        found = whole.map(lambda t: t[chosen.to(t.device)])
        if self.terms is None:
            return found
        hot = torch.nn.functional.one_hot(self.terms[rows], whole.targets[0].numel())
        return Batch(found.inputs, found.targets, hot.reshape(found.targets.shape).to(found.targets.device))


def has_terms(problem: Problem) -> bool:
    """Whether the loss is a sum over single targets, or single entries, that a weight can leave out."""
    loss = problem.loss
    return isinstance(loss, CrossEntropy) or (isinstance(loss, SquaredError) and loss.normalisation == "mean")


def rows_of(problem: Problem, batch: Batch, each: Each) -> Rows:
    """The samples of a batch that count."""
    if each == "sequence":
        ones = (batch[i : i + 1] for i in range(batch.num_sequences))
        weights = np.array([problem.loss.total_weight(one.targets, one.weights) for one in ones])
        kept = np.flatnonzero(weights > 0)
        return Rows(torch.as_tensor(kept), None, weights[kept])
    targets = batch.targets
    w = torch.ones(targets.shape, dtype=torch.float64)
    if batch.weights is not None:
        w = expand_weights(batch.weights, targets).double().cpu()
    if not targets.is_floating_point():
        w = w * is_counted(targets).cpu()
    flat = w.reshape(len(targets), -1)
    sequences, terms = (flat > 0).nonzero(as_tuple=True)
    return Rows(sequences, terms, flat[sequences, terms].numpy())

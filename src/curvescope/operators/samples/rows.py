"""Which samples a batch has: its sequences that count, or their single terms."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.data.batches import Batch
from curvescope.problem import Problem

Each = Literal["sequence", "term"]


class Rows(NamedTuple):
    """Samples of one batch: which sequences they are, and of terms which ones of their sequence."""

    sequences: Tensor  # (R,)
    terms: Tensor | None  # (R,)
    weights: np.ndarray  # (R,) N_x
    divisors: np.ndarray  # (R,) the total weight of the sample's own batch, as `batch` makes it
    shape: tuple[int, ...]  # of the terms of one sequence

    def batch(self, whole: Batch, rows: slice = slice(None)) -> Batch:
        """The samples as sequences of a batch; a term is its sequence with no other term that counts."""
        chosen = self.sequences[rows]
        found = whole.map(lambda t: t[chosen.to(t.device)])
        if self.terms is None:
            return found
        hot = torch.nn.functional.one_hot(self.terms[rows], math.prod(self.shape))
        return Batch(found.inputs, found.targets, hot.reshape(-1, *self.shape).to(found.targets.device))


def has_terms(problem: Problem) -> bool:
    """Return True if the loss is a sum over single targets, or entries, that a weight can leave out."""
    return all(problem.loss.term_weights(b.targets, b.weights) is not None for b in problem.batches)


def rows_of(problem: Problem, batch: Batch, each: Each) -> Rows:
    """The samples of a batch that count."""
    if each == "sequence":
        ones = (batch[i : i + 1] for i in range(batch.num_sequences))
        weights = np.array([problem.loss.total_weight(one.targets, one.weights) for one in ones])
        kept = np.flatnonzero(weights > 0)
        return Rows(torch.as_tensor(kept), None, weights[kept], weights[kept], ())
    w, own = (problem.loss.term_weights(batch.targets, given) for given in (batch.weights, None))
    assert w is not None, "checked by has_terms"
    assert own is not None, "checked by has_terms"
    w, own = w.double().cpu(), own.double().cpu()
    flat = w.reshape(len(w), -1)
    at = sequences, terms = (flat > 0).nonzero(as_tuple=True)
    return Rows(sequences, terms, flat[at].numpy(), own.reshape(len(w), -1)[at].numpy(), tuple(w.shape[1:]))

"""The loss and its gradient over ranks that have a share of the data each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvescope.distributed.sums import add_over_ranks, done_by_all, state_words
from curvescope.models.choice import Params
from curvescope.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def value_and_gradient(
    problem: Problem, *patterns: Params, group: ProcessGroup | None = None
) -> tuple[float, Tensor]:
    """L(θ) = (1/N) Σ_ranks Σ_t w_t ℓ_t and its gradient, (n,), the same on every rank; all of them call it.

    Args:
        problem: Of this rank's share, as `DataParallel` takes it.
        patterns: Blocks of the gradient, by default all that varies.
        group: The ranks, by default all there are.
    """
    batches, space = problem.batches, problem.space(*patterns)

    def own() -> tuple[tuple[Tensor, Tensor], float, list[int]]:
        words, N = state_words(problem, data=False), problem.num_terms
        value = torch.zeros(1, dtype=torch.float64)
        if (batches.share is not None and batches.share.empty) or N == 0:
            return (value, torch.zeros(space.size, dtype=problem.dtype, device=problem.device)), 0.0, words
        found, gradient = problem.value_and_gradient(*patterns)
        return (value + found * N, gradient * N), N, words

    (value, gradient), N = done_by_all(own, device=problem.device, group=group)
    N = N if problem.loss.divided else 1.0
    total = add_over_ranks(value.to(problem.device), group)
    return float(total) / N, add_over_ranks(gradient, group) / N

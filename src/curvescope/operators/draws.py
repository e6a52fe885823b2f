"""The diagonal of the GGN as a mean of squares, from a random root of the loss in the outputs.

Let M_x be the second derivative of a sequence's loss in its outputs and ε independent signs, or Gaussian.
With M_x = R Rᵀ (`Loss.root`), g_x = R ε has the covariance M_x, so

    diag(GGN) = E (1/N) Σ_x (J_xᵀ g_x)²:

one reverse pass for each sequence and draw, and no product. The square of aᵀε has a relative variance of at
most 2, whatever a is: so has every entry of the diagonal, and K sequences that matter alike make it 2/K.
(Classes drawn from the model, as in a Monte-Carlo Fisher, have the same expectation, but a relative variance
of 1/p where an entry depends on a class of small probability p.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.seeds import Probe, probes
from curvescope.operators.samples.per_sample import PerSample
from curvescope.operators.samples.stacked import Graph
from curvescope.problem import Problem

BLOCK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}  # of the gradients of several sequences and draws


def random_squares(
    problem: Problem, space: ParamSpace, count: int, *, probe: Probe, seed: int, at_once: int
) -> Iterator[Tensor]:
    """(1/N) Σ_x (J_xᵀ g_x)² of draws 0, …, count − 1 as columns (n, k), `at_once` of them at a time.

    What is drawn for a sequence depends on the seed, its place in the data and the draw alone.
    """
    samples = PerSample(problem, space, "sequence", _chunk(space, at_once))
    shares, sequences = torch.as_tensor(samples.shares), samples.sequences
    batches = problem.batches
    first = batches.first_sequence
    total = batches.num_sequences if batches.share is None else batches.share.total

    def squares(graph: Graph, rows: slice, draws: range, group: int) -> Tensor:
        z = graph.outputs.detach()
        numbers = [first + int(x) for x in sequences[rows]]
        where = {"kind": probe, "seed": seed, "dtype": z.dtype, "device": z.device}
        own = [
            torch.cat([probes(z[0].numel(), 1, first=s * total + x, **where).T for x in numbers])
            for s in draws
        ]
        noise, batch = torch.stack(own).reshape(-1, *z.shape), graph.batch
        R = problem.loss.root(z, batch.targets, batch.weights, noise)
        return graph.pulled(R, group).square_()

    with samples.frozen():
        for start in range(0, count, at_once):
            draws = range(start, min(start + at_once, count))
            sums = torch.zeros(space.size, len(draws), dtype=space.dtype, device=space.device)
            for rows, found in samples.stream("roots", lambda g, r, group, d=draws: squares(g, r, d, group)):
                sums += torch.einsum("b,bnk->nk", shares[rows].to(found), found)
            yield sums


def _chunk(space: ParamSpace, at_once: int) -> int:
    """Sequences at a time."""
    entry = torch.finfo(space.dtype).bits // 8
    return max(1, BLOCK_BYTES.get(space.device.type, 2**30) // (entry * space.size * at_once))

"""The part of the first batch that products are measured on, and how time and memory grow from it to all.

Matrix products grow as the tokens do, attention as the square of the length T of a sequence. A layer of width
d takes 24 d² operations a token in matrix products and 4 d T in attention, so s sequences are the work

    w = s T (1 + T / 6d),    time  a + b w,    memory  c s T (1 + q T),

where a is what weights take whatever the data are, and q is 0 unless attention keeps its T × T scores: then
h / 16d for h heads. From two parts that were measured a and b are fitted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.tensors.trees import leaves
from curvescope.data.batches import IGNORED, Batch
from curvescope.problem import Problem
from curvescope.studies.setting import kind_of

SHORTEST = 32  # tokens: with fewer, weights are read for little else
CUT = ("causal-lm", "masked-lm")  # what models are made for whose sequences may end earlier
SCORES = 2 / 32  # bytes a score to those a number of a token's width (arXiv:2205.05198, 4.1, no dropout)


class Cut(NamedTuple):
    """So many sequences of the first batch, the first tokens of each; 0 tokens: they cannot be cut."""

    sequences: int
    tokens: int


def whole(problem: Problem) -> Cut:
    """All of the first batch; tokens are counted where sequences can be cut."""
    batch = problem.batches[0]
    return Cut(batch.num_sequences, _length(problem, batch))


def shortest(everything: Cut) -> Cut:
    """The first tokens of one sequence, or one that cannot be cut."""
    return Cut(1, min(SHORTEST, everything.tokens))


def cuts(everything: Cut) -> list[Cut]:
    """All of a batch, then less and less: fewer sequences, then the first half of one, and so on."""
    count, length = everything
    found = [Cut(some, length) for some in range(count, 0, -1)]
    while length > SHORTEST:
        length = max(length // 2, SHORTEST)
        found.append(Cut(1, length))
    return found


def part(problem: Problem, cut: Cut) -> Problem:
    """The problem on a part of its first batch."""
    batch = problem.batches[0][: cut.sequences]
    if cut.tokens:
        batch = batch.map(lambda tensor: tensor[:, : cut.tokens])
    return Problem(problem.model, [batch], loss=problem.loss)


def work(problem: Problem, cut: Cut) -> float:
    """s T (1 + T / 6d), or the sequences where their length is not known."""
    if not cut.tokens:
        return float(cut.sequences)
    return cut.sequences * cut.tokens * (1 + cut.tokens / (6 * width(problem)))


def size(cut: Cut, squares: float) -> float:
    """s T (1 + q T), in which memory is linear."""
    return cut.sequences * max(cut.tokens, 1) * (1 + squares * cut.tokens)


def width(problem: Problem) -> int:
    """d as the model says it, else that of a Transformer with as many parameters and layers."""
    facts = problem.model.facts
    layers = facts.get("n_layers") or 1
    return int(facts.get("d_model") or max(1, math.isqrt(problem.model.num_parameters // (12 * layers))))


def slower(small: tuple[float, float], large: tuple[float, float], at: float) -> float:
    """How many times longer work `at` takes than the large one, from (work, seconds) of a small and a large.

    Where the small one did not take less, nothing is known of a, and time is taken to grow as the work.
    """
    (w, t), (W, T) = small, large
    b = (T - t) / (W - w) if w < W else 0.0
    b = min(b, T / W) if b > 0 else T / W
    return 1 + b * (at - W) / T


def scores(problem: Problem, *, fused: bool) -> float:
    """q: that of plain attention, which keeps a score for every pair of tokens and head, or 0."""
    return 0.0 if fused else SCORES * (problem.model.facts.get("n_heads") or 1) / width(problem)


def _length(problem: Problem, batch: Batch) -> int:
    """T where inputs are ids, and all tensors have a second axis of that length; else 0.

    Nor is a sequence cut that has no target in its first tokens, or of a model that takes one length alone.
    """
    lengths = {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in batch.tensors()}
    ids = not any(tensor.is_floating_point() for tensor in leaves(batch.inputs))
    if len(lengths) > 1 or not ids or kind_of(problem.model) not in CUT or min(lengths) <= SHORTEST:
        return 0
    targets = batch.targets
    if isinstance(targets, Tensor) and not bool((targets[:1, :SHORTEST] != IGNORED).any()):
        return 0
    return min(lengths) if _takes_less(problem, min(lengths)) else 0


def _takes_less(problem: Problem, length: int) -> bool:
    try:
        part(problem, Cut(1, min(SHORTEST, length))).loss_value()
    except (CurvescopeError, RuntimeError, ValueError, IndexError):
        return False
    return True

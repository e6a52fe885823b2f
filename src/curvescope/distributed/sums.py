"""Sums over ranks: whether all of them came here with the same model, then the sum itself.

Ranks agree first, by one small sum: how many could not do their part, the total weight N, and whether they
are at the same parameters. Of the latter each sends W words h and their squares; all are equal if and only if

    R Σ_r h_r² = (Σ_r h_r)²,

by Cauchy and Schwarz. Whole numbers below 2²⁰ and their sums are exact in float64 for 8192 ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.ranks import group_in_step, in_step, together
from curvescope.engines import Engine
from curvescope.engines.digest import digest
from curvescope.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
WORDS, BITS = 4, 20
DIFFERENT = "the ranks do not have the same {}: parameters, buffers, or other numbers differ"
LOAD = "load the same on every rank, and let every rank change it alike"


def state_words(problem: Problem, *, data: bool) -> list[int]:
    """W numbers of BITS bits that are those of another rank only if its numbers are.

    Of parameters, buffers and the point; of the data too where every rank has all of them.
    """
    module = problem.model.module
    held: list[Tensor] = [*module.parameters(), *module.buffers(), *problem.point.values()]
    if data:
        held += [t for batch in problem.batches for t in batch.tensors()]
    return hashed(digest(held))


def hashed(parts: Iterable[Tensor]) -> list[int]:
    """W numbers of BITS bits that tell tensors apart."""
    words = hashlib.blake2b(digest_size=WORDS * 4)
    for part in parts:
        words.update(repr((part.dtype, tuple(part.shape))).encode())
        words.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    found = words.digest()
    return [int.from_bytes(found[4 * i : 4 * i + 4], "big") % 2**BITS for i in range(WORDS)]


def done_by_all(
    work: Callable[[], tuple[T, float, list[int]]],
    *,
    device: torch.device,
    group: ProcessGroup | None,
    same: str = "model",
) -> tuple[T, float]:
    """What `work` gave here, and the sum of its numbers N over ranks; an error on one rank is one on all.

    Args:
        work: What a rank does by itself, with no collective operation in it: its part, its own N, and words
            that must be those of the others.
        device: Where collective operations take place.
        group: The ranks.
        same: What the words are of.
    """
    error, found, N, words = None, None, 0.0, [0] * WORDS
    try:
        found, N, words = work()
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    own = [float(error is not None), N, *words, *(h * h for h in words)]
    wide = torch.float32 if device.type == "mps" else torch.float64
    told = torch.tensor(own, dtype=wide, device=device)
    dist.all_reduce(told, group=group)
    failed, total, *rest = told.tolist()
    if failed:
        _raise(error, group)
    ranks = dist.get_world_size(group)
    if any(ranks * squares != h * h for h, squares in zip(rest[:WORDS], rest[WORDS:], strict=True)):
        raise CurvescopeError(DIFFERENT.format(same), hint=LOAD)
    assert found is not None, "no rank failed"
    return found, total


def _raise(error: BaseException | None, group: ProcessGroup | None) -> None:
    """The same sentence on every rank."""
    with in_step(group), together():
        if error is not None:
            raise error


@contextmanager
def steady_on_all(engines: Iterable[Engine], group: ProcessGroup | None) -> Iterator[None]:
    """Products inside belong together on every rank: a change that one of them finds is an error on all."""
    with ExitStack() as opened:
        with in_step(group), together():
            for engine in engines:
                opened.enter_context(engine.steady())
        yield
        with in_step(group), together():
            opened.close()


def add_over_ranks(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Σ_ranks, in the place of this rank's part."""
    part = part.contiguous()
    dist.all_reduce(part, group=group)
    return part


def first_of_ranks(tensor: Tensor) -> Tensor:
    """Rank 0's tensor on all ranks in step, in the place of theirs."""
    group, tensor = group_in_step(), tensor.contiguous()
    dist.broadcast(tensor, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return tensor

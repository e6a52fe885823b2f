"""Sums over ranks: whether all of them came here with the same model, then the sum itself.

Ranks agree first, by one small sum: how many could not do their part, the total weight N, and whether they
are at the same parameters and ask for the same product. Of the latter each sends W words h and their squares;
all are equal if and only if

    R Σ_r h_r² = (Σ_r h_r)²,

by Cauchy and Schwarz. Whole numbers below 2²⁰ and their sums are exact in float64 for 8192 ranks. Of vectors
that each has computed for itself one number is compared up to rounding (`asked`).

What ranks ask for, in a few words and one number, so that they notice if it is not the same product.

The words are of the operator and of the shapes, and have to be equal. Vectors that every rank has computed
for itself may differ by rounding, so of these one number is compared: s = ⟨r, V⟩ / ‖V‖ for fixed random signs
r, which is of size 1 and differs by about ‖V − V′‖ / ‖V‖.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.ranks import everyone, group_in_step, in_step, together
from curvescope.core.seeds import generator
from curvescope.core.threads import own_threads, same_threads
from curvescope.engines import Engine
from curvescope.engines.tensor_digest import digest
from curvescope.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIGNS = 2**12


class Asked(NamedTuple):
    """A product that is asked for; the others ask for the same."""

    words: str
    vectors: float  # s


def asked(op: Any, V: Tensor, *spaces: Any) -> Asked:
    """What an operator is asked for: its product with V between these spaces."""
    shift = getattr(op, "shift", None)
    words = (
        type(op).__name__,
        tuple(V.shape),
        str(V.dtype),
        tuple(tuple(block.name for block in space) for space in spaces),
        None if shift is None else (shift.uniform, {k: _plain(w) for k, w in shift.weights.items()}),
        op.problem.loss.name,
        {name: _plain(value) for name, value in op.problem.loss.options.items()},
        getattr(op, "source", None),
        getattr(op, "seed", None),
    )
    return Asked(repr(words), seen(V))


def seen(V: Tensor) -> float:
    """⟨r, V⟩ / ‖V‖ for signs r that repeat along V; 2 where V is not finite, 0 where it is zero."""
    flat = V.reshape(-1)
    signs = _signs(V.device, V.dtype)
    whole = flat.numel() // SIGNS * SIGNS
    total = (flat[:whole].view(-1, SIGNS) @ signs).sum(dtype=torch.float64)
    total = total + (flat[whole:] @ signs[: flat.numel() - whole]).double()
    size = torch.linalg.vector_norm(flat, dtype=torch.float64)
    found = float(total / size) if float(size) else 0.0
    return found if math.isfinite(found) else 2.0


def _plain(weight: Any) -> Any:
    return float(weight.double().sum()) if isinstance(weight, Tensor) else weight


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    return (2 * torch.randint(2, (SIGNS,), generator=generator(0)) - 1).to(device, dtype)


T = TypeVar("T")
WORDS, BITS = 4, 20
DIFFERENT = "the ranks do not have the same {}: parameters, buffers, or other numbers differ"
LOAD = "load the same on every rank, and let every rank change it alike"
OTHER = "the ranks do not ask for the same product: {} differ"
ALIKE = "every rank takes the same steps, with the same seeds"
ROUNDED = 1e-5  # that vectors may differ by, which every rank computes for itself
NOTHING = Asked("", 0.0)


def state_words(problem: Problem, *, data: bool) -> list[int]:
    """W numbers of BITS bits that are those of another rank only if its numbers are.

    Of parameters, buffers and the point; of the data too where every rank has all of them.
    """
    module = problem.model.module
    held: list[Tensor] = [*module.parameters(), *module.buffers(), *problem.point.values()]
    if data:
        held += [t for batch in problem.batches for t in batch.tensors()]
    return hashed(digest(held))


def hashed(parts: Iterable[Tensor | str]) -> list[int]:
    """W numbers of BITS bits that tell tensors and words apart."""
    words = hashlib.blake2b(digest_size=WORDS * 4)
    for part in parts:
        if isinstance(part, str):
            words.update(part.encode())
            continue
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
    ask: Callable[[], Asked] = lambda: NOTHING,
) -> tuple[T, float]:
    """What `work` gave here, and the sum of its numbers N over ranks; an error on one rank is one on all.

    Args:
        work: What a rank does by itself, with no collective operation in it: its part, its own N, and words
            that must be those of the others.
        device: Where collective operations take place.
        group: The ranks.
        same: What the words are of.
        ask: What this rank asks for, which the others have to ask for too.
    """
    error, found, N, words, own = None, None, 0.0, [0] * WORDS, NOTHING
    try:
        own = ask()
        with own_threads():
            found, N, words = work()
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    failed, total, *rest = _told(
        [float(error is not None), N], [*words, *hashed([own.words])], own, device, group
    )
    if failed:
        _raise(error, group)
    equal, near = rest[: 2 * WORDS], rest[-1]
    if not all(equal[:WORDS]):
        raise CurvescopeError(DIFFERENT.format(same), hint=LOAD)
    if not all(equal[WORDS:]):
        raise CurvescopeError(
            OTHER.format("operators, blocks, losses, shifts or numbers of columns"), hint=ALIKE
        )
    if not near:
        raise CurvescopeError(OTHER.format("vectors"), hint=ALIKE)
    assert found is not None, "no rank failed"
    return found, total


def _told(
    summed: list[float], words: list[int], own: Asked, device: torch.device, group: ProcessGroup | None
) -> list[float]:
    """Σ_ranks of some numbers; of each word whether all ranks have it; whether vectors are about the same."""
    count, ranks = len(summed), dist.get_world_size(group)
    sent = [*summed, *words, *(h * h for h in words), own.vectors, own.vectors**2]
    wide = torch.float32 if device.type == "mps" else torch.float64
    told = torch.tensor(sent, dtype=wide, device=device)
    dist.all_reduce(told, group=group)
    *found, s, squares = told.tolist()
    rest = found[count:]
    equal = [ranks * hh == h * h for h, hh in zip(rest[: len(words)], rest[len(words) :], strict=True)]
    variance = squares / ranks - (s / ranks) ** 2
    return [*found[:count], *equal, variance <= ROUNDED**2 + 1e-14]


def _raise(error: BaseException | None, group: ProcessGroup | None) -> None:
    """The same sentence on every rank."""
    with in_step(group), together():
        if error is not None:
            raise error


@contextmanager
def frozen_on_all(engines: Iterable[Engine], group: ProcessGroup | None) -> Iterator[None]:
    """Products inside belong together on every rank: a change that one of them finds is an error on all.

    Between products all ranks compute with the same number of threads, so that they take the same steps.
    """

    def least(value: float) -> float:
        with in_step(group):
            return min(everyone(value))

    with ExitStack() as opened:
        with in_step(group), together():
            for engine in engines:
                opened.enter_context(engine.frozen())
        with same_threads(least):
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

"""Sums over ranks, after a check that all ranks have the same model and request the same product.

First, one small sum gives the number of failed ranks, the total weight N, and a comparison of parameters and
requested products. For the comparison, each rank sends W words h and their squares. All ranks' words are
equal if and only if

    R Σ_r h_r² = (Σ_r h_r)²,

by Cauchy and Schwarz. Whole numbers below 2²⁰ and their sums are exact in float64 for 8192 ranks. Vectors
that each rank has computed itself are compared by one number, up to rounding (`describe_request`).

A requested product is described by a few words and one number, so that ranks detect different requests.

The words describe the operator and the shapes, and must be equal. Vectors that every rank has computed itself
may differ by rounding. They are compared by s = ⟨r, V⟩ / ‖V‖ for fixed random signs r: s is of order 1 and
differs by about ‖V − V′‖ / ‖V‖.
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
from curvescope.core.ranks import gather_objects, group_in_step, in_step, shared_errors
from curvescope.core.seeds import generator
from curvescope.core.threads import equal_threads, unlimited_threads
from curvescope.engines import Engine
from curvescope.engines.tensor_digest import digest
from curvescope.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIGNS = 2**12


class ProductRequest(NamedTuple):
    """Description of a requested product, which must be the same on all ranks."""

    words: str
    vectors: float  # s


def describe_request(op: Any, V: Tensor, *spaces: Any) -> ProductRequest:
    """Describe the product that an operator is to compute with V between these spaces."""
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
    return ProductRequest(repr(words), vector_projection(V))


def vector_projection(V: Tensor) -> float:
    """⟨r, V⟩ / ‖V‖ for signs r that repeat along V; 2 if V is not finite, 0 if it is zero."""
    flat = V.reshape(-1)
    signs = _signs(V.device, V.dtype)
    num_full = flat.numel() // SIGNS * SIGNS
    total = (flat[:num_full].view(-1, SIGNS) @ signs).sum(dtype=torch.float64)
    total = total + (flat[num_full:] @ signs[: flat.numel() - num_full]).double()
    size = torch.linalg.vector_norm(flat, dtype=torch.float64)
    projection = float(total / size) if float(size) else 0.0
    return projection if math.isfinite(projection) else 2.0


def _plain(weight: Any) -> Any:
    return float(weight.double().sum()) if isinstance(weight, Tensor) else weight


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    return (2 * torch.randint(2, (SIGNS,), generator=generator(0)) - 1).to(device, dtype)


T = TypeVar("T")
WORDS, BITS = 4, 20
DIFFERENT_STATE = "the ranks do not have the same {}: parameters, buffers, or other numbers differ"
SAME_STATE_HINT = "load the same on every rank, and change it in the same way on every rank"
DIFFERENT_PRODUCT = "the ranks do not request the same product: {} differ"
SAME_STEPS_HINT = "every rank takes the same steps, with the same seeds"
ROUNDED = 1e-5  # largest difference of vectors that every rank computes itself
NOTHING = ProductRequest("", 0.0)


def state_digest(problem: Problem, *, data: bool) -> list[int]:
    """Digest of the state as W numbers of BITS bits, equal on two ranks only if their states are equal.

    It covers parameters, buffers and the point, and with `data` also the data.
    """
    module = problem.model.module
    tensors: list[Tensor] = [*module.parameters(), *module.buffers(), *problem.point.values()]
    if data:
        tensors += [t for batch in problem.batches for t in batch.tensors()]
    return digest_words(digest(tensors))


def digest_words(parts: Iterable[Tensor | str]) -> list[int]:
    """Digest of tensors and strings as W numbers of BITS bits."""
    words = hashlib.blake2b(digest_size=WORDS * 4)
    for part in parts:
        if isinstance(part, str):
            words.update(part.encode())
            continue
        words.update(repr((part.dtype, tuple(part.shape))).encode())
        words.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digest_bytes = words.digest()
    return [int.from_bytes(digest_bytes[4 * i : 4 * i + 4], "big") % 2**BITS for i in range(WORDS)]


def run_on_all_ranks(
    work: Callable[[], tuple[T, float, list[int]]],
    *,
    device: torch.device,
    group: ProcessGroup | None,
    same: str = "model",
    ask: Callable[[], ProductRequest] = lambda: NOTHING,
) -> tuple[T, float]:
    """Return the result of `work` and the sum of N over ranks; raise on all ranks if one fails.

    Args:
        work: Local computation without collective operations; returns this rank's part, its N, and words
            that must be equal on all ranks.
        device: Device of the collective operations.
        group: Ranks.
        same: Name of the things that the words describe, for the error.
        ask: Returns the requested product, which must be the same on all ranks.
    """
    error, found, N, words, request = None, None, 0.0, [0] * WORDS, NOTHING
    try:
        request = ask()
        with unlimited_threads():
            found, N, words = work()
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    failed, total, *rest = _sum_and_compare(
        [float(error is not None), N], [*words, *digest_words([request.words])], request, device, group
    )
    if failed:
        _raise(error, group)
    equal, vectors_agree = rest[: 2 * WORDS], rest[-1]
    if not all(equal[:WORDS]):
        raise CurvescopeError(DIFFERENT_STATE.format(same), hint=SAME_STATE_HINT)
    if not all(equal[WORDS:]):
        raise CurvescopeError(
            DIFFERENT_PRODUCT.format("operators, blocks, losses, shifts or numbers of columns"),
            hint=SAME_STEPS_HINT,
        )
    if not vectors_agree:
        raise CurvescopeError(DIFFERENT_PRODUCT.format("vectors"), hint=SAME_STEPS_HINT)
    assert found is not None, "no rank failed"
    return found, total


def _sum_and_compare(
    summed: list[float],
    words: list[int],
    request: ProductRequest,
    device: torch.device,
    group: ProcessGroup | None,
) -> list[float]:
    """Return sums over ranks, 1 for each word that all ranks share, and 1 if vectors agree up to rounding."""
    count, ranks = len(summed), dist.get_world_size(group)
    sent = [*summed, *words, *(h * h for h in words), request.vectors, request.vectors**2]
    wide = torch.float32 if device.type == "mps" else torch.float64
    buffer = torch.tensor(sent, dtype=wide, device=device)
    dist.all_reduce(buffer, group=group)
    *found, s, squares = buffer.tolist()
    rest = found[count:]
    equal = [ranks * hh == h * h for h, hh in zip(rest[: len(words)], rest[len(words) :], strict=True)]
    variance = squares / ranks - (s / ranks) ** 2
    return [*found[:count], *equal, variance <= ROUNDED**2 + 1e-14]


def _raise(error: BaseException | None, group: ProcessGroup | None) -> None:
    """Raise the same error on every rank."""
    with in_step(group), shared_errors():
        if error is not None:
            raise error


def least_of_ranks(group: ProcessGroup | None) -> Callable[[float], float]:
    """Return a function of one number of each rank that returns the smallest."""

    def least(value: float) -> float:
        with in_step(group):
            return min(gather_objects(value))

    return least


@contextmanager
def frozen_on_all(engines: Iterable[Engine], group: ProcessGroup | None) -> Iterator[None]:
    """Treat the products inside as one computation: raise on all ranks if one of them detects a change.

    Between products all ranks use the same number of threads, so that they compute the same bits.
    """
    with ExitStack() as opened:
        with in_step(group), shared_errors():
            for engine in engines:
                opened.enter_context(engine.frozen())
        with equal_threads(least_of_ranks(group)):
            yield
        with in_step(group), shared_errors():
            opened.close()


def add_over_ranks(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over ranks, written into this rank's part."""
    part = part.contiguous()
    dist.all_reduce(part, group=group)
    return part


def first_of_ranks(tensor: Tensor) -> Tensor:
    """Broadcast rank 0's tensor into those of all ranks."""
    group, tensor = group_in_step(), tensor.contiguous()
    dist.broadcast(tensor, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return tensor

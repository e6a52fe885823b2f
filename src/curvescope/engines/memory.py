"""How many columns of a product to treat at once: what fits into memory, and what pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvescope.core.errors import CurvescopeError
from curvescope.core.numbers import data_size, plural
from curvescope.core.tensors import free_bytes
from curvescope.data.batches import Batch
from curvescope.models.running.held import DispatchMode
from curvescope.problem import Problem

T = TypeVar("T")
SHARE_OF_FREE_MEMORY = 0.25
ROOM = 0.8  # of the free memory that a batch should take at most
RESULTS_PER_COLUMN = 6  # a direction's intermediates, in units of the forward pass's results
# Batching directions pays while each is too small to fill the processor. On a CPU with two cores, products
# of a model whose forward pass makes 0.1 MB are ten times faster batched, with 20 MB they are slower. So are
# two columns of 60 MB (15 M parameters): 0.83 s together, 0.54 s one after the other.
CPU_GROUP_BYTES = 8 * 2**20


class _CountBytes(DispatchMode):
    """Adds up the size of everything the operations inside return, and of what of it is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.own = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                size = _own_bytes(item)
                self.bytes += size
                self.own += 0 if _memory(item) in given else size
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _own_bytes(tensor: Tensor) -> int:
    """Size of a tensor's entries; of a sparse one those that are not zero."""
    if tensor.layout != torch.strided:
        return tensor._nnz() * tensor.element_size()
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def result_bytes(call: Callable[[], T], *, views: bool = True) -> tuple[T, int]:
    """What a call returns, such as a forward pass, and the size of all intermediate results.

    Args:
        views: whether those count that lie in the memory of others. Weights are transposed for every pass:
            on a few positions that would be the most of it, and no graph takes it.
    """
    with torch.no_grad(), _CountBytes() as count:
        found = call()
    return found, count.bytes if views else count.own


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of a GPU or of the machine."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def directions_per_pass(problem: Problem, results: int) -> int:
    """Directions to send through one backward pass together; at least one.

    Args:
        results: bytes of all intermediate results of one forward pass.
    """
    limit = CPU_GROUP_BYTES
    if problem.device.type != "cpu":
        limit = int(SHARE_OF_FREE_MEMORY * free_bytes(problem.device)) // RESULTS_PER_COLUMN
    return max(1, limit // max(results, 1))


def columns_at_once(problem: Problem) -> int:
    """Columns of which four copies (tangents, results, their sum) take a quarter of the free memory.

    One, on a CPU, where a column alone is more than pays.
    """
    column = problem.model.num_parameters * torch.finfo(problem.dtype).bits // 8
    if problem.device.type == "cpu" and column > CPU_GROUP_BYTES:
        return 1
    return max(1, int(SHARE_OF_FREE_MEMORY * free_bytes(problem.device)) // max(4 * column, 1))


def too_large(problem: Problem, batch: Batch, size: int, *, again: bool) -> CurvescopeError:
    """What to do where one direction through a batch takes more memory than there is.

    Args:
        size: bytes of its graph, as expected.
        again: whether layers are computed again already.
    """
    free, count = free_bytes(problem.device), batch.num_sequences
    fits = min(int(ROOM * free / size * count) if size else count, count // 2)
    hint = "" if again else "checkpoint=True computes layers again instead of keeping them"
    if fits:
        smaller = f"batches of {fits} should fit (batch_size={fits})"
        hint = f"{smaller}; {hint}" if hint else smaller
    return CurvescopeError(
        f"memory ran out in a product of {problem.model.name} with one direction through a batch of "
        f"{plural(count, 'sequence')}: about {data_size(size)} are needed, {data_size(free)} are free",
        hint=hint or "take shorter sequences, or a device with more memory",
    )

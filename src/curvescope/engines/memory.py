"""Number of columns per product, limited by memory and by what makes products faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from curvescope.core.errors import CurvescopeError
from curvescope.core.number_format import data_size, plural
from curvescope.core.tensors import free_bytes
from curvescope.data.batches import Batch
from curvescope.models.running.aliased_parameters import DispatchMode
from curvescope.problem import Problem

T = TypeVar("T")
SHARE_OF_FREE_MEMORY = 0.25
BATCH_SHARE = 0.8  # largest share of the free memory for a batch
RESULTS_PER_COLUMN = 6  # a direction's intermediates, in units of the forward pass's results
# Batching directions pays while each is too small to fill the processor. On a CPU with two cores, products
# of a model whose forward pass makes 0.1 MB are ten times faster batched, with 20 MB they are slower. So are
# two columns of 60 MB (15 M parameters): 0.83 s together, 0.54 s one after the other.
CPU_GROUP_BYTES = 8 * 2**20


class _CountBytes(DispatchMode):
    """Mode that sums the sizes of all results of operations inside, and of those that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.bytes_without_views = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        argument_memory = {_memory(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                size = _tensor_bytes(item)
                self.bytes += size
                self.bytes_without_views += 0 if _memory(item) in argument_memory else size
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _tensor_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor's entries; for a sparse tensor, of its nonzero entries."""
    if tensor.layout != torch.strided:
        return tensor._nnz() * tensor.element_size()
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def result_bytes(call: Callable[[], T], *, views: bool = True) -> tuple[T, int]:
    """Return the result of a call, such as a forward pass, and the size of all intermediate results.

    Args:
        views: Count views, too. On a few positions these are mostly transposed weights, which no graph
            stores.
    """
    with torch.no_grad(), _CountBytes() as count:
        result = call()
    return result, count.bytes if views else count.bytes_without_views


def ran_out(error: BaseException) -> bool:
    """Return True if an error means that a GPU or the machine ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def directions_per_pass(problem: Problem, results: int) -> int:
    """Return the number of directions per backward pass, at least one.

    Args:
        results: bytes of all intermediate results of one forward pass.
    """
    limit = CPU_GROUP_BYTES
    if problem.device.type != "cpu":
        limit = int(SHARE_OF_FREE_MEMORY * free_bytes(problem.device)) // RESULTS_PER_COLUMN
    return max(1, limit // max(results, 1))


def columns_at_once(problem: Problem) -> int:
    """Number of columns whose four copies (tangents, results, sum) fit into a quarter of the memory.

    On a CPU it is one if columns are too large for batching to save time.
    """
    column = problem.model.num_parameters * torch.finfo(problem.dtype).bits // 8
    if problem.device.type == "cpu" and column > CPU_GROUP_BYTES:
        return 1
    return max(1, int(SHARE_OF_FREE_MEMORY * free_bytes(problem.device)) // max(4 * column, 1))


def too_large(problem: Problem, batch: Batch, size: int, *, again: bool) -> CurvescopeError:
    """Return the error for one direction through one batch that needs more memory than there is.

    Args:
        size: bytes of its graph, as expected.
        again: True if layers are already recomputed.
    """
    free, count = free_bytes(problem.device), batch.num_sequences
    num_fitting = min(int(BATCH_SHARE * free / size * count) if size else count, count // 2)
    hint = "" if again else "checkpoint=True recomputes layers instead of storing them"
    if num_fitting:
        smaller = f"batches of {num_fitting} should fit (batch_size={num_fitting})"
        hint = f"{smaller}; {hint}" if hint else smaller
    return CurvescopeError(
        f"memory ran out in a product of {problem.model.name} with one direction through a batch of "
        f"{plural(count, 'sequence')}: about {data_size(size)} are needed, {data_size(free)} are free",
        hint=hint or "take shorter sequences, or a device with more memory",
    )

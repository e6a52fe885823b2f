"""Record the linear maps of a module's parameters: their inputs, and the graph edges of output gradients.

The user's module runs once in a mode that intercepts function calls, independent of classes: `nn.Linear`,
GPT-2's `Conv1D`, a packed matrix, a slice of one, and a transposed embedding are all y = a W (+ b) with W a
view of a parameter. A lookup y = E[ids] is the same with one-hot inputs. Other uses of a parameter are not
recorded; `layers` detects them, because the gradients do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from curvescope.data.batches import Batch
from curvescope.engines.module_runner import Runner
from curvescope.kernels.attention.multihead import multihead
from curvescope.kernels.backends import casting
from curvescope.kernels.function_mode import LINEAR_MAPS
from curvescope.kernels.head import LinearHead
from curvescope.models.running.eager import gradient_edge
from curvescope.problem import Leaves, Problem, check_finite


class View(NamedTuple):
    """A strided view of a parameter: entry (i, j) has the flat position offset + i s_0 + j s_1."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def positions(self) -> Tensor:
        """Flat positions of the view's entries in its parameter, in the view's shape."""
        positions = torch.tensor(self.offset)
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = torch.arange(size) * stride
            positions = positions[..., None] + steps if axis else positions + steps
        return positions


@dataclass
class Use:
    """One call y = a W + b with W (d_in, d_out): inputs, and the edge at which gradients of y arrive."""

    weight: View
    given: Tensor  # a (…, d_in), or the ids (…) of a lookup
    edge: GradientEdge
    lookup: bool = False
    padding: int | None = None  # id whose row is constant
    bias: View | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes of y before its last."""
        return tuple(self.given.shape if self.lookup else self.given.shape[:-1])

    def inputs(self, dtype: torch.dtype) -> Tensor:
        """Return a with all its rows in one axis: (rows, d_in)."""
        if not self.lookup:
            return self.given.reshape(-1, self.given.shape[-1])
        ids = self.given.reshape(-1)
        hot = F.one_hot(ids, self.weight.shape[0]).to(dtype)
        return hot if self.padding is None else hot * (ids != self.padding)[:, None]


class RecordedBatch(NamedTuple):
    """Outputs of a batch as a function of leaves, and the recorded linear maps."""

    leaves: Leaves
    outputs: Tensor
    uses: list[Use]


def record(problem: Problem, batch: Batch) -> RecordedBatch:
    """Run the module on a batch in eval mode, with leaves for all parameters, and record its linear maps."""
    runner, names = Runner(problem), tuple(dict(problem.named_parameters()))

    def run(leaves: Leaves) -> tuple[Tensor, list[Use]]:
        with _Recorder(leaves) as mode:
            z = runner.outputs(batch, leaves, second_order=False, lazy=False)
        assert isinstance(z, Tensor), "the head is computed, too"
        return z, mode.uses

    leaves, (z, uses) = problem.differentiable(names, run, lambda run_result: [run_result[0]])
    check_finite(z.detach(), problem)
    return RecordedBatch(leaves, z, uses)


class _Recorder(TorchFunctionMode):
    """Records linear maps of views of the leaves, lookups in them, and biases added to the results."""

    def __init__(self, leaves: Mapping[str, Tensor]):
        super().__init__()
        self.uses: list[Use] = []
        self._results: list[tuple[Tensor, int]] = []  # results of the uses, and their versions
        self._homes: dict[int, list[tuple[str, Tensor]]] = {}
        for name, leaf in leaves.items():
            if leaf.is_contiguous():
                self._homes.setdefault(_storage_address(leaf), []).append((name, leaf))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                found = multihead(False, *args, **kwargs)
            if found is not None:
                return found
        biased = self._biased(args) if func in ADDITIONS and len(args) == 2 and not kwargs else None
        found = func(*args, **kwargs)
        if casting() or not isinstance(found, Tensor) or not found.requires_grad or "out" in kwargs:
            return found
        if func in MAPS:
            return self._writable(self._map(MAPS[func](*args, **kwargs), found), found)
        if func is F.embedding:
            return self._writable(self._lookup(found, *args, **kwargs), found)
        if biased is not None and found.shape == biased[0].lead + biased[1].shape:
            biased[0].bias = biased[1]
        return found

    def _writable(self, use: Use | None, result: Tensor) -> Tensor:
        """Return the result for the module; views are copied, because a write would replace the edge."""
        if use is None:
            return result
        result = result.clone() if result._is_view() else result
        self.uses.append(use)
        self._results.append((result, result._version))
        return result

    def _map(self, head: LinearHead | None, result: Tensor) -> Use | None:
        view = None if head is None else self._view(head.W.T)
        if head is None or view is None or head.h.dim() < 2:
            return None
        bias = None if head.b is None else self._view(head.b)
        return Use(view, head.h.detach(), gradient_edge(result), bias=bias)

    def _lookup(
        self,
        result: Tensor,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Use | None:
        view = self._view(weight)
        if view is None or not input.dim() or max_norm is not None or scale_grad_by_freq or sparse:
            return None
        if padding_idx is not None and padding_idx < 0:
            padding_idx += weight.shape[0]
        edge = gradient_edge(result)
        return Use(view, input.detach().long(), edge, lookup=True, padding=padding_idx)

    def _biased(self, args: tuple[Any, Any]) -> tuple[Use, View] | None:
        """Find the use to whose unmodified result a vector of a parameter is added."""
        for result, other in (args, args[::-1]):
            if not isinstance(other, Tensor) or other.dim() != 1:
                continue
            for use, (original, version) in zip(self.uses, self._results, strict=True):
                if original is result and original._version == version and use.bias is None:
                    view = self._view(other)
                    return None if view is None else (use, view)
        return None

    def _view(self, t: Tensor) -> View | None:
        """Return the leaf that a tensor is a view of, and the position in it; None if there is no such
        leaf.
        """
        if t.layout != torch.strided:
            return None
        for name, leaf in self._homes.get(_storage_address(t), []):
            offset, remainder = divmod(t.data_ptr() - leaf.data_ptr(), leaf.element_size())
            end = offset + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            if remainder == 0 and offset >= 0 and end < leaf.numel():
                return View(name, offset, tuple(t.shape), tuple(t.stride()))
        return None


def _storage_address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _mm(input: Tensor, mat2: Tensor) -> LinearHead:
    return LinearHead(input, mat2.T, None)


MAPS: dict[Callable[..., Any], Callable[..., LinearHead | None]] = {
    **LINEAR_MAPS,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
}
ADDITIONS = {
    torch.add,
    torch.Tensor.add,
    torch.Tensor.add_,
    torch.Tensor.__add__,
    torch.Tensor.__iadd__,
    torch.Tensor.__radd__,
}

"""Record the linear maps that a module makes of its parameters: inputs, and the edges of output gradients.

The user's own module runs once in a mode that looks at function calls, not at classes: `nn.Linear`, GPT-2's
`Conv1D`, a packed matrix, a slice of one, a transposed embedding are all y = a W (+ b) with W a view of a
parameter. A lookup y = E[ids] is the same with one-hot inputs. Other uses of a parameter are not recorded;
`layers` detects that they are missing, because gradients do not add up.
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
    """A strided view of a parameter: of its entry (i, j) the flat position is offset + i s_0 + j s_1."""

    parameter: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def positions(self) -> Tensor:
        """Flat positions of the view's entries in its parameter, in the view's shape."""
        found = torch.tensor(self.offset)
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = torch.arange(size) * stride
            found = found[..., None] + steps if axis else found + steps
        return found


@dataclass
class Use:
    """One call y = a W + b with W (d_in, d_out): inputs, and the edge at which gradients of y arrive."""

    weight: View
    given: Tensor  # a (…, d_in), or the ids (…) of a lookup
    edge: GradientEdge
    lookup: bool = False
    padding: int | None = None  # the id whose row is a constant
    bias: View | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes of y before its last."""
        return tuple(self.given.shape if self.lookup else self.given.shape[:-1])

    def inputs(self, dtype: torch.dtype) -> Tensor:
        """a with its rows in one axis: (rows, d_in)."""
        if not self.lookup:
            return self.given.reshape(-1, self.given.shape[-1])
        ids = self.given.reshape(-1)
        hot = F.one_hot(ids, self.weight.shape[0]).to(dtype)
        return hot if self.padding is None else hot * (ids != self.padding)[:, None]


class Recorded(NamedTuple):
    """Outputs of a batch as a function of leaves, and the linear maps on the way."""

    leaves: Leaves
    outputs: Tensor
    uses: list[Use]


def record(problem: Problem, batch: Batch) -> Recorded:
    """Run the module on a placed batch, in eval mode, at leaves for all parameters."""
    runner, names = Runner(problem), tuple(dict(problem.named_parameters()))

    def run(leaves: Leaves) -> tuple[Tensor, list[Use]]:
        with _Recorder(leaves) as mode:
            z = runner.outputs(batch, leaves, second_order=False, lazy=False)
        assert isinstance(z, Tensor), "no head is left undone"
        return z, mode.uses

    leaves, (z, uses) = problem.differentiable(names, run, lambda found: [found[0]])
    check_finite(z.detach(), problem)
    return Recorded(leaves, z, uses)


class _Recorder(TorchFunctionMode):
    """Notes linear maps of views of the leaves, lookups in them, and biases that are added to the results."""

    def __init__(self, leaves: Mapping[str, Tensor]):
        super().__init__()
        self.uses: list[Use] = []
        self._made: list[tuple[Tensor, int]] = []  # results of the uses, and how often they were written
        self._homes: dict[int, list[tuple[str, Tensor]]] = {}
        for name, leaf in leaves.items():
            if leaf.is_contiguous():
                self._homes.setdefault(_home(leaf), []).append((name, leaf))

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
            return self._handed_out(self._map(MAPS[func](*args, **kwargs), found), found)
        if func is F.embedding:
            return self._handed_out(self._lookup(found, *args, **kwargs), found)
        if biased is not None and found.shape == biased[0].lead + biased[1].shape:
            biased[0].bias = biased[1]
        return found

    def _handed_out(self, use: Use | None, found: Tensor) -> Tensor:
        """Return the tensor for the module; a copy of a view, because writing to a view would cut off the
        edge.
        """
        if use is None:
            return found
        found = found.clone() if found._is_view() else found
        self.uses.append(use)
        self._made.append((found, found._version))
        return found

    def _map(self, head: LinearHead | None, found: Tensor) -> Use | None:
        view = None if head is None else self._view(head.W.T)
        if head is None or view is None or head.h.dim() < 2:
            return None
        bias = None if head.b is None else self._view(head.b)
        return Use(view, head.h.detach(), gradient_edge(found), bias=bias)

    def _lookup(
        self,
        found: Tensor,
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
        edge = gradient_edge(found)
        return Use(view, input.detach().long(), edge, lookup=True, padding=padding_idx)

    def _biased(self, args: tuple[Any, Any]) -> tuple[Use, View] | None:
        """The use whose result, as it was made, gets a vector of a parameter added."""
        for result, other in (args, args[::-1]):
            if not isinstance(other, Tensor) or other.dim() != 1:
                continue
            for use, (made, version) in zip(self.uses, self._made, strict=True):
                if made is result and made._version == version and use.bias is None:
                    view = self._view(other)
                    return None if view is None else (use, view)
        return None

    def _view(self, t: Tensor) -> View | None:
        """Return the leaf that a tensor is a view of, and the position in it; None if there is no such
        leaf.
        """
        if t.layout != torch.strided:
            return None
        for name, leaf in self._homes.get(_home(t), []):
            offset, rest = divmod(t.data_ptr() - leaf.data_ptr(), leaf.element_size())
            last = offset + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            if rest == 0 and offset >= 0 and last < leaf.numel():
                return View(name, offset, tuple(t.shape), tuple(t.stride()))
        return None


def _home(t: Tensor) -> int:
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

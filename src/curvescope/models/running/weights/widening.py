"""Weights stored in half precision that are converted to float32 while a layer needs them.

A model in bfloat16 is treated as the float32 model with the same weights: every weight is also a float32
number, and all arithmetic and derivatives are in float32. This saves memory: a layer's weights are converted
when it is called, and the float32 copies are freed afterwards. Weights outside of layers are converted for a
full pass.

A derivative in a weight needs a float32 leaf whose values are never read. `Widening.leaf` makes it from a
single NaN, expanded, so code that does read the values (a loss function, a module that uses its layers'
weights) gets NaN. If a layer finds such a leaf instead of a parameter, `_Widen` uses the stored weight, with
the derivative in the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from curvescope.core.ranks.reshard import release_parameters
from curvescope.kernels.linear import stands_for_leaf
from curvescope.models.running.patching import Change, parameters_at, patched

HALVES = (torch.bfloat16, torch.float16)
WIDE = torch.float32


def is_half(module: nn.Module) -> bool:
    """Return True if a module has parameters in half precision, and none wider than float32."""
    kinds = {p.dtype for p in module.parameters()}
    return not kinds.isdisjoint(HALVES) and kinds <= {*HALVES, WIDE}


@final
@dataclass(frozen=True, eq=False)
class Widening:
    """Conversion of half-precision weights: each of `layers` converts its own, a pass converts all others."""

    layers: tuple[nn.Module, ...]
    _marks: dict[str, Tensor] = field(default_factory=dict)  # one number per parameter
    _stored: dict[int, Tensor] = field(default_factory=dict)  # stored weight of each leaf, by memory address

    def leaf(self, name: str, p: Tensor) -> Tensor:
        """Return a float32 leaf for a stored parameter, without memory of its own."""
        mark = self._marks.get(name)
        if mark is None or mark.device != p.device:
            mark = self._marks[name] = torch.full((1,), torch.nan, dtype=WIDE, device=p.device)
        self._stored[mark.data_ptr()] = p.detach()
        return mark.view([1] * p.dim()).expand(p.shape).detach().requires_grad_()

    def changes(self, module: nn.Module) -> list[Change]:
        """Return changes that make layers, and the module itself, convert their weights when called."""
        parts = [*self.layers, module]
        buffers = [
            Change(part._buffers, name, b.to(WIDE))
            for part in module.modules()
            for name, b in part._buffers.items()
            if b is not None and b.dtype in HALVES
        ]
        return [*buffers, *(Change(vars(part), "forward", self.widened_forward(part)) for part in parts)]

    def widened_forward(self, part: nn.Module) -> Callable[..., Any]:
        """Return the forward of a layer, or of the module itself, that converts its weights to float32."""
        return partial(self._widened, part, part.forward)

    def _widened(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inside = any(part is layer for layer in self.layers)
        weights = self._weights_of(part)
        wide = {name: self._wide(p) for name, p in weights.items()}
        released = release_parameters(
            list(wide.values()), lambda: [self._wide(p.detach()) for p in weights.values()]
        )
        with patched(parameters_at(part, wide)), released if inside else nullcontext():
            return forward(*args, **kwargs)

    def _weights_of(self, part: nn.Module) -> dict[str, Tensor]:
        """Return the weights that a layer converts; for the module, those outside of layers."""
        if any(part is layer for layer in self.layers):
            return dict(part.named_parameters())
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        dictionaries = (m._parameters.values() for m in part.modules() if id(m) not in inside)
        outside = {id(p) for parameters in dictionaries for p in parameters if p is not None}
        return {name: p for name, p in part.named_parameters() if id(p) in outside}

    def _wide(self, p: Tensor) -> Tensor:
        """Return the float32 weight of a parameter or of its leaf."""
        stored = self._stored.get(p.untyped_storage().data_ptr())
        if stored is None:
            return p.to(WIDE)
        return stands_for_leaf(_Widen.apply(p, stored))

    @contextmanager
    def whole(self, part: nn.Module) -> Iterator[None]:
        """Convert the weights of a part of the module to float32 inside."""
        with patched(parameters_at(part, {n: p.detach().to(WIDE) for n, p in part.named_parameters()})):
            yield


class _Widen(torch.autograd.Function):
    """Leaf, weight ↦ the weight in float32; the derivative is that in the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, stored: Tensor) -> Tensor:
        return stored.to(WIDE, copy=True)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0], None


def widening_note(names: Mapping[str, Tensor]) -> str:
    """Return the note on a model with weights in half precision."""
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in names.values() if p.dtype in HALVES})
    return (
        f"weights are stored in {' and '.join(kinds)} and converted to float32 layer by layer: products "
        f"are those of the float32 model with these weights"
    )

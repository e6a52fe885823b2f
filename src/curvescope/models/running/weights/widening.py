"""Weights that are kept in half precision, as they are published, and widened while a layer needs them.

A model in bfloat16 is taken for the float32 model with the same weights: each of them is a float32 number
too, all arithmetic is in float32, and so are derivatives. What is saved is memory: a layer's weights are
widened when it is called, and the float32 copies go with it; weights outside of layers are for a whole pass.

A derivative in a weight needs a leaf in float32, of which nobody reads the numbers. `Widening.leaf` makes it
of a single NaN, expanded, so that whoever does read them (a function of the loss, a module that reaches into
its layers) gets no number at all; where a layer finds such a leaf in the place of a parameter, it takes the
weight that it stands for, `_Widen`, whose derivative is that in the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from curvescope.core.ranks.releasing import let_go
from curvescope.kernels.linear import stands_for_leaf
from curvescope.models.running.exchange import Change, exchanged, parameters_at

HALVES = (torch.bfloat16, torch.float16)
WIDE = torch.float32


def is_half(module: nn.Module) -> bool:
    """Whether a module has parameters in half precision, and none in a type beyond float32."""
    kinds = {p.dtype for p in module.parameters()}
    return not kinds.isdisjoint(HALVES) and kinds <= {*HALVES, WIDE}


@final
@dataclass(frozen=True, eq=False)
class Widening:
    """How the weights of a module are widened: those of `layers` by each of them, all others for a pass."""

    layers: tuple[nn.Module, ...]
    _marks: dict[str, Tensor] = field(default_factory=dict)  # one number for each parameter, kept
    _stored: dict[int, Tensor] = field(default_factory=dict)  # what a leaf stands for, by where it lies

    def leaf(self, name: str, p: Tensor) -> Tensor:
        """A float32 leaf for a parameter as it is stored, without memory of its own."""
        mark = self._marks.get(name)
        if mark is None or mark.device != p.device:
            mark = self._marks[name] = torch.full((1,), torch.nan, dtype=WIDE, device=p.device)
        self._stored[mark.data_ptr()] = p.detach()
        return mark.view([1] * p.dim()).expand(p.shape).detach().requires_grad_()

    def changes(self, module: nn.Module) -> list[Change]:
        """Layers, and the module itself, that widen their weights when they are called."""
        parts = [*self.layers, module]
        buffers = [
            Change(part._buffers, name, b.to(WIDE))
            for part in module.modules()
            for name, b in part._buffers.items()
            if b is not None and b.dtype in HALVES
        ]
        return [*buffers, *(Change(vars(part), "forward", self.widened_forward(part)) for part in parts)]

    def widened_forward(self, part: nn.Module) -> Callable[..., Any]:
        """The forward of a layer, or of the module itself, with its weights wide inside."""
        return partial(self._widened, part, part.forward)

    def _widened(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inside = any(part is layer for layer in self.layers)
        own = self._own_of(part)
        wide = {name: self._wide(p) for name, p in own.items()}
        gone = let_go(list(wide.values()), lambda: [self._wide(p.detach()) for p in own.values()])
        with exchanged(parameters_at(part, wide)), gone if inside else nullcontext():
            return forward(*args, **kwargs)

    def _own_of(self, part: nn.Module) -> dict[str, Tensor]:
        """What a layer widens by itself, or the module: all that is held outside of layers, there too."""
        if any(part is one for one in self.layers):
            return dict(part.named_parameters())
        inside = {id(m) for one in self.layers for m in one.modules()}
        held = (m._parameters.values() for m in part.modules() if id(m) not in inside)
        outside = {id(p) for some in held for p in some if p is not None}
        return {name: p for name, p in part.named_parameters() if id(p) in outside}

    def _wide(self, p: Tensor) -> Tensor:
        """The float32 weight of a parameter, of a leaf that stands for one, or of a point, which is so."""
        stored = self._stored.get(p.untyped_storage().data_ptr())
        if stored is None:
            return p.to(WIDE)
        return stands_for_leaf(_Widen.apply(p, stored))

    @contextmanager
    def whole(self, part: nn.Module) -> Iterator[None]:
        """Inside, a part of the module has wide weights."""
        with exchanged(parameters_at(part, {n: p.detach().to(WIDE) for n, p in part.named_parameters()})):
            yield


class _Widen(torch.autograd.Function):
    """Leaf, weight ↦ the weight in float32; the derivative is that in the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, stored: Tensor) -> Tensor:
        return stored.to(WIDE, copy=True)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0], None


def said(names: Mapping[str, Tensor]) -> str:
    """What a reader should know of a model whose weights are widened."""
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in names.values() if p.dtype in HALVES})
    return (
        f"weights are kept in {' and '.join(kinds)} and widened layer by layer: "
        "products are those of the float32 model with these weights"
    )

"""Whether a layer that is computed again is the function that it was when it was called.

It is taken for a function of the tensors that it is called with and of its own parameters. What reaches it in
another way has no derivative, and is another thing when the layer is computed again: a mask that the model
puts on its layers, a cache that grows, a tensor inside of an object, an activation that a hook takes out for
the loss. `Trace` finds derivatives that would get lost, in one pass on a few positions; `Repeats` compares
what layers give again with what they gave, in every product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.tensors import leaves_of
from curvescope.engines.tensor_digest import weighted_sum
from curvescope.models.model import Model

SAME = {torch.float64: 1e-10}  # of the sum of |y|; 1e-4 in float32, where order and TF32 may differ


@final
class Repeats:
    """Sums of what layers give: r'ᵀ Y r and Σ |y| of each of their outputs, Y its rows and r, r' random."""

    def __init__(self) -> None:
        self._other: list[Tensor] = []  # one truth value for each layer that was computed again

    @torch.no_grad()
    def sums(self, outputs: Sequence[Tensor]) -> Tensor:
        """Of the outputs of one call, (outputs, 2)."""
        found = [torch.stack([weighted_sum(y), y.abs().sum()]) for y in outputs]
        return torch.stack([x.to(found[0]) for x in found]) if found else torch.zeros(0, 2)

    @torch.no_grad()
    def compare(self, outputs: Sequence[Tensor], then: Tensor) -> None:
        """Note whether outputs are those whose sums are given; the device is not waited for."""
        if not outputs or (outputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # a recording is compared with what it records
        now = self.sums(outputs)
        limit = SAME.get(then.dtype, 1e-4) * then[:, 1:]
        same = ((now - then).abs() <= limit) | (now == then) | (now.isnan() & then.isnan())
        self._other.append(~same.all())

    def hold(self) -> bool:
        """Whether all that was compared since the last time was the same."""
        noted, self._other = self._other, []
        return not noted or not bool(torch.stack(noted).any())


@final
class Trace:
    """Puts leaves in the place of all that layers are called with, and sees by them what goes other ways."""

    def __init__(self, model: Model):
        self._model = model
        self._inside: dict[int, Tensor] = {}

    def enter(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """What a layer is called with."""
        found = [t.detach().requires_grad_() for t in tensors]
        self._inside |= {id(t): t for t in found}
        return found

    def leave(self, own: Iterable[Tensor], outputs: Iterable[Tensor]) -> list[Tensor]:
        """What a layer makes of its own leaves; raise where it depends on something else."""
        mine, outputs = {id(t) for t in own}, list(outputs)
        if any(id(leaf) not in mine for y in outputs for leaf in leaves_of(y)):
            raise self._refused("uses a tensor that it is not called with (by an attribute, object, closure)")
        return [y.detach().requires_grad_() for y in outputs]

    def check(self, ends: Iterable[Tensor]) -> None:
        """Raise where what is made of layers depends on their inside."""
        if any(id(leaf) in self._inside for end in ends for leaf in leaves_of(end)):
            raise self._refused("gives away what it computes inside (to a hook, an object, another loss)")

    def _refused(self, why: str) -> UsageError:
        return refused(self._model, why)


def refused(model: Model, why: str) -> UsageError:
    """What to say of a layer whose derivatives do not go by what it is called with and what it returns."""
    return UsageError(
        f"a layer of {model.name} {why}; where layers are computed again its derivatives are lost",
        hint=_instead(model),
    )


def refuse_moving(model: Model, held: Iterable[Any]) -> None:
    """Raise where what a layer holds, beside its tensors, depends on the leaves of this pass."""
    moving = [t for value in held for t in _tensors(value) if t.requires_grad and t.grad_fn is not None]
    if not moving:
        return
    own = [p for p in model.module.parameters() if not isinstance(p, nn.Parameter)]
    leaves = {id(leaf) for p in own for leaf in ([p] if p.grad_fn is None else leaves_of(p))}
    if any(id(leaf) in leaves for t in moving for leaf in leaves_of(t)):
        raise refused(model, "holds a tensor that it is not called with (in an attribute or an object)")


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Those in a value, in containers, and in plain objects, some levels deep."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module | type):
        inner = value.values() if isinstance(value, dict) else value
        if not isinstance(inner, list | tuple | set) and not isinstance(value, dict):
            inner = getattr(value, "__dict__", {}).values()
        for one in list(inner):
            yield from _tensors(one, depth - 1)


def other_outputs(model: Model) -> CurvescopeError:
    """What to say where layers gave something else when they were computed again."""
    return CurvescopeError(
        f"a layer of {model.name} gives other outputs when it is computed again than when it was called: it "
        "keeps something between calls (a mask, a cache, …)",
        hint=_instead(model),
    )


def _instead(model: Model) -> str:
    if model.widening is not None:
        return "cs.load(…, dtype='float32')"
    return "checkpoint=False"

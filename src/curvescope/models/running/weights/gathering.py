"""Parameters that are spread over ranks, made whole for as long as a layer needs them.

Each rank holds some rows of every parameter. `_Gather` makes whole parameters of the pieces of all ranks, and
its derivative sums over ranks and keeps a piece, `_Sum`: these two are each other's transposes, so
derivatives of any order are exact, and come out in pieces, summed over ranks that hold different data. The
parameters of a layer travel together, padded to equal lengths, in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvescope.core.blocks import Block
from curvescope.core.ranks.releasing import let_go
from curvescope.core.ranks.spread import Spread
from curvescope.models.running.exchange import Change, exchanged, parameters_at

Shape = tuple[int, ...]
HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@final
@dataclass(frozen=True, eq=False)
class Sharding:
    """How the parameters of a module are spread: over which ranks, and in which units they are gathered.

    `shapes` and `blocks` are those of whole parameters, by name, and `layers` the modules that gather their
    own by themselves, with their names; all other parameters are gathered for a whole pass.
    """

    spread: Spread
    shapes: Mapping[str, Shape]
    blocks: Mapping[str, Block]
    layers: Mapping[str, nn.Module]
    always: bool = False  # whether a single rank, which has everything, gathers too
    hooked: tuple[nn.Module, ...] = ()  # parts with hooks of FSDP
    _own: dict[int, tuple[Tensor, nn.Parameter]] = field(default_factory=dict)

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered at all."""
        return self.spread.ranks > 1 or self.always

    @property
    def releases(self) -> bool:
        """Whether layers let go of whole parameters behind every pass, and gather them again."""
        return self.gathers and bool(self.layers)

    def pieces(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank holds of each parameter, sharing its memory."""
        return {name: self._piece(p) for name, p in parameters.items()}

    def _piece(self, p: Any) -> Tensor:
        """Of a DTensor the local tensor, as a parameter; the same one every time."""
        local = getattr(p, "_local_tensor", None)
        if local is None:
            return p
        known = self._own.get(id(p))
        if known is None or known[0] is not p or known[1].data_ptr() != local.data_ptr():
            known = p, nn.Parameter(local.detach(), requires_grad=p.requires_grad)
            self._own[id(p)] = known
        if known[1].requires_grad != p.requires_grad:
            known[1].requires_grad_(p.requires_grad)
        return known[1]

    def changes(self, module: nn.Module) -> list[Change]:
        """Layers that gather their parameters when they are called; no hook that would do it another way."""
        parts = [*self.layers.values(), module]
        gathering = [Change(vars(part), "forward", self.gathered_forward(part)) for part in parts]
        return [*self.without_hooks(), *(gathering if self.gathers else [])]

    def without_hooks(self) -> list[Change]:
        """FSDP's hooks taken out: they gather parameters in a way that has no second derivative."""
        found = []
        for part in self.hooked:
            for name in HOOKS:
                hooks = vars(part)[name]
                own = {key: hook for key, hook in hooks.items() if not _of_fsdp(hook)}
                found.append(Change(vars(part), name, type(hooks)(own)))
        return found

    def gathered_forward(self, part: nn.Module) -> Callable[..., Any]:
        """The forward of a layer, or of the module itself, with its parameters whole inside."""
        return partial(self._gathered, part, part.forward) if self.gathers else part.forward

    def _gathered(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = self._own_of(part)
        whole = self._whole(part, own)
        held = {name: p.detach() for name, p in own.items()}
        inside = any(part is layer for layer in self.layers.values())
        gone = let_go(list(whole.values()), lambda: list(self._whole(part, held, like=own).values()))
        with exchanged(parameters_at(part, whole)), gone if inside else nullcontext():
            return forward(*args, **kwargs)

    @contextmanager
    def whole(self, module: nn.Module, part: nn.Module) -> Iterator[None]:
        """Inside, a part of the module has whole parameters; all ranks enter."""
        names = {id(p): name for name, p in module.named_parameters()}
        own = {name: self._piece(p).detach() for name, p in part.named_parameters()}
        shapes = [self.shapes[names[id(p)]] for p in part.parameters()]
        found = gather(self.spread, list(own.values()), shapes)
        with exchanged([*self.without_hooks(), *parameters_at(part, dict(zip(own, found, strict=True)))]):
            yield

    def wholes(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The parameters by name, one after the other made whole; all ranks take them."""
        for name, p in module.named_parameters():
            (found,) = gather(self.spread, [self._piece(p).detach()], [self.shapes[name]])
            yield name, found

    def _own_of(self, part: nn.Module) -> dict[str, Tensor]:
        """The pieces of what a layer, or the module outside of its layers, gathers by itself."""
        layers = self.layers.values()
        layer = any(part is one for one in layers)
        inside = set() if layer else {id(p) for one in layers for p in one.parameters()}
        return {name: p for name, p in part.named_parameters() if id(p) not in inside}

    def _whole(
        self, part: nn.Module, own: Mapping[str, Tensor], *, like: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """These pieces made whole: first those that are differentiated, as `like` says, in one message."""
        front = next((f"{name}." for name, layer in self.layers.items() if layer is part), "")
        moving = [name for name, p in (like or own).items() if p.requires_grad]
        fixed = [name for name in own if name not in moving]
        found: dict[str, Tensor] = {}
        for names in (moving, fixed):
            tensors = [own[name] for name in names]
            found |= zip(
                names, gather(self.spread, tensors, [self.shapes[front + n] for n in names]), strict=True
            )
        return found


def hooked(module: nn.Module) -> tuple[nn.Module, ...]:
    """Its parts with hooks of FSDP."""
    return tuple(
        p for p in module.modules() if any(_of_fsdp(h) for name in HOOKS for h in vars(p)[name].values())
    )


def _of_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    module = getattr(owner, "__module__", None) or type(owner).__module__
    return module.startswith("torch.distributed.fsdp")


# ------------------------------------------------------------------------------------------------- messages


def gather(spread: Spread, pieces: Sequence[Tensor], shapes: Sequence[Shape]) -> Sequence[Tensor]:
    """Whole parameters from the pieces of all ranks, in one message; differentiable any number of times."""
    if not pieces:
        return ()
    return _Gather.apply(spread, tuple(shapes), *pieces)


class _Gather(torch.autograd.Function):
    """Pieces of all ranks ↦ whole tensors."""

    @staticmethod
    def forward(ctx: Any, spread: Spread, shapes: tuple[Shape, ...], *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.spread, ctx.shapes = spread, shapes
        ctx.like = pieces[0].dtype, pieces[0].device
        ctx.set_materialize_grads(False)
        return _gathered(spread, shapes, pieces)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        dtype, device = ctx.like
        given = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) if g is None else g
            for g, shape in zip(cotangents, ctx.shapes, strict=True)
        ]
        return None, None, *_Sum.apply(ctx.spread, ctx.shapes, *given)


class _Sum(torch.autograd.Function):
    """Whole tensors on every rank ↦ this rank's pieces of their sum."""

    @staticmethod
    def forward(ctx: Any, spread: Spread, shapes: tuple[Shape, ...], *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.spread, ctx.shapes = spread, shapes
        ctx.like = wholes[0].dtype, wholes[0].device
        ctx.set_materialize_grads(False)
        return _summed(spread, shapes, wholes)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        dtype, device = ctx.like
        given = [
            torch.zeros((len(ctx.spread.rows(shape[0])), *shape[1:]), dtype=dtype, device=device)
            if d is None
            else d
            for d, shape in zip(directions, ctx.shapes, strict=True)
        ]
        return None, None, *_Gather.apply(ctx.spread, ctx.shapes, *given)


def padded(shape: Shape, ranks: int) -> int:
    """Entries of the longest piece of a parameter: those of every rank in a message."""
    return -(-shape[0] // ranks) * prod(shape[1:])


def _gathered(spread: Spread, shapes: tuple[Shape, ...], pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    sizes = [padded(shape, spread.ranks) for shape in shapes]
    own = pieces[0].new_zeros(sum(sizes))
    for place, piece in zip(own.split(sizes), pieces, strict=True):
        place[: piece.numel()].copy_(piece.reshape(-1))
    everything = own.new_empty(spread.ranks, len(own))
    _all_gather(everything.view(-1), own, spread.group)
    columns = everything.split(sizes, dim=1)
    return tuple(
        column.reshape(-1, *shape[1:])[: shape[0]] for column, shape in zip(columns, shapes, strict=True)
    )


def _summed(spread: Spread, shapes: tuple[Shape, ...], wholes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    sizes = [padded(shape, spread.ranks) for shape in shapes]
    everything = wholes[0].new_zeros(spread.ranks, sum(sizes))
    for column, whole in zip(everything.split(sizes, dim=1), wholes, strict=True):
        _deal(column, whole)
    own = everything.new_empty(everything.shape[1])
    _reduce_scatter(own, everything.view(-1), spread.group)
    rows = [len(spread.rows(shape[0])) for shape in shapes]
    return tuple(
        part[: count * prod(shape[1:])].view(count, *shape[1:])
        for part, count, shape in zip(own.split(sizes), rows, shapes, strict=True)
    )


def _deal(column: Tensor, whole: Tensor) -> None:
    """The rows of a whole parameter, those of each rank in its row (ranks, entries)."""
    width, start = prod(whole.shape[1:]), 0
    for row in column:
        count = min(len(row) // max(width, 1), len(whole) - start)
        row[: count * width].view(count, *whole.shape[1:]).copy_(whole[start : start + count])
        start += count


def _all_gather(out: Tensor, own: Tensor, group: Any) -> None:
    named = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name since 2.13
    named(out, own, group=group)


def _reduce_scatter(out: Tensor, everything: Tensor, group: Any) -> None:
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    named(out, everything, group=group)

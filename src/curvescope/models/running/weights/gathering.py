"""Gather sharded parameters for as long as a layer needs them.

Each rank holds some rows of every parameter. `_Gather` makes full parameters from the pieces of all ranks.
Its derivative `_Sum` sums over ranks and keeps a piece. The two are each other's transposes, so derivatives
of any order are exact; they are sharded, too, and summed over ranks with different data. The parameters of a
layer are sent in one message, padded to equal lengths.
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
from curvescope.core.ranks.reshard import release_parameters
from curvescope.core.ranks.shard_layout import ShardGroup
from curvescope.models.running.patching import Change, parameters_at, patched

Shape = tuple[int, ...]
HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@final
@dataclass(frozen=True, eq=False)
class Sharding:
    """Sharding of a module's parameters: the ranks, and the units that are gathered together.

    `shapes` and `blocks` are those of full parameters, by name. `layers` are the modules that gather their
    own parameters, with names. All other parameters are gathered for a full pass.
    """

    spread: ShardGroup
    shapes: Mapping[str, Shape]
    blocks: Mapping[str, Block]
    layers: Mapping[str, nn.Module]
    always: bool = False  # gather on a single rank, too
    hooked: tuple[nn.Module, ...] = ()  # submodules with hooks of FSDP
    _local_parameters: dict[int, tuple[Tensor, nn.Parameter]] = field(default_factory=dict)

    @property
    def gathers(self) -> bool:
        """Return True if parameters need gathering."""
        return self.spread.ranks > 1 or self.always

    @property
    def releases(self) -> bool:
        """Return True if layers free full parameters after every pass, and gather them again."""
        return self.gathers and bool(self.layers)

    def pieces(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of each parameter, sharing its memory."""
        return {name: self._piece(p) for name, p in parameters.items()}

    def _piece(self, p: Any) -> Tensor:
        """Return the local tensor of a DTensor as a parameter, always the same object."""
        local = getattr(p, "_local_tensor", None)
        if local is None:
            return p
        known = self._local_parameters.get(id(p))
        if known is None or known[0] is not p or known[1].data_ptr() != local.data_ptr():
            known = p, nn.Parameter(local.detach(), requires_grad=p.requires_grad)
            self._local_parameters[id(p)] = known
        if known[1].requires_grad != p.requires_grad:
            known[1].requires_grad_(p.requires_grad)
        return known[1]

    def changes(self, module: nn.Module) -> list[Change]:
        """Return changes that make layers gather their parameters when called, without hooks of FSDP."""
        parts = [*self.layers.values(), module]
        gathering = [Change(vars(part), "forward", self.gathered_forward(part)) for part in parts]
        return [*self.without_hooks(), *(gathering if self.gathers else [])]

    def without_hooks(self) -> list[Change]:
        """Return changes that remove FSDP's hooks, which gather parameters without a second derivative."""
        changes = []
        for part in self.hooked:
            for name in HOOKS:
                hooks = vars(part)[name]
                remaining = {key: hook for key, hook in hooks.items() if not _of_fsdp(hook)}
                changes.append(Change(vars(part), name, type(hooks)(remaining)))
        return changes

    def gathered_forward(self, part: nn.Module) -> Callable[..., Any]:
        """Return the forward of a layer, or of the module itself, that gathers its parameters."""
        return partial(self._gathered, part, part.forward) if self.gathers else part.forward

    def _gathered(self, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pieces = self._pieces_of(part)
        whole = self._whole(part, pieces)
        detached = {name: p.detach() for name, p in pieces.items()}
        inside = any(part is layer for layer in self.layers.values())
        released = release_parameters(
            list(whole.values()), lambda: list(self._whole(part, detached, like=pieces).values())
        )
        with patched(parameters_at(part, whole)), released if inside else nullcontext():
            return forward(*args, **kwargs)

    @contextmanager
    def whole(self, module: nn.Module, part: nn.Module) -> Iterator[None]:
        """Gather the full parameters of a part of the module inside; all ranks must enter."""
        names = {id(p): name for name, p in module.named_parameters()}
        pieces = {name: self._piece(p).detach() for name, p in part.named_parameters()}
        shapes = [self.shapes[names[id(p)]] for p in part.parameters()]
        gathered = gather(self.spread, list(pieces.values()), shapes)
        with patched([*self.without_hooks(), *parameters_at(part, dict(zip(pieces, gathered, strict=True)))]):
            yield

    def whole_parameters(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and full parameters, gathered one after the other; all ranks must iterate."""
        for name, p in module.named_parameters():
            (gathered,) = gather(self.spread, [self._piece(p).detach()], [self.shapes[name]])
            yield name, gathered

    def _pieces_of(self, part: nn.Module) -> dict[str, Tensor]:
        """Return the pieces of the parameters that a layer, or the module outside of its layers, gathers."""
        layers = self.layers.values()
        layer = any(part is unit for unit in layers)
        inside = set() if layer else {id(p) for unit in layers for p in unit.parameters()}
        return {name: p for name, p in part.named_parameters() if id(p) not in inside}

    def _whole(
        self, part: nn.Module, pieces: Mapping[str, Tensor], *, like: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return full parameters. Those that are differentiated, by `like`, share one message."""
        front = next((f"{name}." for name, layer in self.layers.items() if layer is part), "")
        differentiated = [name for name, p in (like or pieces).items() if p.requires_grad]
        constant = [name for name in pieces if name not in differentiated]
        parameters: dict[str, Tensor] = {}
        for names in (differentiated, constant):
            tensors = [pieces[name] for name in names]
            parameters |= zip(
                names, gather(self.spread, tensors, [self.shapes[front + n] for n in names]), strict=True
            )
        return parameters


def hooked(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the submodules with hooks of FSDP."""
    return tuple(
        p for p in module.modules() if any(_of_fsdp(h) for name in HOOKS for h in vars(p)[name].values())
    )


def _of_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    module = getattr(owner, "__module__", None) or type(owner).__module__
    return module.startswith("torch.distributed.fsdp")


# ------------------------------------------------------------------------------------------------- messages


def gather(spread: ShardGroup, pieces: Sequence[Tensor], shapes: Sequence[Shape]) -> Sequence[Tensor]:
    """Return full parameters from the pieces of all ranks in one message, with derivatives of any order."""
    if not pieces:
        return ()
    return _Gather.apply(spread, tuple(shapes), *pieces)


class _Gather(torch.autograd.Function):
    """Pieces of all ranks ↦ full tensors."""

    @staticmethod
    def forward(
        ctx: Any, spread: ShardGroup, shapes: tuple[Shape, ...], *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.spread, ctx.shapes = spread, shapes
        ctx.like = pieces[0].dtype, pieces[0].device
        ctx.set_materialize_grads(False)
        return _gathered(spread, shapes, pieces)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        dtype, device = ctx.like
        filled = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) if g is None else g
            for g, shape in zip(cotangents, ctx.shapes, strict=True)
        ]
        return None, None, *_Sum.apply(ctx.spread, ctx.shapes, *filled)


class _Sum(torch.autograd.Function):
    """Full tensors on every rank ↦ this rank's pieces of their sum."""

    @staticmethod
    def forward(
        ctx: Any, spread: ShardGroup, shapes: tuple[Shape, ...], *whole_parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.spread, ctx.shapes = spread, shapes
        ctx.like = whole_parameters[0].dtype, whole_parameters[0].device
        ctx.set_materialize_grads(False)
        return _summed(spread, shapes, whole_parameters)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        dtype, device = ctx.like
        filled = [
            torch.zeros((len(ctx.spread.rows(shape[0])), *shape[1:]), dtype=dtype, device=device)
            if d is None
            else d
            for d, shape in zip(directions, ctx.shapes, strict=True)
        ]
        return None, None, *_Gather.apply(ctx.spread, ctx.shapes, *filled)


def padded(shape: Shape, ranks: int) -> int:
    """Return the number of entries of a parameter's longest piece, to which messages are padded."""
    return -(-shape[0] // ranks) * prod(shape[1:])


def _gathered(spread: ShardGroup, shapes: tuple[Shape, ...], pieces: Sequence[Tensor]) -> tuple[Tensor, ...]:
    sizes = [padded(shape, spread.ranks) for shape in shapes]
    local = pieces[0].new_zeros(sum(sizes))
    for place, piece in zip(local.split(sizes), pieces, strict=True):
        place[: piece.numel()].copy_(piece.reshape(-1))
    all_ranks = local.new_empty(spread.ranks, len(local))
    _all_gather(all_ranks.view(-1), local, spread.group)
    columns = all_ranks.split(sizes, dim=1)
    return tuple(
        column.reshape(-1, *shape[1:])[: shape[0]] for column, shape in zip(columns, shapes, strict=True)
    )


def _summed(
    spread: ShardGroup, shapes: tuple[Shape, ...], whole_parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    sizes = [padded(shape, spread.ranks) for shape in shapes]
    all_ranks = whole_parameters[0].new_zeros(spread.ranks, sum(sizes))
    for column, whole in zip(all_ranks.split(sizes, dim=1), whole_parameters, strict=True):
        _deal(column, whole)
    local = all_ranks.new_empty(all_ranks.shape[1])
    _reduce_scatter(local, all_ranks.view(-1), spread.group)
    rows = [len(spread.rows(shape[0])) for shape in shapes]
    return tuple(
        part[: count * prod(shape[1:])].view(count, *shape[1:])
        for part, count, shape in zip(local.split(sizes), rows, shapes, strict=True)
    )


def _deal(column: Tensor, whole: Tensor) -> None:
    """Write the rows of a full parameter into a tensor with one row per rank."""
    width, start = prod(whole.shape[1:]), 0
    for row in column:
        count = min(len(row) // max(width, 1), len(whole) - start)
        row[: count * width].view(count, *whole.shape[1:]).copy_(whole[start : start + count])
        start += count


def _all_gather(out: Tensor, local: Tensor, group: Any) -> None:
    named = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name since 2.13
    named(out, local, group=group)


def _reduce_scatter(out: Tensor, all_ranks: Tensor, group: Any) -> None:
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    named(out, all_ranks, group=group)

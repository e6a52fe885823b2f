"""Models whose parameters are spread over ranks, for those that do not fit one device.

    model = distributed.shard(cs.load("gpt2"))          # or a module that fully_shard was applied to
    H = cs.Hessian(cs.Problem(model, batches))          # the same batches on every rank
    cs.eigsh(H, k=5)

Every parameter is a DTensor, cut along its first axis. While a product runs, a layer gathers its parameters,
lets go of them when it is done, and gathers them again when it is computed again: at its peak a rank holds
its pieces, one whole layer, and what lies outside of the layers (embedding, head). Of every batch a rank
computes some sequences; products are summed over ranks and come out in pieces, as the vectors go in.
Algorithms run on these pieces, with the numbers of a single process up to rounding.

Blocks of a piece of a parameter: what a rank that holds some of its rows has of a block.

The entries keep their order. That is a view of the piece where the block's rows in it are a box of its axes:
always for rows that lie together, and for interleaved ones (h, 3, k) where ranks hold whole heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from curvescope.core.blocks import Block
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.ranks import everyone, group_in_step, together
from curvescope.core.ranks.spread import Spread, leading_axes, narrowed
from curvescope.distributed.sums import DIFFERENT, LOAD, hashed
from curvescope.engines.tensor_digest import digest
from curvescope.models.forward_errors import check_weights
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.running.weights.gathering import Sharding, hooked
from curvescope.models.sources import repeated_layers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard(
    model: Any,
    group: ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    always: bool = False,
) -> Model:
    """The model with its parameters spread over the ranks of a group, on every one of which this is called.

    A module with whole parameters, the same on every rank, is changed in place, as `fully_shard` does: each
    becomes a DTensor of which this rank keeps its rows. A module that is made of such DTensors already, as
    `fully_shard` leaves it, is taken as it is.

    Args:
        model: A `Model`, or what `cs.load` takes.
        group: By default all ranks, or those that the parameters are spread over already.
        device: Where pieces are kept; by default where the parameters are. One layer after the other moves,
            so that a model on the CPU need not fit a card.
        always: A single rank has everything, and computes as if nothing were spread; with this it gathers and
            releases as several do, which shows what that costs.
    """
    if not dist.is_initialized():
        raise UsageError(
            "expected processes that know of each other, but there is no process group",
            hint="start with torchrun, and call torch.distributed.init_process_group() first",
        )
    found = load(model)
    for part in found.module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # what a pass left whole
    parameters = dict(found.module.named_parameters())
    cut = [name for name, p in parameters.items() if isinstance(p, DTensor)]
    if cut and len(cut) < len(parameters):
        whole = next(name for name in parameters if name not in cut)
        raise UsageError(f"expected all parameters as DTensors, or none; {whole!r} is whole")
    if not cut:
        _cut(found.module, group, None if device is None else torch.device(device))
    spread = _spread_of(found.module)
    shapes = {name: tuple(p.shape) for name, p in found.module.named_parameters()}
    whole = {**found.blocks, **found.heads}
    local = {
        name: local_block(b, shapes[b.parameter], spread.rows(shapes[b.parameter][0]))
        for name, b in whole.items()
    }
    return replace(
        found,
        blocks={name: local[name] for name in found.blocks},
        heads={name: local[name] for name in found.heads},
        sharding=Sharding(spread, shapes, whole, _layers(found.module), always, hooked(found.module)),
        notes=(*found.notes, f"spread over {spread.ranks} ranks: each holds some rows of every parameter"),
    )


def _cut(module: nn.Module, group: ProcessGroup | None, device: torch.device | None) -> None:
    """Every parameter in place by a DTensor of its rows; those that are tied stay one."""
    group = dist.group.WORLD if group is None else group
    assert group is not None, "there is one"
    kind = (device or next(module.parameters()).device).type
    mesh = DeviceMesh.from_group(group, kind)
    done: dict[int, nn.Parameter] = {}
    spread = Spread(group, dist.get_rank(group), dist.get_world_size(group))
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is None:
                continue
            if id(p) not in done:
                rows = spread.rows(p.shape[0]) if p.dim() else _refuse_number(name)
                piece = p.detach()[rows.start : rows.stop].to(device, copy=True)
                tensor = DTensor.from_local(
                    piece, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride()
                )
                done[id(p)] = nn.Parameter(tensor, requires_grad=p.requires_grad)
            part._parameters[name] = done[id(p)]
        if device is not None:
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)


def _refuse_number(name: str) -> range:
    raise UsageError(f"the parameter {name!r} is a single number, which cannot be cut into rows")


def _spread_of(module: nn.Module) -> Spread:
    """The ranks that all parameters are spread over, by rows."""
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    for name, p in module.named_parameters():
        assert isinstance(p, DTensor)
        if p.device_mesh.ndim != 1 or tuple(p.placements) != (Shard(0),) or len(meshes) > 1:
            raise UsageError(
                f"expected parameters cut along their first axis over one group of ranks, {name!r} is "
                f"{tuple(p.placements)} on a mesh of {tuple(p.device_mesh.shape)}",
                hint="fully_shard with a mesh of one axis",
            )
        rows = Spread(None, p.device_mesh.get_local_rank(), p.device_mesh.size()).rows(p.shape[0])
        if len(p._local_tensor) != len(rows):
            raise UsageError(f"expected ⌈d / R⌉ rows of {name!r} on every rank, got {len(p._local_tensor)}")
    (mesh,) = meshes
    return Spread(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def _layers(module: nn.Module) -> Mapping[str, nn.Module]:
    """The repeated layers by name; an error where one shares a parameter with what is outside of them."""
    names = {part: name for name, part in module.named_modules()}
    layers = {names[layer]: layer for layer in repeated_layers(module)}
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    within = {id(part) for layer in layers.values() for part in layer.modules()}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and id(p) in inside and id(part) not in within:
                raise UsageError(f"{names[part]}.{name} is shared with a layer, which gathers it by itself")
    return layers


def local_block(block: Block, shape: Sequence[int], rows: range) -> Block:
    """The block's entries in some rows of its parameter, as a view of these rows.

    Args:
        block: A view of the whole parameter.
        shape: Of the whole parameter.
        rows: The rows of the piece.
    """
    leading = leading_axes(block, shape)
    starts, sizes = narrowed(block)
    ahead = 0  # axes in front of which a single entry is left
    while ahead < leading - 1 and sizes[ahead] == 1:
        ahead += 1
    before = sum(starts[a] * prod(block.split[a + 1 : leading]) for a in range(ahead))
    order = block.order or tuple(range(len(block.split)))
    together = _together(order, range(ahead, leading))
    if together and sizes[ahead + 1 : leading] == list(block.split[ahead + 1 : leading]):
        unit, joined = 1, range(ahead, leading)  # one axis of rows
    else:
        unit, joined = prod(block.split[ahead + 1 : leading]), range(ahead, ahead + 1)
    stride = prod(block.split[ahead + 1 : leading])
    first, last = before + starts[ahead] * stride, before + (starts[ahead] + sizes[ahead]) * stride
    low, high = max(first, rows.start), max(min(last, rows.stop), max(first, rows.start))
    if any(edge % unit for edge in (rows.start, rows.stop, low - rows.start, high - rows.start)):
        raise UsageError(
            f"the rows of {block.name} are not in one piece on a rank: {block.parameter} of {shape[0]} rows "
            f"is cut inside a group of {unit}",
            hint="take a number of ranks that divides the number of heads",
        )
    rest = list(range(joined.stop, len(block.split)))
    axes = [joined.start, *rest]
    split = (len(rows) // unit, *(block.split[a] for a in rest))
    cut = {0: (min(low - rows.start, len(rows)) // unit, (high - low) // unit)}
    cut |= {i: (starts[a], sizes[a]) for i, a in enumerate(axes) if i and sizes[a] != block.split[a]}
    own = tuple(axes.index(a) for a in order if a in axes)
    lengths = [cut.get(i, (0, size))[1] for i, size in enumerate(split)]
    return Block(
        block.name,
        block.parameter,
        split=split,
        shape=_grouped(block, [sizes[a] for a in order], order, axes, [lengths[i] for i in own]),
        order=None if own == tuple(range(len(own))) else own,
        narrow=tuple((i, start, length) for i, (start, length) in cut.items() if length != split[i]),
    )


def _together(order: Sequence[int], axes: range) -> bool:
    """Whether axes stand next to each other, in their order."""
    place = order.index(axes.start)
    return tuple(order[place : place + len(axes)]) == tuple(axes)


def _grouped(
    block: Block, sizes: list[int], order: Sequence[int], axes: list[int], lengths: list[int]
) -> tuple[int, ...]:
    """The block's shape where its rows are fewer: lengths (in their order) for the axes that are left."""
    left, found, i = iter(lengths), [], 0
    for whole in block.shape:
        count, here = 1, 1
        while i < len(order) and (count < whole or sizes[i] == 1):
            count *= sizes[i]
            here *= next(left) if order[i] in axes else 1
            i += 1
        found.append(here)
    return tuple(found) if prod(found) == prod(lengths) else (prod(lengths), *(1 for _ in block.shape[1:]))


def spread_out(model: Model, device: torch.device | str) -> Model:
    """A model that every rank in step has read whole, spread over them (`shard`); it is changed in place.

    Ranks whose models differ would make one of both: that is an error. Only rows go to the device.

    Args:
        model: On the CPU.
        device: Where pieces are kept, and computed with.
    """
    module = model.module
    with together():
        check_weights(model)  # of a piece, one rank alone would raise
        words = tuple(hashed(digest([*module.parameters(), *module.buffers()])))
    if len(set(everyone(words))) > 1:
        raise CurvescopeError(DIFFERENT.format("model"), hint=LOAD)
    with together():  # blocks that one rank's rows cut through
        return shard(model, group_in_step(), device=device)

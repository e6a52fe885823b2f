"""Sharded models: parameters are distributed over ranks if a model does not fit one device.

    model = distributed.shard(cs.load("gpt2"))          # or a module that fully_shard was applied to
    H = cs.Hessian(cs.Problem(model, batches))          # the same batches on every rank
    cs.eigsh(H, k=5)

Every parameter is a DTensor, sharded along its first axis. During a product, a layer gathers its parameters,
frees them when it is done, and gathers them again for a recompute. At its peak a rank holds its shards, one
full layer, and the parameters outside the layers (embedding, head). A rank computes some sequences of every
batch. Products are summed over ranks and are sharded like the vectors. Algorithms run on these shards, with
the results of a single process up to rounding.

A rank that holds some rows of a parameter also holds a piece of each of its blocks.

The entries keep their order. The piece of a block is a view of the shard if the block's rows in it form a box
of its axes. That is always so for contiguous rows, and for interleaved rows (h, 3, k) if ranks hold complete
heads.
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
from curvescope.core.ranks import gather_objects, group_in_step, shared_errors
from curvescope.core.ranks.shard_layout import ShardGroup, leading_axes, narrow_ranges
from curvescope.distributed.sums import DIFFERENT_STATE, SAME_STATE_HINT, digest_words
from curvescope.engines.tensor_digest import digest
from curvescope.models.curvature_sources import repeated_layers
from curvescope.models.forward_errors import check_weights
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.running.weights.gathering import Sharding, hooked

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def shard(
    model: Any,
    group: ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    always: bool = False,
) -> Model:
    """Shard the parameters of a model over the ranks of a group; every rank of the group must call this.

    A module with full parameters, the same on every rank, is changed in place, as by `fully_shard`: each
    parameter becomes a DTensor of which this rank stores its rows. A module that already has such DTensors is
    used unchanged.

    Args:
        model: A `Model`, or an argument of `cs.load`.
        group: Ranks; by default all, or those over which the parameters are sharded already.
        device: Device of the shards; by default that of the parameters. Layers move one by one, so that a
            model on the CPU need not fit a GPU.
        always: If True, a single rank gathers and releases parameters too, which shows the cost. By default
            it computes as if the model were not sharded.
    """
    if not dist.is_initialized():
        raise UsageError(
            "expected an initialized process group, but there is none",
            hint="start with torchrun, and call torch.distributed.init_process_group() first",
        )
    loaded = load(model)
    for part in loaded.module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # an earlier pass may have left it gathered
    parameters = dict(loaded.module.named_parameters())
    cut = [name for name, p in parameters.items() if isinstance(p, DTensor)]
    if cut and len(cut) < len(parameters):
        full = next(name for name in parameters if name not in cut)
        raise UsageError(f"expected all parameters as DTensors, or none; {full!r} is a plain tensor")
    if not cut:
        _cut(loaded.module, group, None if device is None else torch.device(device))
    spread = _spread_of(loaded.module)
    shapes = {name: tuple(p.shape) for name, p in loaded.module.named_parameters()}
    full = {**loaded.blocks, **loaded.heads}
    local = {
        name: local_block(b, shapes[b.parameter], spread.rows(shapes[b.parameter][0]))
        for name, b in full.items()
    }
    return replace(
        loaded,
        blocks={name: local[name] for name in loaded.blocks},
        heads={name: local[name] for name in loaded.heads},
        sharding=Sharding(spread, shapes, full, _layers(loaded.module), always, hooked(loaded.module)),
        notes=(*loaded.notes, f"sharded over {spread.ranks} ranks: each holds some rows of every parameter"),
    )


def _cut(module: nn.Module, group: ProcessGroup | None, device: torch.device | None) -> None:
    """Replace every parameter in place by a DTensor of its rows; tied parameters stay tied."""
    group = dist.group.WORLD if group is None else group
    assert group is not None, "the caller has checked the process group"
    kind = (device or next(module.parameters()).device).type
    mesh = DeviceMesh.from_group(group, kind)
    replaced: dict[int, nn.Parameter] = {}
    spread = ShardGroup(group, dist.get_rank(group), dist.get_world_size(group))
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is None:
                continue
            if id(p) not in replaced:
                rows = spread.rows(p.shape[0]) if p.dim() else _refuse_number(name)
                piece = p.detach()[rows.start : rows.stop].to(device, copy=True)
                tensor = DTensor.from_local(
                    piece, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride()
                )
                replaced[id(p)] = nn.Parameter(tensor, requires_grad=p.requires_grad)
            part._parameters[name] = replaced[id(p)]
        if device is not None:
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.to(device)


def _refuse_number(name: str) -> range:
    raise UsageError(f"the parameter {name!r} is a single number, which cannot be sharded by rows")


def _spread_of(module: nn.Module) -> ShardGroup:
    """Return the ranks over which all parameters are sharded by rows."""
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    for name, p in module.named_parameters():
        assert isinstance(p, DTensor)
        if p.device_mesh.ndim != 1 or tuple(p.placements) != (Shard(0),) or len(meshes) > 1:
            raise UsageError(
                f"expected parameters sharded along their first axis over one group of ranks, {name!r} is "
                f"{tuple(p.placements)} on a mesh of {tuple(p.device_mesh.shape)}",
                hint="call fully_shard with a mesh of one axis",
            )
        rows = ShardGroup(None, p.device_mesh.get_local_rank(), p.device_mesh.size()).rows(p.shape[0])
        if len(p._local_tensor) != len(rows):
            raise UsageError(f"expected ⌈d / R⌉ rows of {name!r} on every rank, got {len(p._local_tensor)}")
    (mesh,) = meshes
    return ShardGroup(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def _layers(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return the repeated layers by name; raise if one shares a parameter with a module outside them."""
    names = {part: name for name, part in module.named_modules()}
    layers = {names[layer]: layer for layer in repeated_layers(module)}
    inside = {id(p) for layer in layers.values() for p in layer.parameters()}
    within = {id(part) for layer in layers.values() for part in layer.modules()}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and id(p) in inside and id(part) not in within:
                raise UsageError(
                    f"{names[part]}.{name} is shared with a layer, and layers gather their own parameters"
                )
    return layers


def local_block(block: Block, shape: Sequence[int], rows: range) -> Block:
    """Return the block's entries in some rows of its parameter, as a view of these rows.

    Args:
        block: A view of the full parameter.
        shape: Shape of the full parameter.
        rows: Rows of the shard.
    """
    leading = leading_axes(block, shape)
    starts, sizes = narrow_ranges(block)
    ahead = 0  # leading axes along which the shard has a single entry
    while ahead < leading - 1 and sizes[ahead] == 1:
        ahead += 1
    before = sum(starts[a] * prod(block.split[a + 1 : leading]) for a in range(ahead))
    order = block.order or tuple(range(len(block.split)))
    are_adjacent = _are_adjacent(order, range(ahead, leading))
    if are_adjacent and sizes[ahead + 1 : leading] == list(block.split[ahead + 1 : leading]):
        unit, joined = 1, range(ahead, leading)  # the rows form one axis
    else:
        unit, joined = prod(block.split[ahead + 1 : leading]), range(ahead, ahead + 1)
    stride = prod(block.split[ahead + 1 : leading])
    first, last = before + starts[ahead] * stride, before + (starts[ahead] + sizes[ahead]) * stride
    low, high = max(first, rows.start), max(min(last, rows.stop), max(first, rows.start))
    if any(edge % unit for edge in (rows.start, rows.stop, low - rows.start, high - rows.start)):
        raise UsageError(
            f"the rows of {block.name} on a rank do not form one view: {block.parameter} with {shape[0]} "
            f"rows is cut inside a group of {unit} rows",
            hint="use a number of ranks that divides the number of heads",
        )
    other_axes = list(range(joined.stop, len(block.split)))
    axes = [joined.start, *other_axes]
    split = (len(rows) // unit, *(block.split[a] for a in other_axes))
    cut = {0: (min(low - rows.start, len(rows)) // unit, (high - low) // unit)}
    cut |= {i: (starts[a], sizes[a]) for i, a in enumerate(axes) if i and sizes[a] != block.split[a]}
    order_of_axes = tuple(axes.index(a) for a in order if a in axes)
    lengths = [cut.get(i, (0, size))[1] for i, size in enumerate(split)]
    return Block(
        block.name,
        block.parameter,
        split=split,
        shape=_grouped(block, [sizes[a] for a in order], order, axes, [lengths[i] for i in order_of_axes]),
        order=None if order_of_axes == tuple(range(len(order_of_axes))) else order_of_axes,
        narrow=tuple((i, start, length) for i, (start, length) in cut.items() if length != split[i]),
    )


def _are_adjacent(order: Sequence[int], axes: range) -> bool:
    """Return True if the axes are adjacent and in order."""
    place = order.index(axes.start)
    return tuple(order[place : place + len(axes)]) == tuple(axes)


def _grouped(
    block: Block, sizes: list[int], order: Sequence[int], axes: list[int], lengths: list[int]
) -> tuple[int, ...]:
    """Return the shape of a block with fewer rows: lengths (in order) for the remaining axes."""
    remaining, shape, i = iter(lengths), [], 0
    for length in block.shape:
        count, local_count = 1, 1
        while i < len(order) and (count < length or sizes[i] == 1):
            count *= sizes[i]
            local_count *= next(remaining) if order[i] in axes else 1
            i += 1
        shape.append(local_count)
    return tuple(shape) if prod(shape) == prod(lengths) else (prod(lengths), *(1 for _ in block.shape[1:]))


def spread_out(model: Model, device: torch.device | str) -> Model:
    """Shard a model that every rank has read completely (`shard`); the model is changed in place.

    Raise if the models of the ranks differ. Only this rank's rows are copied to the device.

    Args:
        model: Model on the CPU.
        device: Device of the shards and of the computation.
    """
    module = model.module
    with shared_errors():
        check_weights(model)  # before sharding, because afterwards a single rank might raise
        words = tuple(digest_words(digest([*module.parameters(), *module.buffers()])))
    if len(set(gather_objects(words))) > 1:
        raise CurvescopeError(DIFFERENT_STATE.format("model"), hint=SAME_STATE_HINT)
    with shared_errors():  # raises on all ranks if one rank's rows cut through a block
        return shard(model, group_in_step(), device=device)

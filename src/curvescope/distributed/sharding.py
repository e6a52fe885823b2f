"""Models whose parameters are spread over ranks, for those that do not fit one device.

    model = distributed.shard(cs.load("gpt2"))          # or a module that fully_shard was applied to
    H = cs.Hessian(cs.Problem(model, batches))          # the same batches on every rank
    cs.eigsh(H, k=5)

Every parameter is a DTensor, cut along its first axis. While a product runs, a layer gathers its parameters,
lets go of them when it is done, and gathers them again when it is computed again: at its peak a rank holds
its pieces, one whole layer, and what lies outside of the layers (embedding, head). Of every batch a rank
computes some sequences; products are summed over ranks and come out in pieces, as the vectors go in.
Algorithms run on these pieces, with the numbers of a single process up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from curvescope.core.errors import UsageError
from curvescope.core.ranks.local_blocks import local_block
from curvescope.core.ranks.spread import Spread
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

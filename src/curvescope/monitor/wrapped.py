"""The module inside what others wrap around it, and which process measures it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from curvescope.algorithms.accurate_sums import summing_dtype
from curvescope.core.errors import UsageError
from curvescope.core.ranks.shard_layout import ShardGroup
from curvescope.distributed.sharding import shard
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.running.module_calls import Output
from curvescope.models.running.patching import Change
from curvescope.monitor.budget import Clock

WHOLE = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}
SPREAD = {  # kinds whose parameters cannot be differentiated twice, and what to take instead
    "FullyShardedDataParallel": "PyTorch's fully_shard (FSDP2) is measured",
    "DeepSpeedEngine": "DistributedDataParallel and fully_shard are measured",
}


class Inner(NamedTuple):
    """The model inside, what `load` would warn of, and whether another process measures it."""

    model: Model
    notes: list[str]
    passive: bool


def load_inner(model: Any, output: Output | None, params: Mapping[str, Any] | None) -> Inner:
    """The model inside what others wrap around it; one that is sharded is measured by all of its ranks."""
    module = inner_module(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(module, output=output, params=params)
        if is_sharded(module):
            loaded = shard(loaded)
    notes = list(dict.fromkeys(str(one.message) for one in caught))
    passive = loaded.spread is None and not _measures(model)
    if passive:
        notes.append("the process of rank 0 measures this model, and the others wait for it")
    return Inner(replace(loaded, settings=_uncompiled(loaded.settings)), notes, passive)


def is_sharded(model: Any) -> bool:
    """Return True if `fully_shard` has cut the parameters of a module."""
    return isinstance(model, nn.Module) and any(type(p).__name__ == "DTensor" for p in model.parameters())


def inner_module(model: Any) -> Any:
    """Unwrap `torch.compile`, DataParallel and DistributedDataParallel: the parameters stay the same."""
    while isinstance(model, nn.Module):
        kinds = _kinds(model)
        for kind in kinds & SPREAD.keys():
            raise UsageError(
                f"expected a module whose parameters can be differentiated twice, got a {kind}",
                hint=SPREAD[kind],
            )
        inside = [attribute for name, attribute in WHOLE.items() if name in kinds]
        if not inside:
            break
        model = getattr(model, inside[0])
    if isinstance(model, nn.Module):
        check_parameters(model)
    return model


def check_parameters(model: nn.Module) -> None:
    """Raise if a library other than PyTorch's `fully_shard` has cut the parameters of a module."""
    for name, parameter in model.named_parameters():
        kind = "DeepSpeed ZeRO" if hasattr(parameter, "ds_id") else None
        kind = "FullyShardedDataParallel" if type(parameter).__name__ == "FlatParameter" else kind
        if kind is not None:
            raise UsageError(
                f"expected parameters that PyTorch can differentiate twice, got {name} as {kind} cuts it",
                hint="DistributedDataParallel and PyTorch's fully_shard are measured",
            )


def _kinds(model: Any) -> set[str]:
    return {kind.__name__ for kind in type(model).__mro__}


def _measures(model: Any) -> bool:
    """Return True if this process measures: under DistributedDataParallel, the one of rank 0."""
    while isinstance(model, nn.Module):
        kinds = _kinds(model)
        if "DistributedDataParallel" in kinds:
            group: Any = model.process_group
            return torch.distributed.get_rank(group) == 0
        inside = [attribute for name, attribute in WHOLE.items() if name in kinds]
        if not inside:
            return True
        model = getattr(model, inside[0])
    return True


def shared_clock(clock: Clock, spread: ShardGroup | None, device: torch.device) -> Clock:
    """The clock of the first rank, for all ranks of a sharded model: they decide the same from it."""
    if spread is None:
        return clock

    def shared() -> float:
        own = clock() if spread.rank == 0 else 0.0
        return float(spread.sum(torch.tensor([own], dtype=summing_dtype(device), device=device)))

    return shared


def _uncompiled(settings: Callable[[nn.Module], list[Change]]) -> Callable[[nn.Module], list[Change]]:
    """Submodules that were compiled in place, `module.compile()`, run as they are written meanwhile."""

    def list_changes(module: nn.Module) -> list[Change]:
        compiled = [part for part in module.modules() if vars(part).get("_compiled_call_impl") is not None]
        return [*settings(module), *(Change(vars(part), "_compiled_call_impl", None) for part in compiled)]

    return list_changes

"""The module inside what others wrap around it: the one that can be differentiated twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from curvescope.core.errors import UsageError
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.running.calling import Output
from curvescope.models.running.exchange import Change

WHOLE = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}
SPREAD = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


def load_inner(
    model: Any, output: Output | None, params: Mapping[str, Any] | None
) -> tuple[Model, list[str]]:
    """The model inside, and what `load` would warn of, which in training goes without saying."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(inner_module(model), output=output, params=params)
    notes = list(dict.fromkeys(str(one.message) for one in caught))
    return replace(found, settings=_uncompiled(found.settings)), notes


def inner_module(model: Any) -> Any:
    """What `torch.compile`, DataParallel and DistributedDataParallel wrap: it has the same parameters."""
    while isinstance(model, nn.Module):
        kinds = {kind.__name__ for kind in type(model).__mro__}
        if kinds & SPREAD:
            raise UsageError(
                f"expected a module with whole parameters, got a {type(model).__name__}, which spreads them"
            )
        inside = [attribute for name, attribute in WHOLE.items() if name in kinds]
        if not inside:
            break
        model = getattr(model, inside[0])
    return model


def _uncompiled(settings: Callable[[nn.Module], list[Change]]) -> Callable[[nn.Module], list[Change]]:
    """Submodules that were compiled in place, `module.compile()`, run as they are written meanwhile."""

    def found(module: nn.Module) -> list[Change]:
        compiled = [part for part in module.modules() if vars(part).get("_compiled_call_impl") is not None]
        return [*settings(module), *(Change(vars(part), "_compiled_call_impl", None) for part in compiled)]

    return found

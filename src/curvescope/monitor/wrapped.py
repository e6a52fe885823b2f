"""The module inside what others wrap around it: the one that can be differentiated twice."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from curvescope.core.errors import UsageError
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.running.calling import Output

SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def inner_module(model: Any) -> Any:
    """What `torch.compile`, DataParallel and DistributedDataParallel wrap: it has the same parameters."""
    while isinstance(model, nn.Module):
        kinds = {kind.__name__ for kind in type(model).__mro__}
        if kinds & set(SHARDED):
            raise UsageError(
                f"expected a module whose parameters are whole, got a {type(model).__name__} that spreads "
                "them over processes"
            )
        if "OptimizedModule" in kinds:
            model = model._orig_mod
        elif kinds & {"DistributedDataParallel", "DataParallel"}:
            model = model.module
        else:
            break
    return model


def load_quietly(model: Any, output: Output | None, params: Any) -> tuple[Model, list[str]]:
    """The model, and what `load` would warn of: in training, dropout is expected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(inner_module(model), output=output, params=params)
    return found, list(dict.fromkeys(str(one.message) for one in caught))

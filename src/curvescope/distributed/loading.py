"""Models as ranks that spread them load them: each reads all of it on the CPU, and keeps its rows of it."""

from __future__ import annotations

import torch

from curvescope.core.errors import CurvescopeError
from curvescope.core.ranks import everyone, group_in_step, together
from curvescope.distributed.sharding import shard
from curvescope.distributed.sums import DIFFERENT, LOAD, hashed
from curvescope.engines.tensor_digest import digest
from curvescope.models.forward_errors import check_weights
from curvescope.models.model import Model


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

"""RWKV: linear attention as a recurrence; its blocks are its parameters."""

from typing import Any

from curvescope.models.adapters.table import Family
from curvescope.models.running.exchange import Change


def _as_trained(module: Any) -> list[Change]:
    """No halving on the way up, and no weights divided for it in place, unless a pass has divided them."""
    body = getattr(module, "rwkv", module)
    if body.layers_are_rescaled or not body.config.rescale_every:
        return []
    return [Change(vars(body.config), "rescale_every", 0), Change(vars(body), "layers_are_rescaled", True)]


FAMILY = Family(
    positions="none",
    float32=("the recurrence",),
    settings=_as_trained,
    notes=(
        "a recurrence has no heads, no attention pattern and no Q, K, V",
        "the weights are taken as they stand: as trained, or, behind a pass in eval mode, divided for half "
        "precision by 2^(layer // rescale_every)",
    ),
)

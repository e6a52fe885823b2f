"""RWKV: linear attention as a recurrence; its blocks are its parameters."""

from typing import Any

from curvescope.models.adapters.table import Family


def _restore(module: Any) -> None:
    """Undo what a pass in eval mode does to weights in place: layer i over 2^(i // rescale_every)."""
    body = getattr(module, "rwkv", module)
    if body.layers_are_rescaled:
        training, body.training = body.training, True
        body._rescale_layers()
        body.training = training


FAMILY = Family(
    positions="none",
    float32=("the recurrence",),
    settings={"rescale_every": 0},
    restore=_restore,
    notes=(
        "a recurrence has no heads, no attention pattern and no Q, K, V",
        "rescale_every is 0: the model as trained; halving weights on the way up is for half precision",
    ),
)

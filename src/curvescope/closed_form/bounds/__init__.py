"""Certified bounds on Hessians of heads and blocks, and the growth of blocks."""

from curvescope.closed_form.bounds.head import (
    NAMES,
    BlockBounds,
    attention_bounds,
    block_bounds,
    upper_bounds,
)

__all__ = ["NAMES", "BlockBounds", "attention_bounds", "block_bounds", "upper_bounds"]

"""Certified bounds on Hessians of heads and blocks, and how blocks grow."""

from curvescope.closed_form.bounds.head import (
    NAMES,
    BlockBounds,
    attention_bounds,
    block_bounds,
    upper_bounds,
)

__all__ = ["NAMES", "BlockBounds", "attention_bounds", "block_bounds", "upper_bounds"]

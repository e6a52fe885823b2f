"""Functions of torch.nn.functional, and complete models, with every second derivative; imports only torch."""

from curvescope.nn import functional
from curvescope.nn.dropin import (
    Replacements,
    make_twice_differentiable,
    replacements,
    twice_differentiable,
)
from curvescope.nn.functional import RelativeBias, scaled_dot_product_attention

__all__ = [
    "RelativeBias",
    "Replacements",
    "functional",
    "make_twice_differentiable",
    "replacements",
    "scaled_dot_product_attention",
    "twice_differentiable",
]

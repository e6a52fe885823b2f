"""Functions of torch.nn.functional that can be differentiated in every way; imports torch alone."""

from curvescope.nn import functional
from curvescope.nn.functional import RelativeBias, scaled_dot_product_attention

__all__ = ["RelativeBias", "functional", "scaled_dot_product_attention"]

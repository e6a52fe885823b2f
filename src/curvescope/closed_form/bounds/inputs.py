"""The inputs of a head, as one value: what every bound of attention starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.closed_form.attention.checks import check_loss, check_weights
from curvescope.closed_form.attention.core import CorePoint, core_point
from curvescope.core.errors import ShapeError, UsageError


@dataclass(frozen=True)
class HeadInputs:
    """Tokens and weights of one softmax head F = softmax(s X W_Q W_Kᵀ Xᵀ) X W_V, in float64."""

    X: Tensor  # (L, d), or (n, L, d) for a batch
    W_Q: Tensor  # (d, d_K)
    W_K: Tensor  # (d, d_K)
    W_V: Tensor  # (d, d_V)
    scale: float  # s
    mask: Tensor | None = None  # (L, L), True where a query may look; or numbers added to the scores

    def core(self) -> CorePoint:
        """Attention with the tokens themselves as values."""
        boolean = self.mask is not None and self.mask.dtype == torch.bool
        hidden, bias = (self.mask, None) if boolean else (None, self.mask)
        q, k = self.X @ self.W_Q, self.X @ self.W_K
        return core_point(q, k, self.X, scale=self.scale, mask=hidden, bias=bias)

    def check(self, G: Tensor) -> None:
        """Raise unless everything is finite and fits together and to the gradient G (…, L, d_V)."""
        if self.X.ndim not in (2, 3):
            raise ShapeError(f"expected X of shape (L, d) or (n, L, d), got {tuple(self.X.shape)}")
        named = {"Q": self.W_Q, "K": self.W_K, "V": self.W_V}
        X, G = (tensor if self.X.ndim == 3 else tensor[None] for tensor in (self.X, G))
        check_weights(X, X, X, named, 1, 1)
        check_loss(X, named, G, 0.0)
        for name, tensor in (("X", X), *named.items(), ("G", G)):
            if not bool(torch.isfinite(tensor).all()):
                raise UsageError(f"expected finite numbers in {name}, got inf or nan")


def head_inputs(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> HeadInputs:
    """The inputs in float64; s = 1/√d_K unless given."""
    s = W_Q.shape[1] ** -0.5 if scale is None else scale
    return HeadInputs(X.double(), W_Q.double(), W_K.double(), W_V.double(), s, mask)

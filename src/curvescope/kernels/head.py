"""The last linear map of a model, not evaluated yet."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearHead(NamedTuple):
    """Outputs z = h Wᵀ + b as their factors: h (…, d), W (C, d) of any strides, b (C,) or None."""

    h: Tensor
    W: Tensor
    b: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs: (…, C)."""
        return (*self.h.shape[:-1], self.W.shape[0])

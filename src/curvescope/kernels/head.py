"""The last linear map of a model, in factored form."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearHead(NamedTuple):
    """Outputs z = h Wᵀ + b in factored form: h (…, d), W (C, d) of any strides, b (C,) or None."""

    h: Tensor
    W: Tensor
    b: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs: (…, C)."""
        return (*self.h.shape[:-1], self.W.shape[0])

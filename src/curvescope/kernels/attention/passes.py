"""Interface of every implementation of attention: three passes, called by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from curvescope.kernels.attention.mask import Mask

Directions = tuple[Tensor | None, Tensor | None, Tensor | None]  # gQ, gK, gV
Needs = tuple[bool, bool, bool, bool]  # hQ, hK, hV, h_dO
Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Saved:
    """Tensors of the forward that later passes use: q, k, v and O (B, H, L, d), LSE (B, H, L), kept P."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor  # +∞ where no key is seen
    P: Tensor  # empty unless kept


class Passes(Protocol):
    """Attention and its two derivatives; a module with these functions is one."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, keep: bool = ...
    ) -> tuple[Tensor, Tensor, Tensor]:
        """O, LSE, and P, empty unless `keep`."""
        ...

    def backward(
        self, saved: Saved, do: Tensor, *, mask: Mask, scale: float, keep: bool = ...
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dQ, dK, dV for an incoming dO, and dS, empty unless `keep`."""
        ...

    def second(
        self,
        saved: Saved,
        do: Tensor | None,
        dS: Tensor,
        directions: Directions,
        *,
        mask: Mask,
        scale: float,
        needs: Needs,
    ) -> Outputs:
        """hQ, hK, hV, h_dO for n directions (n, B, H, L, d); None where `needs` says so."""
        ...

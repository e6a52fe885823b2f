"""Derivatives of attention of order three and more, by plain operations in memory quadratic in the length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.kernels.attention.plain_attention import Scores, plain_attention
from curvescope.kernels.backends import pulled, pushed, warn_of_third

ThirdOrder = Literal["warn", "error"]
Several = Sequence[Tensor]


def announce(third_order: str) -> None:
    """Warn once per process that the plain path is taken, or raise if the caller requested that."""
    if third_order == "error":
        raise CurvescopeError(
            "fused attention has no third derivative",
            hint="switch the model to plain attention, e.g. attn_implementation='eager', or call "
            "curvescope.nn.functional.scaled_dot_product_attention with third_order='warn'",
        )
    warn_of_third("attention", ", in memory quadratic in the length")


@dataclass(frozen=True)
class Plain:
    """The derivatives of one call as functions of x = q, k, v, and bias and table if there are any."""

    has_bias: bool
    has_table: bool
    hidden: Tensor | None
    noise: Tensor | None
    how: Scores

    @property
    def num(self) -> int:
        """Number of tensors x."""
        return 3 + self.has_bias + self.has_table

    def spread(self, x: Several) -> list[Tensor | None]:
        """`num` tensors as five, None where bias or table are missing."""
        rest = iter(x[3:])
        return [*x[:3], next(rest) if self.has_bias else None, next(rest) if self.has_table else None]

    def value(self, *x: Tensor) -> Tensor:
        """O."""
        q, k, v, *rest = x
        bias = rest[0] if self.has_bias else None
        table = rest[-1] if self.has_table else None
        return plain_attention(q, k, v, bias, table, self.hidden, self.noise, self.how)

    def first(self, *x_do: Tensor) -> Several:
        """Derivatives of ⟨O(x), dO⟩ in x."""
        *x, do = x_do
        return pulled(self.value, x, do)

    def second(self, *x_do_g: Tensor) -> Several:
        """Derivatives of ⟨first(x, dO), g⟩ in x and in dO."""
        return pulled(self.first, x_do_g[: self.num + 1], x_do_g[self.num + 1 :])

    def tangent(self, *x_t: Tensor) -> Tensor:
        """The derivative of O in direction t."""
        return pushed(self.value, x_t[: self.num], x_t[self.num :])

    def second_tangent(self, *x_t_s: Tensor) -> Tensor:
        """The derivative of `tangent` in direction s of x."""
        x, t, s = (x_t_s[i * self.num : (i + 1) * self.num] for i in range(3))
        return pushed(lambda *x: self.tangent(*x, *t), x, s)

"""Tables of the growth of a softmax attention layer's blocks with data, weights and attention moments.

A block is a sum of terms, each a power of the scaled quantity. A table lists the exponents: near zero the
smallest gives the slope of log ‖block‖ against log scale, and the largest bounds the growth at any scale.
They are slopes only if the softmax is far from saturated, that is if the spread of the scores is well below
one. Beyond that, blocks of W_Q and W_K decrease, see `saturation_slope`. The functional Hessian assumes a
fixed ∂ℓ/∂F, which holds for fixed targets and small data. If targets scale with the data, add one.

The exponents are those of Ormaniec et al. (2025), with added blocks of W_K and exact cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from curvescope.closed_form.block_matrix import Pair
from curvescope.core.hessian_terms import Half

Exponents = tuple[int, ...]
PAIRS: tuple[Pair, ...] = (("Q", "Q"), ("Q", "K"), ("K", "K"), ("Q", "V"), ("K", "V"), ("V", "V"))


@dataclass(frozen=True)
class GrowthTable:
    """Exponents of the terms of every block; none for a block that is exactly zero."""

    variable: str  # what is scaled
    outer: Mapping[Pair, Exponents]
    functional: Mapping[Pair, Exponents]
    exact: bool  # True if the exponents are slopes at every scale, not only near zero

    def exponents(self, pair: Pair, part: Half) -> Exponents:
        """Return the exponents of a block's terms; the pair may have either order."""
        table = self.outer if part == "outer" else self.functional
        return table[pair] if pair in table else table[pair[1], pair[0]]

    def slope(self, pair: Pair, part: Half) -> int | None:
        """Return the slope of log ‖block‖_F near scale zero: the smallest exponent; None for a zero block."""
        return min(self.exponents(pair, part), default=None)

    def bound(self, pair: Pair, part: Half) -> int | None:
        """Return the largest exponent, which bounds the growth at any scale; None for a zero block."""
        return max(self.exponents(pair, part), default=None)


@dataclass(frozen=True)
class MomentPowers:
    """Powers of the attention moments in one term of a block."""

    M1: int = 0
    M2: int = 0
    M3: int = 0


def _table(variable: str, outer: list[Exponents], functional: list[Exponents], *, exact: bool) -> GrowthTable:
    return GrowthTable(variable, _by_pair(outer), _by_pair(functional), exact)


def _by_pair(values: list[Exponents]) -> Mapping[Pair, Exponents]:
    return MappingProxyType(dict(zip(PAIRS, values, strict=True)))


# The columns of all tables are QQ, QK, KK, QV, KV, VV.
DATA = _table("X", [(6,), (6,), (6,), (4,), (4,), (2,)], [(5,), (5, 3), (5,), (3,), (3,), ()], exact=False)
"""Growth of softmax attention with the scale of the tokens."""

DATA_CENTERED = _table(
    "X with Σ_j x_j = 0, no mask",
    [(6,), (6,), (6,), (6,), (6,), (6,)],
    [(5,), (5, 3), (5,), (3,), (3,), ()],
    exact=False,
)
"""Tokens of mean zero: uniform attention averages to zero, and M₁ is of third order."""

DATA_LINEAR = _table(
    "X, linear attention", [(6,), (6,), (6,), (6,), (6,), (6,)], [(), (3,), (), (3,), (3,), ()], exact=True
)
"""Attention without softmax: Σ³ in every block of H_o, and no functional Hessian on the diagonal."""

DATA_NORMALIZED = _table("X after LayerNorm", [(0,)] * 6, [(0,), (0,), (0,), (0,), (0,), ()], exact=True)
"""Tokens after a norm with negligible ε: nothing depends on the scale."""

WEIGHTS_Q = _table(
    "W_Q", [(0,), (1,), (2,), (0,), (1,), (0,)], [(0,), (1, 0), (2,), (0,), (1,), ()], exact=False
)
WEIGHTS_K = _table(
    "W_K", [(2,), (1,), (0,), (1,), (0,), (0,)], [(2,), (1, 0), (0,), (1,), (0,), ()], exact=False
)
WEIGHTS_V = _table(
    "W_V", [(2,), (2,), (2,), (1,), (1,), (0,)], [(1,), (1, 1), (1,), (0,), (0,), ()], exact=True
)

_SECOND, _THIRD = MomentPowers(M2=1), MomentPowers(M3=1)
MOMENTS_OUTER: Mapping[Pair, tuple[MomentPowers, ...]] = MappingProxyType(
    {pair: (MomentPowers(M2=2),) for pair in PAIRS[:3]}
    | {pair: (MomentPowers(M1=1, M2=1),) for pair in PAIRS[3:5]}
    | {("V", "V"): (MomentPowers(M1=2),)}
)
"""Moments in the blocks of H_o: quadratic in M₂, M₁ M₂, or M₁ squared."""

MOMENTS_FUNCTIONAL: Mapping[Pair, tuple[MomentPowers, ...]] = MappingProxyType(
    {
        ("Q", "Q"): (_THIRD,),
        ("Q", "K"): (_THIRD, _SECOND),
        ("K", "K"): (_THIRD,),
        ("Q", "V"): (_SECOND,),
        ("K", "V"): (_SECOND,),
        ("V", "V"): (),
    }
)
"""Moments in the functional blocks, in the order of the exponents of `DATA`: linear in M₃ or M₂."""


def saturation_slope(pair: Pair, part: Half, spread: float) -> float | None:
    """Return the slope of log ‖block‖_F in log σ for tokens σ X at large σ, with nearly one-hot attention.

    M₂ and M₃ then decrease like exp(−σ²Δ). Δ is the smallest gap over queries between the two largest scores
    at σ = 1, so each of them subtracts 2 σ²Δ from the exponent of its term. `spread` is σ²Δ.

    Returns:
        The slope of the slowest term, or None for a block that is exactly zero.
    """
    pair = pair if pair in PAIRS else (pair[1], pair[0])
    powers = (MOMENTS_OUTER if part == "outer" else MOMENTS_FUNCTIONAL)[pair]
    exponents = DATA.exponents(pair, part)
    slopes = [e - 2 * spread * (p.M2 + p.M3) for e, p in zip(exponents, powers, strict=True)]
    return max(slopes, default=None)

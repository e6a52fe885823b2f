"""The largest curvature from step to step, from the direction found last and from others beside it.

An eigenvector of yesterday may lie in a subspace that the operator of today maps into itself, and Krylov's
space of it never leaves that: a batch of other features, a direction that begins to bend. So the search is in
the span of

    v, d, A d, A² d, …       d = fresh ± (A v − θ v) / ‖A v − θ v‖,

v the direction known, `fresh` one that owes nothing to it: a gradient and a random vector. With u the Ritz
vector of largest magnitude, |θ_u| ≤ ‖A u‖ ≤ |λ|_max, and A u / ‖A u‖, a step of the power method that costs
no product, is where the next search begins.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.spectra.following import LOST, RANDOM, Subspace
from curvescope.algorithms.sums import norms
from curvescope.algorithms.vectors import check_finite
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import probes

LEAST = 2  # products: one for what is known, one for what is not
FALL = 0.7  # of the last value: what is found below it may have been lost, and is looked for again


def pursue(
    op: LinearOperator,
    known: Tensor | None,
    fresh: Tensor,
    *,
    last: float,
    num_products: int,
    first_products: int,
) -> tuple[float, Tensor]:
    """`follow` by `first_products` where nothing is known, by `num_products` otherwise.

    Where that finds less than 0.7 of the last value, the search goes on for `first_products` more.
    """
    value, top = follow(op, known, fresh, first_products if known is None else num_products)
    if known is None or value >= FALL * last:
        return value, top
    return follow(op, top, fresh, first_products)


def follow(
    op: LinearOperator, known: Tensor | None, fresh: Tensor, num_products: int
) -> tuple[float, Tensor]:
    """‖A u‖, at most |λ|_max and exact where `known` is its eigenvector, and the unit vector A u / ‖A u‖.

    Two vectors for each product are in memory.

    Args:
        op: A, symmetric.
        known: v, (n,), or None: the search begins with `fresh`.
        fresh: (n,), see `fresh_vector`.
        num_products: At least two are taken where something is known, and n > 1.
    """
    count = num_products if known is None else max(num_products, LEAST)
    space = Subspace(op, count)
    space.add((fresh if known is None else known)[None])
    while space.products < count:
        ahead = space.AV[-1] if space.count > 1 else _turn(space.V[0], space.AV[0], fresh)
        if not space.add(ahead[None]):
            break
    theta, S = space.ritz()
    image = torch.as_tensor(S[:, int(np.abs(theta).argmax())]).to(space.V) @ space.AV
    value = float(norms(image))
    return value, image / value if value else _unit(fresh)


def _turn(v: Tensor, image: Tensor, fresh: Tensor) -> Tensor:
    """d; the residual has the sign with which it leans to `fresh`, as v may have either."""
    rest = image - (v @ image) * v
    unit = _unit(rest, LOST * norms(image))
    return fresh - unit if bool(unit @ fresh < 0) else fresh + unit


def fresh_vector(g: Tensor, *, seed: int, draw: int) -> Tensor:
    """g / ‖g‖ and a random vector of half its length, (n,); at g = 0 the random one."""
    check_finite(float(norms(g)))
    drawn = probes(len(g), 1, seed=seed, first=draw, kind="gaussian", dtype=g.dtype, device=g.device)[:, 0]
    return _unit(g) + RANDOM * _unit(drawn)


def _unit(x: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """x / ‖x‖; zero where ‖x‖ is not above the least."""
    size = norms(x)
    return x / size if bool(size > least) else torch.zeros_like(x)


def check_counts(every: int, num_products: int, first_products: int) -> None:
    """Raise unless they are at least 1, and products enough to look beside what is known."""
    if min(every, first_products) < 1 or num_products < LEAST:
        raise UsageError(
            f"expected every and first_products of at least 1 and num_products of at least {LEAST}, "
            f"got {every!r}, {first_products!r} and {num_products!r}"
        )

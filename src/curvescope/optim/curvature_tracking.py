"""Track the largest curvature from step to step, starting from the last direction and from new ones.

An earlier eigenvector may lie in an invariant subspace of the current operator, and its Krylov space never
leaves that subspace. This happens with a batch of other features, or if a flat direction begins to curve. So
the search is in the span of

    v, d, A d, A² d, …       d = fresh ± (A v − θ v) / ‖A v − θ v‖,

where v is the known direction and `fresh` is independent of it: a gradient plus a random vector. With u the
Ritz vector of largest magnitude, |θ_u| ≤ ‖A u‖ ≤ |λ|_max, and A u / ‖A u‖, a step of the power method without
a further product, is the start of the next search.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import norms
from curvescope.algorithms.spectra.subspace_tracking import MIN_OUTSIDE, RANDOM_LENGTH, Subspace
from curvescope.algorithms.vectors import check_finite
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import probes

MIN_PRODUCTS = 2  # fewest products: one for the known direction, one for the new one
MAX_FALL = 0.7  # if the new value is below this share of the last one, the search continues


def pursue(
    op: LinearOperator,
    known: Tensor | None,
    fresh: Tensor,
    *,
    last: float,
    num_products: int,
    first_products: int,
) -> tuple[float, Tensor]:
    """Run `follow` with `first_products` if no direction is known, else with `num_products`. If the
    result is below 0.7 of the last value, the search continues for `first_products` more.
    """
    value, top = follow(op, known, fresh, first_products if known is None else num_products)
    if known is None or value >= MAX_FALL * last:
        return value, top
    return follow(op, top, fresh, first_products)


def follow(
    op: LinearOperator, known: Tensor | None, fresh: Tensor, num_products: int
) -> tuple[float, Tensor]:
    """‖A u‖, at most |λ|_max and exact where `known` is its eigenvector, and the unit vector A u / ‖A u‖.

    Two vectors for each product are in memory.

    Args:
        op: A, symmetric.
        known: v, (n,), or None to start with `fresh`.
        fresh: (n,), see `fresh_vector`.
        num_products: Products; at least two if a direction is known and n > 1.
    """
    count = num_products if known is None else max(num_products, MIN_PRODUCTS)
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
    """Return d; the sign of the residual gives it a positive product with `fresh`, because the sign of v is
    arbitrary.
    """
    residual = image - (v @ image) * v
    unit = _unit(residual, MIN_OUTSIDE * norms(image))
    return fresh - unit if bool(unit @ fresh < 0) else fresh + unit


def fresh_vector(g: Tensor, *, seed: int, draw: int) -> Tensor:
    """g / ‖g‖ and a random vector of half its length, (n,); at g = 0 the random one."""
    check_finite(float(norms(g)))
    drawn = probes(len(g), 1, seed=seed, first=draw, kind="gaussian", dtype=g.dtype, device=g.device)[:, 0]
    return _unit(g) + RANDOM_LENGTH * _unit(drawn)


def _unit(x: Tensor, least: Tensor | float = 0.0) -> Tensor:
    """x / ‖x‖; zero if ‖x‖ is not above `least`."""
    size = norms(x)
    return x / size if bool(size > least) else torch.zeros_like(x)


def check_counts(every: int, num_products: int, first_products: int) -> None:
    """Raise unless all are at least 1, and products suffice for a new direction beside the known one."""
    if min(every, first_products) < 1 or num_products < MIN_PRODUCTS:
        raise UsageError(
            f"expected every and first_products of at least 1 and num_products of at least {MIN_PRODUCTS}, "
            f"got {every!r}, {first_products!r} and {num_products!r}"
        )

"""Finite differences to check derivatives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from curvescope.core.seeds import generator
from curvescope.core.tensors import constant_rows

LOG = logging.getLogger("curvescope")
STEPS = {torch.float64: (1e-4, 1e-5, 1e-6, 1e-7), torch.float32: (1e-2, 3e-3)}
"""Step sizes relative to the parameters, by dtype."""
AGREEMENT = {torch.float64: 1e-4, torch.float32: 2e-2}
"""Largest relative distance of two differences that agree, by dtype."""
FACTOR = 5
"""Allowed error of a derivative, as a multiple of AGREEMENT."""
Tensors = Sequence[Tensor]


def gradient_error(
    function: Callable[[Mapping[str, Tensor]], Tensor], parameters: Mapping[str, Tensor]
) -> float | None:
    """Relative error of autograd's slope of a function along a random direction, or None if it is small.

    Args:
        function: Function of parameters by name that returns one number.
        parameters: Point at which to check; the step of each parameter is proportional to its size.
    """
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    value, source = function(leaves), generator(0)
    v = {
        name: torch.randn(p.shape, generator=source).to(p) * (float(p.detach().square().mean().sqrt()) or 1.0)
        for name, p in leaves.items()
    }
    names = {id(leaf): name for name, leaf in leaves.items()}
    for leaf, row in constant_rows(value):
        if id(leaf) in names:
            v[names[id(leaf)]][row] = 0
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    slope = sum((g.double() * d).sum() for g, d in zip(gradients, v.values(), strict=True))

    def values_at(step: float) -> Tensors:
        with torch.no_grad():
            return [function({name: p.detach() + step * v[name] for name, p in leaves.items()}).double()]

    return difference_error([torch.as_tensor(slope)], values_at, value.dtype)


def difference_error(
    product: Tensors, values: Callable[[float], Tensors], dtype: torch.dtype
) -> float | None:
    """Relative distance of a product from a finite difference, or None if it is as small as expected.

    A difference counts only if it agrees with the difference for half the step. This excludes kinks and steps
    at which rounding dominates.
    """
    for step in STEPS[dtype]:
        wide, narrow = _difference(values, step), _difference(values, step / 2)
        scale = max(_norm(narrow), _norm(product))
        if scale == 0:
            return None
        if _norm([a - b for a, b in zip(wide, narrow, strict=True)]) <= AGREEMENT[dtype] * scale:
            error = _norm([a - b for a, b in zip(product, narrow, strict=True)]) / scale
            return error if error > FACTOR * AGREEMENT[dtype] else None
    LOG.warning("a custom autograd function could not be compared with a finite difference")
    return None


def _difference(values: Callable[[float], Tensors], step: float) -> Tensors:
    pairs = zip(values(step), values(-step), strict=True)
    return [(after - before) / (2 * step) for after, before in pairs]


def _norm(tensors: Tensors) -> float:
    return sum(float(t.detach().double().square().sum()) for t in tensors) ** 0.5

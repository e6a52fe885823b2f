"""Weight decay and damping: a diagonal that is added to a curvature operator.

With weight decay w_b for block b and damping λ the operator C becomes C + diag(w) + λ I, which for the
Hessian is that of

    L(θ) + ½ Σ_b w_b ‖θ_b‖² + ½ λ ‖θ‖².
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError, near_misses
from curvescope.models.model import Model

MATRICES = "matrices"
WeightDecay = float | Mapping[str, float]


class Shift:
    """diag(w) + λ I over all parameters of a model; zero outside of the entries that rows and columns share.

    Args:
        damping: λ, at least 0.
        weight_decay: w for all blocks, or by globs of blocks; "matrices" are those with two axes or more.
            Blocks that nothing matches have none; where several match, the last one counts.
    """

    def __init__(self, model: Model, damping: float, weight_decay: WeightDecay):
        by_block = _by_block(model, not_negative("damping", damping), weight_decay)
        self.weights = {name: _weight(model, name, by_block) for name in dict(model.named_parameters())}
        values = set(by_block.values())
        self.uniform = values.pop() if len(values) == 1 else None

    def diagonal(self, space: ParamSpace) -> Tensor:
        """λ + w of every entry of a space, (n,)."""
        ones = torch.ones(space.size, 1, dtype=space.dtype, device=space.device)
        return self.added(torch.zeros_like(ones), ones, space, space)[:, 0]

    def added(self, product: Tensor, V: Tensor, rows: ParamSpace, columns: ParamSpace) -> Tensor:
        """The product (m, k) and that of the shift with V (n, k)."""
        if self.uniform is not None and rows.segments == columns.segments:
            return torch.add(product, V, alpha=self.uniform)
        given = columns.scatter_columns(V)
        shared = [name for name in columns.parameter_names if name in rows.shapes]
        tree = {name: (given[name] * self.weights[name]).contiguous() for name in shared}
        return product + rows.gather_columns(tree, V.shape[1])


def shift(model: Model, damping: float, weight_decay: WeightDecay) -> Shift | None:
    """What is added, or None where that is nothing."""
    none = damping == 0 and not isinstance(weight_decay, Mapping) and weight_decay == 0
    return None if none else Shift(model, damping, weight_decay)


def _by_block(model: Model, damping: float, weight_decay: WeightDecay) -> dict[str, float]:
    """λ + w_b of every block."""
    if not isinstance(weight_decay, Mapping):
        return dict.fromkeys(model.blocks, damping + not_negative("weight_decay", weight_decay))
    found = dict.fromkeys(model.blocks, 0.0)
    for pattern, value in weight_decay.items():
        number = not_negative(f"weight_decay of {pattern!r}", value)
        if pattern == MATRICES:
            matched = [name for name, block in model.blocks.items() if len(block.shape) > 1]
        else:
            matched = [name for name in model.blocks if fnmatch.fnmatchcase(name, str(pattern))]
        if not matched:
            raise UsageError(
                f"no block matches {pattern!r} of weight_decay",
                hint=near_misses(str(pattern), [MATRICES, *model.blocks]),
            )
        found |= dict.fromkeys(matched, number)
    return {name: damping + value for name, value in found.items()}


def _weight(model: Model, parameter: str, by_block: Mapping[str, float]) -> float | Tensor:
    """What multiplies a parameter: a number, or a tensor of its shape where its blocks differ."""
    own = {name: block for name, block in model.blocks.items() if block.parameter == parameter}
    values = {by_block[name] for name in own}
    if len(values) < 2:
        return values.pop() if values else 0.0
    found = torch.zeros(model.get_parameter(parameter).shape, dtype=model.dtype, device=model.device)
    for name, block in own.items():
        block.view(found).fill_(by_block[name])
    return found


def not_negative(name: str, value: float) -> float:
    """A finite number that is not negative."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"expected a finite {name} of at least 0, got {value!r}")
    return number

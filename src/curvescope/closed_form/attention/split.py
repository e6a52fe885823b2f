"""Maps of an attention layer's Hessian and of its two parts, for figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.attention.hessian import AttentionCurvature, Pair
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.hessian_terms import PARTS
from curvescope.core.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Resolution = Literal["features", "entries"]


@dataclass(frozen=True)
class BlockSplit(Result):
    """Sizes of the entries of H = H_o + H_f over the weights of an attention layer.

    With the resolution `entries` one row per entry of a weight, row-major, and its absolute value. With
    `features` one row per column of W_Q, W_K, W_V and per row of W_O, which are the features of the heads; a
    number is then the Frobenius norm over the other index of both weights. Other pairs are NaN.
    """

    names: list[str]  # weights, in order
    sizes: list[int]  # rows of each
    total: np.ndarray  # (m, m)
    outer: np.ndarray  # (m, m)
    functional: np.ndarray  # (m, m)
    resolution: str

    def plot(self, axes: Sequence[Axes] | None = None) -> Sequence[Axes]:
        """Three heat maps side by side: total, outer, functional."""
        from curvescope.viz.matrix import block_split

        panels = {"total": self.total, "outer": self.outer, "functional": self.functional}
        label = "|entry|" if self.resolution == "entries" else "norm over the stream's index"
        return block_split(axes, self.names, self.sizes, panels, label=label)


def block_split(
    curvature: AttentionCurvature,
    names: Sequence[str] = ("Q", "K", "V"),
    *,
    pairs: Sequence[Pair] | None = None,
    resolution: Resolution = "features",
) -> BlockSplit:
    """Return the map over the named weights, or over some `pairs` of them, each with its transpose.

    The function forms one block at a time. The block of two d × k matrices temporarily takes 3 (d k)²
    numbers: 64 MB in float32 for d = 96, k = 24. The result has 3 m² numbers for m rows.
    """
    _check(curvature, names, pairs, resolution)
    chosen = [(a, b) for i, a in enumerate(names) for b in names[i:]] if pairs is None else list(pairs)
    sizes = {name: _rows(curvature.shapes[name], name, resolution) for name in names}
    starts = np.concatenate([[0], np.cumsum(list(sizes.values()))])
    positions = {name: slice(a, b) for name, a, b in zip(names, starts, starts[1:], strict=False)}
    maps = {part: np.full((starts[-1], starts[-1]), np.nan) for part in PARTS}
    for one, two in chosen:
        block = curvature.split((one, two))
        for part, values in maps.items():
            values_ = _reduced(getattr(block, part), one, two, resolution).cpu().numpy()
            values[positions[one], positions[two]] = values_
            values[positions[two], positions[one]] = values_.T
    return BlockSplit(list(names), list(sizes.values()), **maps, resolution=resolution)


def _rows(shape: tuple[int, int], name: str, resolution: str) -> int:
    return shape[_feature_axis(name)] if resolution == "features" else shape[0] * shape[1]


def _reduced(block: Tensor, one: str, two: str, resolution: str) -> Tensor:
    """Reduce a block [a, c, b, e] to a matrix of absolute entries, or of norms over the other indices."""
    if resolution == "entries":
        return block.abs().flatten(2).flatten(0, 1)
    return torch.linalg.vector_norm(block, dim=(1 - _feature_axis(one), 3 - _feature_axis(two)))


def _feature_axis(name: str) -> int:
    """Return the index of a weight that counts features of heads: the first of W_O, else the second."""
    return 0 if name == "O" else 1


def _check(
    curvature: AttentionCurvature, names: Sequence[str], pairs: Sequence[Pair] | None, resolution: str
) -> None:
    for name in names:
        if name not in curvature.names:
            raise UsageError(f"no weight is called {name!r}", hint=near_misses(name, list(curvature.names)))
    for pair in pairs or ():
        if len(pair) != 2 or not set(pair) <= set(names):
            raise UsageError(f"expected pairs of {', '.join(names)}, got {pair!r}")
    if resolution not in ("features", "entries"):
        raise UsageError(f"expected a resolution of 'features' or 'entries', got {resolution!r}")

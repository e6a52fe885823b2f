"""Single tokens: the w × w diagonal blocks of an activation operator, all of them in one operator.

Tokens at one position of different sequences do not meet, so one direction through the model serves all
sequences of a batch: a product with all blocks takes as many directions as there are positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator
from curvescope.operators.activations.places import Part

if TYPE_CHECKING:
    from curvescope.operators.activations.operator import ActivationOperator


class TokenBlocks(LinearOperator):
    """diag(C_11, C_22, …): the loss in the activations of each token alone, all others held fixed."""

    symmetric = True

    def __init__(self, whole: ActivationOperator):
        if not all(part.tokens for part in whole.parts):
            raise UsageError(f"expected activations (B, T, d) with positions, {whole.at!r} has none")
        self.whole, self.psd = whole, whole.psd
        self.shape, self.dtype, self.device = whole.shape, whole.dtype, whole.device

    @property
    def block_size(self) -> int:
        """w: every block is w × w."""
        return self.whole.width

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Products inside belong together."""
        with self.whole.frozen():
            yield

    def _matmat(self, V: Tensor) -> Tensor:
        parts = self.whole.parts

        def product() -> Tensor:
            cut = V.split([part.size for part in parts])
            return torch.cat([self._part(part, own) for part, own in zip(parts, cut, strict=True)])

        return self.whole.divided(product, V)

    def _part(self, part: Part, V: Tensor) -> Tensor:
        """One column after the other, some positions at a time."""
        out = torch.empty_like(V)
        positions = sorted({t for _, t in part.tokens})
        step = self.whole.chunk or part.at_once(self.dtype)
        rows, places = torch.tensor(part.tokens).T
        for start in range(0, len(positions), step):
            some = torch.tensor(positions[start : start + step])
            chosen = torch.isin(places, some).nonzero().flatten()
            at = torch.searchsorted(some, places[chosen]), rows[chosen], places[chosen]
            for j in range(V.shape[1]):
                tokens = V[:, j].view(len(part.tokens), part.width)
                tangents = V.new_zeros(len(some), *part.shape)
                tangents[at] = tokens[chosen]
                found = self.whole.batch_product(part, tangents)
                out[:, j].view(len(part.tokens), part.width)[chosen] = found[at]
        return out

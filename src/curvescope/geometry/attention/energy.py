"""How much of what a head does on real text goes through each of its singular pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.geometry.attention.check import sphere_input
from curvescope.geometry.attention.heads import heads
from curvescope.geometry.factored import Factored
from curvescope.models.capture import capture
from curvescope.models.model import Model


@dataclass(frozen=True)
class Energy(Result):
    """Energy of singular pairs (s, u, v) on the states n that attention reads; rows end in nan.

    QK: s² ⟨(n · u)²⟩ Var(n · v), queries and keys taken apart; what all keys share moves no attention, so
    only their spread counts. VO: s² ⟨(n · u)²⟩, the pair's part of the mean square of what tokens would
    write. On a sphere filled evenly, of radius √d, both averages are 1 and the energy is s².
    """

    layer: int
    num_tokens: int
    qk: np.ndarray  # (H, r)
    vo: np.ndarray  # (H, r)

    def share(self, circuit: str) -> np.ndarray:
        """Each pair's part of its head's sum, for `qk` or `vo`: (H, r)."""
        energy = getattr(self, circuit)
        total = np.nansum(energy, axis=1, keepdims=True)
        return energy / np.where(total > 0, total, 1.0)


def activation_energy(
    model: Model,
    layer: int,
    inputs: Iterable[Tensor | Mapping[str, Tensor]],
    *,
    folded: bool = True,
    offset: float = 0.0,
) -> Energy:
    """Energy of all singular pairs of a layer on the tokens of `inputs`.

    Args:
        inputs: what the model is run on, a batch at a time.
        folded: which matrices, see `heads`.
        offset: query's position less the key's, for rotary positions.
    """
    own = heads(model, layer, folded=folded)
    total, moment, count = torch.zeros(()), torch.zeros(()), 0
    for batch in inputs:
        place = f"L{layer}.attn.in"
        x = capture(model, batch, place)[place].double().cpu()
        n = (sphere_input(model, layer, x) if own[0].folded else x).flatten(0, -2)
        total, moment, count = total + n.sum(0), moment + n.T @ n, count + len(n)
    if not count:
        raise UsageError("expected at least one batch of tokens, got none")
    mean, moment = total / count, moment / count
    spread = moment - mean[:, None] * mean
    qk = [c.qk if offset == 0 or c.rotary is None else c.qk_at(offset) for c in own]
    return Energy(
        layer,
        count,
        _padded([_energies(f, moment, spread) for f in qk]),
        _padded([_energies(c.vo, moment) for c in own]),
    )


def _energies(f: Factored, left: Tensor, right: Tensor | None = None) -> Tensor:
    """s² uᵀ L u vᵀ R v for every pair: (r,)."""
    energy = f.singular_values.square() * ((left @ f.left) * f.left).sum(0)
    return energy if right is None else energy * ((right @ f.right) * f.right).sum(0)


def _padded(rows: list[Tensor]) -> np.ndarray:
    found = np.full((len(rows), max((len(row) for row in rows), default=0)), np.nan)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row.numpy()
    return found

"""Share of each singular pair in the work of a head on real text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.geometry.attention.circuits import Circuit
from curvescope.geometry.attention.heads import heads
from curvescope.geometry.low_rank import Factored
from curvescope.geometry.roles import read_norm
from curvescope.geometry.sphere import unscale
from curvescope.models.capture import capture
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer


@dataclass(frozen=True)
class HeadCheck(Result):
    """Largest differences between a layer's circuits and what the model computed."""

    layer: int
    pattern_error: float  # of attention weights, at most 1 each
    output_error: float  # of what attention adds to the stream, over its largest entry
    num_heads: int
    folded: bool


def check_heads(
    model: Model, layer: int, inputs: Tensor | Mapping[str, Tensor], *, folded: bool = True
) -> HeadCheck:
    """Rebuild the attention of a layer from its circuits and compare it with the model's own.

    The sublayer's input, pattern and output are captured; the circuits get the input with γ and β taken
    away where they are folded. Positions that the model's pattern leaves out (masks, windows) are left out.
    """
    own = heads(model, layer, folded=folded)
    places = [f"L{layer}.attn.{place}" for place in ("in", "pattern", "out")]
    x, pattern, out = (capture(model, inputs, *places)[place].double().cpu() for place in places)
    n = sphere_input(model, layer, x) if own[0].folded else x
    found, patterns = torch.zeros_like(out), []
    extra = _score_bias(model, layer, x.shape[1])
    for i, circuit in enumerate(own):
        A = _pattern(model, circuit, n, pattern[:, i] != 0, None if extra is None else extra[i])
        patterns.append(A)
        found += A @ circuit.values(n)
    found += own[0].b_O
    return HeadCheck(
        layer,
        float((torch.stack(patterns, 1) - pattern).abs().max()),
        float((found - out).abs().max() / out.abs().max()),
        len(own),
        own[0].folded,
    )


def sphere_input(model: Model, layer: int, x: Tensor) -> Tensor:
    """n from what attention reads, x = γ ∘ n + β, in a model whose norm can be folded."""
    norm, _ = read_norm(model, layer)
    return unscale(x.double(), gamma=norm.gamma, beta=norm.beta, kind=norm.kind)


def _pattern(model: Model, circuit: Circuit, n: Tensor, seen: Tensor, bias: Tensor | None) -> Tensor:
    if model.facts.get("attention") == "linear":
        s = circuit.scores(n) if bias is None else circuit.scores(n) + bias
        return s.masked_fill(~seen, 0.0)
    return circuit.pattern(n, seen=seen, bias=bias)


def _score_bias(model: Model, layer: int, T: int) -> Tensor | None:
    """Bias that a zoo model adds to the scores by offset: (H, T, T)."""
    if not isinstance(model.module, Transformer) or model.module.cfg.score_bias == "none":
        return None
    module: Any = model.module.get_submodule(f"L{layer}")
    return module.score_bias(T).detach().double().cpu()


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

"""Energy of each singular pair of a head on real text, and a check of the circuits against the model."""

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
    """Largest differences between a layer's circuits and the model's own attention."""

    layer: int
    pattern_error: float  # of attention weights, at most 1 each
    output_error: float  # of attention's output, relative to its largest entry
    num_heads: int
    folded: bool


def check_heads(
    model: Model, layer: int, inputs: Tensor | Mapping[str, Tensor], *, folded: bool = True
) -> HeadCheck:
    """Rebuild the attention of a layer from its circuits and compare it with the model's own.

    `capture` records the sublayer's input, pattern and output. Folded circuits get the input without γ and β.
    The check skips positions where the model's pattern is zero (masks, windows).
    """
    circuits = heads(model, layer, folded=folded)
    places = [f"L{layer}.attn.{place}" for place in ("in", "pattern", "out")]
    x, pattern, out = (capture(model, inputs, *places)[place].double().cpu() for place in places)
    n = sphere_input(model, layer, x) if circuits[0].folded else x
    output, patterns = torch.zeros_like(out), []
    extra = _score_bias(model, layer, x.shape[1])
    for i, circuit in enumerate(circuits):
        A = _pattern(model, circuit, n, pattern[:, i] != 0, None if extra is None else extra[i])
        patterns.append(A)
        output += A @ circuit.values(n)
    output += circuits[0].b_O
    return HeadCheck(
        layer,
        float((torch.stack(patterns, 1) - pattern).abs().max()),
        float((output - out).abs().max() / out.abs().max()),
        len(circuits),
        circuits[0].folded,
    )


def sphere_input(model: Model, layer: int, x: Tensor) -> Tensor:
    """Return n from the input of attention, x = γ ∘ n + β, in a model whose norm can be folded."""
    norm, _ = read_norm(model, layer)
    return unscale(x.double(), gamma=norm.gamma, beta=norm.beta, kind=norm.kind)


def _pattern(model: Model, circuit: Circuit, n: Tensor, seen: Tensor, bias: Tensor | None) -> Tensor:
    if model.facts.get("attention") == "linear":
        s = circuit.scores(n) if bias is None else circuit.scores(n) + bias
        return s.masked_fill(~seen, 0.0)
    return circuit.pattern(n, seen=seen, bias=bias)


def _score_bias(model: Model, layer: int, T: int) -> Tensor | None:
    """Return the bias that a zoo model adds to the scores by offset: (H, T, T)."""
    if not isinstance(model.module, Transformer) or model.module.cfg.score_bias == "none":
        return None
    module: Any = model.module.get_submodule(f"L{layer}")
    return module.score_bias(T).detach().double().cpu()


@dataclass(frozen=True)
class Energy(Result):
    """Energy of singular pairs (s, u, v) on the states n that attention reads; rows end in nan.

    QK: s² ⟨(n · u)²⟩ Var(n · v). A part that all keys share does not change attention, so keys enter with
    their variance. VO: s² ⟨(n · u)²⟩, the pair's part of the mean square of the values. For states that are
    uniform on the sphere of radius √d, both averages are 1 and the energy is s².
    """

    layer: int
    num_tokens: int
    qk: np.ndarray  # (H, r)
    vo: np.ndarray  # (H, r)

    def share(self, circuit: str) -> np.ndarray:
        """Return each pair's share of its head's sum, for `qk` or `vo`: (H, r)."""
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
    """Measure the energy of all singular pairs of a layer on the tokens of `inputs`.

    Args:
        inputs: batches of inputs of the model.
        folded: fold the norm into the matrices, see `heads`.
        offset: position of the query minus that of the key, for rotary positions.
    """
    circuits = heads(model, layer, folded=folded)
    sums, moment, count = torch.zeros(()), torch.zeros(()), 0
    for batch in inputs:
        place = f"L{layer}.attn.in"
        x = capture(model, batch, place)[place].double().cpu()
        n = (sphere_input(model, layer, x) if circuits[0].folded else x).flatten(0, -2)
        sums, moment, count = sums + n.sum(0), moment + n.T @ n, count + len(n)
    if not count:
        raise UsageError("expected at least one batch of tokens, got none")
    mean, moment = sums / count, moment / count
    covariance = moment - mean[:, None] * mean
    qk = [c.qk if offset == 0 or c.rotary is None else c.qk_at(offset) for c in circuits]
    return Energy(
        layer,
        count,
        _padded([_energies(f, moment, covariance) for f in qk]),
        _padded([_energies(c.vo, moment) for c in circuits]),
    )


def _energies(f: Factored, left: Tensor, right: Tensor | None = None) -> Tensor:
    """Return s² uᵀ L u vᵀ R v for every pair: (r,)."""
    energy = f.singular_values.square() * ((left @ f.left) * f.left).sum(0)
    return energy if right is None else energy * ((right @ f.right) * f.right).sum(0)


def _padded(rows: list[Tensor]) -> np.ndarray:
    table = np.full((len(rows), max((len(row) for row in rows), default=0)), np.nan)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row.numpy()
    return table

"""The self check: the circuits of a layer against the model's own attention on real inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvescope.core.result import Result
from curvescope.geometry.attention.circuits import Circuit
from curvescope.geometry.attention.heads import heads
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
    """What a zoo model adds to the scores by offset: (H, T, T)."""
    if not isinstance(model.module, Transformer) or model.module.cfg.score_bias == "none":
        return None
    module: Any = model.module.get_submodule(f"L{layer}")
    return module.score_bias(T).detach().double().cpu()

"""The attention layers of a zoo Transformer in closed form, at its weights and data.

    head = attention_curvature(model, batch, layer=1, head=0)   # exact blocks of W_Q, W_K, W_V, W_O
    attention_moments(model, inputs, layer=1)                   # M₁, M₂, M₃ of its real attention

A batch is a `Batch`, `Batches` or a pair (inputs, targets), with sequences of one length. The loss is divided
once by the number of terms, as in a `Problem`, so that blocks are those of `cs.Hessian` over the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvescope.closed_form.attention.hessian import AttentionCurvature, Pair, Split
from curvescope.closed_form.attention.layer import AttentionOptions, make_layer, rope_table
from curvescope.closed_form.attention.rest import (
    LIMIT,
    Rest,
    as_transformer,
    capture,
    check_lengths,
    make_problem,
    rest_of_model,
)
from curvescope.closed_form.softmax import moments
from curvescope.core.errors import UsageError
from curvescope.core.parts import MatrixName
from curvescope.losses import Loss
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.problem import Problem


def attention_curvature(
    model: Any,
    batch: Any,
    layer: int,
    *,
    loss: str | Loss = "cross_entropy",
    head: int | None = None,
    curvature: MatrixName = "hessian",
    limit: int = LIMIT,
) -> AttentionCurvature:
    """Second derivatives of a zoo model's loss in the weights of one attention layer.

    With F the output of the layer's attention, J = ∂F/∂weights, G = ∂L/∂F and B = ∂²L/∂F², the Hessian over
    the weights is JᵀBJ + Σ G ∂²F. These are its parts `outer` and `functional` **with respect to F**, not to
    the outputs of the model: B is the Hessian of everything behind F and need not be positive. `curvature`
    says which B is meant:

        hessian     ∂²L/∂F²: the total is the block of the model's Hessian.
        ggn         its GGN: `outer` is the block of the model's GGN.
        functional  the difference of the two: the total is the block of the model's functional Hessian.

    `functional` is Σ G ∂²F, the layer's own, for all three. Weights are called Q, K, V, O and b_Q, … (QK if
    merged), whether of all heads or of one.

    Args:
        model: a zoo Transformer, or what `load` makes one of.
        head: only the weights of this head; the others stay as they are.
        limit: refuse sequences with more than this many entries L·d of F. B costs L·d passes through the rest
            of the network, and (L d)² numbers per sequence.
    """
    problem = make_problem(model, batch, loss)
    module = as_transformer(problem.model)
    _check(module.cfg, layer, head)
    weights = _weights(problem.model, layer, head)
    X, G, B = _rest(problem, layer, curvature, limit)
    h, h_kv = (module.cfg.n_heads, module.cfg.kv_heads) if head is None else (1, 1)
    options = _options(module, layer, head, X)
    return AttentionCurvature(make_layer(X, weights, G, B, num_heads=h, num_kv_heads=h_kv, **options))


def attention_blocks(
    model: Any,
    batch: Any,
    layer: int,
    *,
    loss: str | Loss = "cross_entropy",
    head: int | None = None,
    curvature: MatrixName = "hessian",
    pairs: Sequence[Pair] | None = None,
    limit: int = LIMIT,
) -> dict[Pair, Split]:
    """Dense blocks [a, c, b, e] of an attention layer in two parts: all of them, or the `pairs` asked for.

    Other arguments, and what the parts mean: `attention_curvature`. The block of two weights with m and m′
    entries takes 2 m m′ numbers.
    """
    found = attention_curvature(model, batch, layer, loss=loss, head=head, curvature=curvature, limit=limit)
    return found.blocks() if pairs is None else {pair: found.split(pair) for pair in pairs}


def attention_moments(
    model: Any, inputs: Tensor, layer: int, *, head: int | None = None
) -> moments.AttentionMoments:
    """M₁, M₂, M₃ of a layer's inputs under its own attention weights: (n, h, L, d), (…, d, d), (…, d, d, d).

    With `head` the axis h has length one. M₃ holds n h L d³ numbers.
    """
    model = load(model)
    module = as_transformer(model)
    _check(module.cfg, layer, head)
    inputs = inputs.to(model.device, model.dtype if inputs.is_floating_point() else None)
    X, A = capture(module, inputs, f"L{layer}.attn.in", f"L{layer}.attn.pattern")
    return moments.attention_moments(A if head is None else A[:, head : head + 1], X[:, None])


def _rest(problem: Problem, layer: int, curvature: MatrixName, limit: int) -> Rest:
    """X, G and B of all batches, divided by the number of terms."""
    found = [
        rest_of_model(problem, part, layer, curvature=curvature, limit=limit)
        for part in problem.placed_batches("attention curvature")
    ]
    check_lengths([part.X for part in found])
    X, G, B = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Rest(X, G / problem.num_terms, B / problem.num_terms)


def _check(cfg: TransformerConfig, layer: int, head: int | None) -> None:
    if not 0 <= layer < cfg.n_layers:
        raise UsageError(f"expected a layer from 0 to {cfg.n_layers - 1}, got {layer}")
    if head is not None and not 0 <= head < cfg.n_heads:
        raise UsageError(f"expected a head from 0 to {cfg.n_heads - 1}, got {head}")


def _weights(model: Model, layer: int, head: int | None) -> dict[str, Tensor | None]:
    """The layer's weights, or one head's, by the closed form's names."""
    cfg = as_transformer(model).cfg
    if head is not None and cfg.kv_heads != cfg.n_heads:
        raise UsageError(
            f"head {head} shares its keys and values with others and has no blocks of its own",
            hint="head=None gives those of the layer, heads side by side",
        )
    if head is None and cfg.merged_qk and cfg.n_heads > 1:
        raise UsageError(
            f"expected a head from 0 to {cfg.n_heads - 1} of a model with merged_qk, got None",
            hint="the closed form of merged scores is that of one head",
        )
    blocks, start = (model.blocks, f"L{layer}.") if head is None else (model.heads, f"L{layer}.h{head}.")
    found: dict[str, Tensor | None] = {}
    for role in ("W_Q", "b_Q", "W_QK", "W_K", "b_K", "W_V", "b_V", "W_O", "b_O"):
        if start + role in blocks:
            block = blocks[start + role]
            found[role.removeprefix("W_")] = block.take(model.get_parameter(block.parameter).detach())
    return found


def _options(module: Transformer, layer: int, head: int | None, X: Tensor) -> AttentionOptions:
    """What a layer is besides its weights, on the tokens X (n, L, d)."""
    cfg, L = module.cfg, X.shape[1]
    options: AttentionOptions = {"kind": cfg.attention, "scale": cfg.head_size**-0.5}
    if cfg.causal:
        options["mask"] = torch.ones(L, L, dtype=torch.bool, device=X.device).tril()
    if cfg.score_bias != "none":
        with torch.no_grad():
            table = module.get_submodule(f"L{layer}").score_bias(L)  # pyright: ignore[reportCallIssue]
        options["bias"] = table if head is None else table[head]
    if cfg.positions == "rope":
        cos, sin = rope_table(L, cfg.head_size, base=cfg.rope_base, dtype=X.dtype)
        options["rope"] = (cos.to(X.device), sin.to(X.device))
    return options

"""The attention layers of a zoo Transformer in closed form, at its weights and data.

    head = attention_curvature(model, batch, layer=1, head=0)   # exact blocks of W_Q, W_K, W_V, W_O
    attention_moments(model, inputs, layer=1)                   # M₁, M₂, M₃ of its real attention

A batch is a `Batch`, `Batches` or a pair (inputs, targets), with sequences of one length. The loss is divided
once by the number of terms, as in a `Problem`, so that blocks are those of `cs.Hessian` over the same data.

The loss enters through G = ∂L/∂F and B = ∂²L/∂F² in the layer's output F. Autograd computes them; this is the
only use of autograd in this package. Norms and later layers couple all tokens of a sequence, so B is an
(L d) × (L d) matrix per sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from curvescope.closed_form import softmax
from curvescope.closed_form.attention.hessian import AttentionCurvature, BlockParts, Pair
from curvescope.closed_form.attention.layer import AttentionOptions, make_layer, rope_table
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.hessian_terms import MatrixName
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.losses import Loss
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.running.patching import evaluating
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.problem import Problem

LIMIT = 2048  # entries L d of one sequence's attention output; B holds their square
GROUP = 64  # directions that are differentiated through the later layers at once


class LayerDerivatives(NamedTuple):
    """Inputs of a layer's attention, and derivatives of the summed loss in its output."""

    X: Tensor  # (n, L, d)
    G: Tensor  # (n, L, d)
    B: Tensor  # (n, L, d, L, d)


def make_problem(model: Any, batch: Any, loss: str | Loss) -> Problem:
    """Return the problem of a `Batch`, of `Batches`, or of a pair (inputs, targets)."""
    return Problem(model, Batches([batch]) if isinstance(batch, Batch) else batch, loss)


def check_lengths(parts: Sequence[Tensor]) -> None:
    """Raise unless all batches have one shape after their first axis."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise ShapeError(
            f"expected batches of sequences of one length, got {' and '.join(map(str, sorted(shapes)))}",
            hint="give one batch at a time",
        )


def layer_derivatives(
    problem: Problem, batch: Batch, layer: int, *, curvature: MatrixName = "hessian", limit: int = LIMIT
) -> LayerDerivatives:
    """Return X, G and B of one placed batch, not divided by the number of terms.

    B is the Hessian of the later layers, their GGN Jᵀ (∂²ℓ/∂z²) J with J = ∂z/∂F, or the difference
    (`functional`). It takes L·d passes through the later layers, for all sequences at once.
    """
    if curvature not in get_args(MatrixName):
        raise UsageError(f"expected curvature of {', '.join(get_args(MatrixName))}, got {curvature!r}")
    module = as_transformer(problem.model)
    X, F = capture(module, batch.inputs, f"L{layer}.attn.in", f"L{layer}.attn.out")
    _check_size(F, limit)
    with torch.inference_mode(False), torch.enable_grad():
        F = F.clone().requires_grad_()
        with evaluating(module):
            z = _with_output(module, layer, F)(batch.inputs)
        s = problem.loss.sum(z, batch.targets, batch.weights)
        (G,) = torch.autograd.grad(s, F, create_graph=True)
        _refuse_coupled(lambda V: _pull(G, F, V), F)
        B = torch.zeros((), dtype=F.dtype, device=F.device)
        if curvature != "ggn":
            B = _dense(lambda V: _pull(G, F, V), F)
        if curvature != "hessian":
            part = _dense(_gauss_newton(problem, batch, z, F), F)
            B = part if curvature == "ggn" else B - part
    return LayerDerivatives(X, G.detach(), B)


def as_transformer(model: Model) -> Transformer:
    """Return the zoo Transformer in a model, or raise UsageError."""
    if not isinstance(model.module, Transformer):
        raise UsageError(
            f"expected a zoo Transformer, got a {type(model.module).__name__}",
            hint="cs.Hessian(problem).block(…) takes any module",
        )
    return model.module


def capture(module: Transformer, inputs: Any, *places: str) -> list[Tensor]:
    """Record the model's tensors at the given places, such as 'L0.attn.pattern'."""
    tensors: dict[str, Tensor] = {}

    def record(place: str, tensor: Tensor) -> None:
        if place in places:
            tensors[place] = tensor

    with evaluating(module), torch.no_grad():
        module(inputs, record)
    return [tensors[place] for place in places]


def _with_output(module: Transformer, layer: int, F: Tensor) -> Transformer:
    """Return the model with F as the output of the layer's attention; it shares all else with `module`."""
    name = f"L{layer}"
    changed, block = copy.copy(module), copy.copy(module.get_submodule(name))
    object.__setattr__(block, "attend", lambda x, record: F)
    object.__setattr__(changed, "_modules", {**module._modules, name: block})
    return changed


def _gauss_newton(problem: Problem, batch: Batch, z: Tensor, F: Tensor) -> Callable[[Tensor], Tensor]:
    """V ↦ Jᵀ (∂²ℓ/∂z²) J V for directions V (k, n, L, d)."""
    u = torch.zeros_like(z, requires_grad=True)
    (pulled,) = torch.autograd.grad(z, F, u, create_graph=True)  # Jᵀu, whose derivative in u is J

    def product(V: Tensor) -> Tensor:
        dz = _pull(pulled, u, V)
        return _pull(z, F, problem.loss.hessian_product(z.detach(), batch.targets, batch.weights, dz))

    return product


def _dense(product: Callable[[Tensor], Tensor], F: Tensor) -> Tensor:
    """Return the matrix of each sequence, (n, L, d, L, d): one direction serves all sequences."""
    n, L, d = F.shape
    eye = torch.eye(L * d, dtype=F.dtype, device=F.device).reshape(L * d, 1, L, d)
    rows = [product(part.expand(-1, n, -1, -1)) for part in eye.split(GROUP)]
    return torch.cat(rows).unflatten(0, (L, d)).permute(2, 0, 1, 3, 4)


def _pull(source: Tensor, leaf: Tensor, cotangents: Tensor) -> Tensor:
    """Return the gradients of ⟨cotangent, source⟩ in a leaf, for k cotangents: (k, *leaf.shape)."""
    zeros = torch.zeros(len(cotangents), *leaf.shape, dtype=leaf.dtype, device=leaf.device)
    if not source.requires_grad:
        return zeros
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    try:
        (gradients,) = torch.autograd.grad(source, leaf, cotangents, is_grads_batched=True, **options)
    except RuntimeError:  # an operation of a custom loss without a rule for batches
        parts = [torch.autograd.grad(source, leaf, c, **options)[0] for c in cotangents]
        gradients = None if parts[0] is None else torch.stack(parts)
    return zeros if gradients is None else gradients


def _check_size(F: Tensor, limit: int) -> None:
    L, d = F.shape[1:]
    if L * d > limit:
        raise UsageError(
            f"expected at most {limit} entries of attention output per sequence, got {L} · {d} = {L * d}",
            hint="use shorter sequences, a larger limit=, or cs.Hessian(problem).block(…), which forms none",
        )


def _refuse_coupled(product: Callable[[Tensor], Tensor], F: Tensor) -> None:
    """Raise if a change of the first sequence changes the gradient of another."""
    if F.shape[0] < 2:
        return
    V = torch.zeros(1, *F.shape, dtype=F.dtype, device=F.device)
    V[0, 0] = torch.randn(F.shape[1:], generator=generator(0), dtype=torch.float64).to(F)
    changes = product(V)[0].flatten(1).abs().amax(1)
    if bool((changes[1:] > 1e-6 * changes[0]).any()):
        raise UsageError(
            "expected a loss that is a sum over sequences, but it couples those of a batch",
            hint="give batches of one sequence each",
        )


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
    """Return the second derivatives of a zoo model's loss in the weights of one attention layer.

    With F the output of the layer's attention, J = ∂F/∂weights, G = ∂L/∂F and B = ∂²L/∂F², the Hessian over
    the weights is JᵀBJ + Σ G ∂²F. These are its parts `outer` and `functional` **with respect to F**, not to
    the outputs of the model: B is the Hessian of the later layers and need not be positive. `curvature`
    selects B:

        hessian     ∂²L/∂F²: the total is the block of the model's Hessian.
        ggn         its GGN: `outer` is the block of the model's GGN.
        functional  the difference of the two: the total is the block of the model's functional Hessian.

    `functional` is Σ G ∂²F, the layer's own, for all three. Weights are called Q, K, V, O and b_Q, … (QK if
    merged), whether of all heads or of one.

    Args:
        model: a zoo Transformer, or a source that `load` accepts.
        head: only the weights of this head; the others stay as they are.
        limit: raise for sequences with more than this many entries L·d of F. B costs L·d passes through the
            later layers, and (L d)² numbers per sequence.
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
) -> dict[Pair, BlockParts]:
    """Return dense blocks [a, c, b, e] of an attention layer in two parts: all blocks, or some `pairs`.

    `attention_curvature` explains the other arguments and the parts. The block of two weights with m and m′
    entries takes 2 m m′ numbers.
    """
    curvature_ = attention_curvature(
        model, batch, layer, loss=loss, head=head, curvature=curvature, limit=limit
    )
    return curvature_.blocks() if pairs is None else {pair: curvature_.split(pair) for pair in pairs}


def attention_moments(
    model: Any, inputs: Tensor, layer: int, *, head: int | None = None
) -> softmax.AttentionMoments:
    """Return M₁, M₂, M₃ of a layer's inputs under its attention: (n, h, L, d), (…, d, d), (…, d, d, d).

    With `head` the axis h has length one. M₃ holds n h L d³ numbers.
    """
    model = load(model)
    module = as_transformer(model)
    _check(module.cfg, layer, head)
    inputs = inputs.to(model.device, model.dtype if inputs.is_floating_point() else None)
    X, A = capture(module, inputs, f"L{layer}.attn.in", f"L{layer}.attn.pattern")
    return softmax.attention_moments(A if head is None else A[:, head : head + 1], X[:, None])


def _rest(problem: Problem, layer: int, curvature: MatrixName, limit: int) -> LayerDerivatives:
    """Return X, G and B of all batches, divided by the number of terms."""
    by_batch = [
        layer_derivatives(problem, part, layer, curvature=curvature, limit=limit)
        for part in problem.placed_batches("attention curvature")
    ]
    check_lengths([part.X for part in by_batch])
    X, G, B = (torch.cat(parts) for parts in zip(*by_batch, strict=True))
    return LayerDerivatives(X, G / problem.num_terms, B / problem.num_terms)


def _check(cfg: TransformerConfig, layer: int, head: int | None) -> None:
    if not 0 <= layer < cfg.n_layers:
        raise UsageError(f"expected a layer from 0 to {cfg.n_layers - 1}, got {layer}")
    if head is not None and not 0 <= head < cfg.n_heads:
        raise UsageError(f"expected a head from 0 to {cfg.n_heads - 1}, got {head}")


def _weights(model: Model, layer: int, head: int | None) -> dict[str, Tensor | None]:
    """Return the weights of the layer or of one head, by the closed form's names."""
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
    weights: dict[str, Tensor | None] = {}
    for role in ("W_Q", "b_Q", "W_QK", "W_K", "b_K", "W_V", "b_V", "W_O", "b_O"):
        if start + role in blocks:
            block = blocks[start + role]
            weights[role.removeprefix("W_")] = block.take(model.get_parameter(block.parameter).detach())
    return weights


def _options(module: Transformer, layer: int, head: int | None, X: Tensor) -> AttentionOptions:
    """Return the options of a layer on the tokens X (n, L, d)."""
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

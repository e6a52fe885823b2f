"""A zoo Transformer in closed form: the whole network, or its attention layers.

    stack_curvature(model, batch).hessian()                     # every block of the network
    attention_curvature(model, batch, layer=1, head=0)          # those of one layer or head

A batch is a `Batch`, `Batches` or a pair (inputs, targets), with sequences of one length. The loss is divided
once by the number of terms, as in a `Problem`, so that blocks are those of `cs.Hessian` over the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvescope.closed_form.attention.model_layer import (
    as_transformer,
    attention_blocks,
    attention_curvature,
    attention_moments,
    check_lengths,
    make_problem,
)
from curvescope.closed_form.network.block import Architecture
from curvescope.closed_form.network.stack import StackCurvature, stack_tape
from curvescope.closed_form.objectives import OutputObjective
from curvescope.core.errors import UsageError
from curvescope.data.batches import Batch
from curvescope.losses import Loss
from curvescope.models.zoo.transformer import TransformerConfig
from curvescope.problem import Problem

__all__ = [
    "architecture",
    "attention_blocks",
    "attention_curvature",
    "attention_moments",
    "stack_curvature",
]


def stack_curvature(model: Any, batch: Any, loss: str | Loss = "cross_entropy") -> StackCurvature:
    """Return the network in closed form: Hessian, GGN, sources and products, by the names of its blocks.

    The function accepts every zoo Transformer that `architecture` supports.
    """
    problem = make_problem(model, batch, loss)
    cfg = as_transformer(problem.model).cfg
    arch, parts = architecture(cfg), list(problem.placed_batches("stack curvature"))
    inputs = [_stream_inputs(part.inputs, cfg) for part in parts]
    check_lengths(inputs)
    tape = stack_tape(dict(problem.model.named_parameters()), torch.cat(inputs), arch)
    return StackCurvature(tape, lambda z: _objective(problem, parts, z))


def architecture(cfg: TransformerConfig) -> Architecture:
    """Return the architecture of a zoo configuration; raise UsageError for unsupported settings."""
    supported = {"positions": ("learned", "none"), "merged_qk": (False,), "score_bias": ("none",)}
    for name, values in supported.items():
        if getattr(cfg, name) not in values:
            expected = " or ".join(map(repr, values))
            raise UsageError(
                f"expected {name} of {expected} for a closed form of the network, got {getattr(cfg, name)!r}",
                hint="attention_curvature takes single layers of this model, cs.Hessian all of it",
            )
    return Architecture(
        num_heads=cfg.n_heads,
        norm=cfg.norm,
        norm_kind=cfg.norm_kind,
        norm_eps=cfg.norm_eps,
        activation=cfg.activation,
        attention=cfg.attention,
        causal=cfg.causal,
        residual=cfg.residual,
        residual_scale=cfg.residual_scale,
        tied=cfg.tied,
        pooled=cfg.outputs == "class",
    )


def _stream_inputs(inputs: Any, cfg: TransformerConfig) -> Tensor:
    """Return tokens or real inputs (B, T, ·), and images as rows of patches."""
    if cfg.inputs != "patches":
        return inputs
    return torch.nn.functional.unfold(inputs, cfg.patch_size, stride=cfg.patch_size).transpose(1, 2)


def _objective(problem: Problem, parts: Sequence[Batch], z: Tensor) -> OutputObjective:
    """Return the problem's loss at the concatenated outputs of all its batches."""
    counts, N, loss = [part.num_sequences for part in parts], problem.num_terms, problem.loss
    pieces = list(zip(z.split(counts), parts, strict=True))

    def product(u: Tensor) -> Tensor:
        axis = u.dim() - z.dim()
        products = [
            loss.hessian_product(at, part.targets, part.weights, v)
            for (at, part), v in zip(pieces, u.split(counts, dim=axis), strict=True)
        ]
        return torch.cat(products, dim=axis) / N

    value = torch.stack([loss.sum(at, part.targets, part.weights) for at, part in pieces]).sum() / N
    gradient = torch.cat([loss.gradient(at, part.targets, part.weights) for at, part in pieces]) / N
    return OutputObjective(value, gradient, product)

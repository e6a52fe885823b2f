"""The norms of all blocks of a sweep at one scale: exact where that is cheap, from probes elsewhere.

Exact: networks of one layer, the last layer of deeper ones, and MLPs, for which H_l = 2 X_lᵀX_l ⊗ C_l C_lᵀ
with X_l the input of layer l and C_l the product of the weights behind it. Inner layers of Transformers are
estimated by ‖A‖² ≈ mean ‖A v‖² over Rademacher probes v, the same for H, H_o and H_f.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.attention.block_norms import HeadNorms
from curvescope.closed_form.network.one_head.inner import Block, Suffix, suffix
from curvescope.closed_form.network.one_head.layers import Task, forward, last_blocks, pre_norm_blocks
from curvescope.core.parts import PART_OF, Symbol
from curvescope.papers.ormaniec2025.growth.draws import Source
from curvescope.papers.ormaniec2025.growth.settings import PARTS, VOCABULARY

SCORED = slice(11, 17)  # the positions that predict a digit of the sum
Norms = dict[tuple[str, Symbol, int], tuple[Tensor, Tensor]]
"""Norm and its standard error over probes, by block, part and layer."""


def measure(
    source: Source, index: int, weights: dict[str, Tensor], tokens: Tensor, *, probes: int, exact: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Norms and standard errors at scale number `index`, in the order of the experiment's rows.

    Args:
        exact: the last layer in closed form; without, it is estimated from probes too, as in the paper.
    """
    experiment = source.experiment
    E, P = source.embeddings(index)
    if experiment.family == "mlp":
        found = _mlp(E[tokens[:, SCORED]].flatten(0, 1), weights, experiment.depth)
    else:
        found = _transformer(source, index, embed(E, P, tokens), weights, tokens, probes, exact)
    values = torch.stack([torch.stack(found[row]) for row in experiment.rows]).cpu().numpy()
    return values[:, 0], values[:, 1]


def embed(E: Tensor, P: Tensor, tokens: Tensor) -> Tensor:
    """The stream before the first layer, of the tokens that can reach the loss: (n, 17, d)."""
    return (E[tokens] + P[: tokens.shape[1]])[:, : SCORED.stop]


def _transformer(
    source: Source,
    index: int,
    x: Tensor,
    weights: dict[str, Tensor],
    tokens: Tensor,
    probes: int,
    exact: bool,
) -> Norms:
    experiment = source.experiment
    last, linear = experiment.depth - 1, experiment.family == "linear"
    task = Task(tokens, "mse" if linear else "ce", SCORED, VOCABULARY)
    if experiment.norm == "pre":
        return _last(pre_norm_blocks(x, weights, task), source, index, probes, exact)
    kind, skip = ("linear", 0.0) if linear else ("softmax", 1.0)
    layers = forward(x, weights, experiment.depth, kind=kind, skip=skip, scored=SCORED)
    found = _last(last_blocks(layers[-1], weights["U"], task), source, index, probes, exact)
    if last:
        behind = suffix(layers, weights["U"], task)
        for layer in range(last):
            for block in ("W_Q", "W_V"):
                found |= _inner(behind, source, index, layer, block, probes)
    return found


def _last(head: HeadNorms, source: Source, index: int, probes: int, exact: bool) -> Norms:
    """The last layer, whose blocks are sums of Kronecker products."""
    last, found = source.experiment.depth - 1, Norms()
    for block in source.experiment.blocks:
        terms = head.block("V" if block == "W_V" else "Q")
        norms = terms.norms() if exact else None
        for part in PARTS:
            if norms is not None:
                value = getattr(norms, PART_OF[part])
                found[block, part, last] = value, torch.zeros_like(value)
            else:
                V = source.probes(index, last, block, part, probes)
                found[block, part, last] = estimate(terms.product(V, PART_OF[part]))
    return found


def _inner(behind: Suffix, source: Source, index: int, layer: int, block: Block, probes: int) -> Norms:
    if source.replay:  # each part has its own probes
        products = {
            part: behind.products(
                layer, block, source.probes(index, layer, block, part, probes), [PART_OF[part]]
            )[0]
            for part in PARTS
        }
    else:
        V = source.probes(index, layer, block, "H", probes)
        outer, functional = behind.products(layer, block, V, ["outer", "functional"])
        products = {"H_o": outer, "H_f": functional, "H": outer + functional}
    return {(block, part, layer): estimate(products[part]) for part in PARTS}


def estimate(products: Tensor) -> tuple[Tensor, Tensor]:
    """√ mean ‖A v‖² over probes, (k, d, d), and its standard error by the delta method."""
    squares = products.square().sum((1, 2))
    norm = squares.mean().sqrt()
    if len(squares) == 1:
        return norm, torch.full_like(norm, math.nan)
    spread = squares.std() / math.sqrt(len(squares))
    return norm, torch.where(norm > 0, spread / (2 * norm).clamp_min(torch.finfo(norm.dtype).tiny), 0.0)


def _mlp(x: Tensor, weights: dict[str, Tensor], depth: int) -> Norms:
    """‖H_l‖ = 2 ‖X_lᵀX_l‖ ‖C_lᵀC_l‖, and H_f = 0."""
    behind = [torch.eye(weights[f"W_{depth}"].shape[1]).to(x)]
    for layer in range(depth, 1, -1):
        behind.append(weights[f"W_{layer}"] @ behind[-1])
    found, zero = Norms(), x.new_zeros(())
    for layer, C in enumerate(reversed(behind)):
        norm = 2 * torch.linalg.norm(x.T @ x) * torch.linalg.norm(C.T @ C)
        found |= {("W", part, layer): (zero if part == "H_f" else norm, zero) for part in PARTS}
        x = x @ weights[f"W_{layer + 1}"]
    return found

"""Influence of every training sequence on the loss of a query, by one linear system for each query.

The training loss is L = Σ_i (N_i/N) ℓ_i over sequences i of N_i terms each, N in all. Without sequence i, the
others weighing what they did, its minimum moves by (N_i/N) (∇²L)⁻¹ ∇ℓ_i to first order.
With the GGN H_o of L for ∇²L, and a damping δ, the loss of a query q therefore changes by about

    s_i = (N_i/N) ∇ℓ_qᵀ (H_o + δ I)⁻¹ ∇ℓ_i.

So s_i > 0 says that sequence i has helped: without it the query's loss is higher. The influence function of
the literature (Koh & Liang 2017), the slope in the weight of sequence i, is −∇ℓ_qᵀ (H_o + δ I)⁻¹ ∇ℓ_i.

x = (H_o + δ I)⁻¹ ∇ℓ_q is solved for once. Its residual r bounds the error of every score, because no
eigenvalue of H_o + δ I is below δ: |s_i − s̃_i| ≤ (N_i/N) ‖r‖ ‖∇ℓ_i‖ / δ. Rounding comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from curvescope.algorithms import solve
from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.operators import GGN, per_sample
from curvescope.problem import Problem

EngineName = Literal["auto", "fast", "autograd"]


@dataclass(frozen=True)
class Scores(Result):
    """s_i of S sequences for one query, at D dampings."""

    damping: np.ndarray  # (D,) δ
    values: np.ndarray  # (D, S) s_i
    error: np.ndarray  # (D, S) bound by the residual
    sequences: np.ndarray  # (S,) which sequence of the data
    shares: np.ndarray  # (S,) N_i/N
    residual: np.ndarray  # (D,) ‖∇ℓ_q − (H_o + δ I) x‖ / ‖∇ℓ_q‖
    converged: np.ndarray  # (D,)
    num_products: np.ndarray  # (D,)
    query_loss: float


def score(
    problem: Problem,
    query: Problem,
    *blocks: str,
    dampings: Sequence[float],
    tol: float | None = None,
    max_products: int | None = None,
    chunk: int | None = None,
    engine: EngineName = "auto",
    checkpoint: bool = False,
) -> Scores:
    """s_i of every sequence of `problem` for the loss of `query`, a problem of the same model.

    Memory: a vector over the blocks for each damping, and the gradients of as many sequences as go through
    the model together.

    Args:
        blocks: the parameters that are taken to move, by globs; all without one.
        dampings: δ, each above 0.
        tol: relative residual that counts as converged; 1e-8 in float64, 1e-4 in float32.
        max_products: most products for one system.
        chunk: sequences whose gradients are taken at once; by default what memory takes.
    """
    if not len(dampings) or any(not d > 0 for d in dampings):
        raise UsageError(f"expected dampings above 0, got {list(dampings)}")
    if query.model is not problem.model:
        raise UsageError("expected a query of the same model, got one of another")
    G = GGN(problem, *blocks, engine=engine, checkpoint=checkpoint)
    b = query.gradient(*blocks)
    found = [solve(G, b, damping=float(d), tol=tol, max_products=max_products) for d in dampings]
    X = torch.stack([one.x for one in found], dim=1)
    samples = per_sample(problem, *blocks, chunk=chunk)
    products, lengths = [], []
    for _, gradients in samples.gradient_parts():
        products.append((gradients @ X).double().cpu())
        lengths.append(gradients.double().norm(dim=1).cpu())
    delta, residual = np.array(dampings, dtype=float), np.array([float(one.residual) for one in found])
    bound = residual * float(b.double().norm()) / delta
    return Scores(
        damping=delta,
        values=torch.cat(products).numpy().T * samples.shares,
        error=bound[:, None] * torch.cat(lengths).numpy() * samples.shares,
        sequences=samples.sequences,
        shares=samples.shares,
        residual=residual,
        converged=np.array([one.converged for one in found]),
        num_products=np.array([one.num_products for one in found]),
        query_loss=query.loss_value(),
    )

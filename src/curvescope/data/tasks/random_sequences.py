"""Random sequences: a Markov chain, whose entropy rate is the smallest loss, and Gaussian inputs."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator
from curvescope.data.batches import Batches
from curvescope.data.tasks.checks import check_choice, check_counts, check_not_negative


def markov(
    *,
    num_sequences: int = 64,
    length: int = 32,
    vocab: int = 8,
    concentration: float = 0.5,
    seed: int = 0,
    sample_seed: int | None = None,
    batch_size: int | None = None,
) -> Batches:
    """Chains s₀ … s_L over the letters 0 … vocab − 1; inputs s₀ … s_{L−1}, targets s₁ … s_L, all count.

    The transition matrix P is `markov_transitions(vocab, concentration=…, seed=seed)`; s₀ is drawn from its
    stationary distribution, so at every position the expected loss of P itself is `markov_entropy_rate(P)`;
    no model has a smaller loss. Construction: P from `seed`; the chains from one generator with `sample_seed`
    (None: `seed`), by inverting the cumulative sums of the rows at rand(n), step by step. Another
    `sample_seed` gives more text of the same language.
    """
    check_counts(num_sequences=num_sequences, length=length)
    P = markov_transitions(vocab, concentration=concentration, seed=seed)
    source = generator(seed if sample_seed is None else sample_seed)
    cumulative = P.cumsum(1)
    state = _invert(stationary_distribution(P).cumsum(0).expand(num_sequences, -1), source)
    chain = [state]
    for _ in range(length):
        state = _invert(cumulative[state], source)
        chain.append(state)
    tokens = torch.stack(chain, dim=1)
    return Batches.from_tensors(tokens[:, :-1], tokens[:, 1:], batch_size=batch_size, name="markov")


def markov_transitions(vocab: int, *, concentration: float = 0.5, seed: int = 0) -> Tensor:
    """Draw a transition matrix P (V, V) in float64 with rows Dirichlet(concentration, …, concentration).

    NumPy's `default_rng(seed)` draws it; a small concentration gives rows with few likely letters.
    """
    check_counts(vocab=vocab)
    check_not_negative(concentration=concentration)
    if concentration < 0.01:
        raise UsageError(f"expected a concentration of at least 0.01, got {concentration}")
    rows = np.random.default_rng(seed & 0xFFFFFFFF).dirichlet(
        np.full(vocab, float(concentration)), size=vocab
    )
    return torch.from_numpy(rows)


def stationary_distribution(P: Tensor) -> Tensor:
    """Return π (V,) with π P = π and Σ π = 1."""
    V = P.shape[0]
    A = torch.cat([P.T - torch.eye(V, dtype=P.dtype), torch.ones(1, V, dtype=P.dtype)])
    b = torch.zeros(V + 1, 1, dtype=P.dtype)
    b[-1] = 1
    if int(torch.linalg.matrix_rank(A[:-1])) < V - 1:
        raise UsageError(
            "expected a chain with one stationary distribution, got a reducible chain",
            hint="raise the concentration, or take another seed",
        )
    return torch.linalg.lstsq(A, b).solution[:, 0].clamp(min=0)


def markov_entropy_rate(P: Tensor) -> float:
    """−Σ_i π_i Σ_j P_ij log P_ij in nats: the mean cross-entropy that no model of the chain can beat."""
    return float((stationary_distribution(P)[:, None] * torch.special.entr(P)).sum())


def _invert(cumulative: Tensor, source: torch.Generator) -> Tensor:
    """Draw one letter per row of cumulative probabilities (n, V): the first that exceeds a uniform number."""
    u = torch.rand(cumulative.shape[0], 1, generator=source, dtype=torch.float64)
    return (cumulative <= u * cumulative[:, -1:]).sum(1).clamp(max=cumulative.shape[1] - 1)


Teacher = Literal["linear", "noise"]
Dtype = Literal["float32", "float64"]


def gaussian_regression(
    *,
    num_sequences: int = 16,
    length: int = 8,
    width: int = 4,
    out_width: int | None = None,
    sigma: float = 1.0,
    teacher: Teacher = "linear",
    noise: float = 0.0,
    seed: int = 0,
    batch_size: int | None = None,
    dtype: Dtype = "float64",
) -> Batches:
    """Sequences X (n, L, d) with independent N(0, σ²) entries, and targets Y (n, L, d_out).

    "linear": Y = X W + noise · Z with one teacher W (d, d_out) of N(0, 1/d) entries; "noise": Y = Z, whatever
    X is. Z has independent N(0, 1) entries. `out_width=None` means d_out = d. Construction: X / σ, W and Z
    are drawn in float64 from the streams 0, 1 and 2 of `seed`, so that σ scales X and redraws nothing.
    """
    out_width = width if out_width is None else out_width
    check_counts(num_sequences=num_sequences, length=length, width=width, out_width=out_width)
    check_not_negative(sigma=sigma, noise=noise)
    check_choice("teacher", teacher, get_args(Teacher))
    check_choice("dtype", dtype, get_args(Dtype))
    X = sigma * _normal(seed, 0, num_sequences, length, width)
    Z = _normal(seed, 2, num_sequences, length, out_width)
    if teacher == "linear":
        Y = X @ _normal(seed, 1, width, out_width) / width**0.5 + noise * Z
    else:
        Y = Z
    kind = getattr(torch, dtype)
    return Batches.from_tensors(X.to(kind), Y.to(kind), batch_size=batch_size, name="gaussian_regression")


def _normal(seed: int, stream: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed, stream), dtype=torch.float64)

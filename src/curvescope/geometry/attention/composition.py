"""Composition scores of heads with a random baseline, and copying scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.result import Tabular
from curvescope.core.seeds import generator
from curvescope.geometry.attention.circuits import Circuit
from curvescope.geometry.low_rank import Factored

Kind = Literal["Q", "K", "V"]


@dataclass(frozen=True)
class Composition(Tabular):
    """Scores |M₁ M₂|_F / (|M₁|_F |M₂|_F) of every earlier head (rows) with every later one (columns).

    M₁ is the earlier head's value-output matrix; M₂ is the later head's W_QK (Q), its transpose (K) or its
    W_VO (V). The baseline has two matrices with the same singular values and random directions: the root mean
    square of its score is exactly 1/√d′ in a space of dimension d′.
    """

    kind: str
    scores: np.ndarray  # (H₁, H₂)
    chance: float  # 1/√d′
    chance_mean: np.ndarray  # (H₁, H₂) mean over the samples
    chance_std: np.ndarray  # (H₁, H₂)
    z: np.ndarray  # (H₁, H₂) standard deviations above the mean
    num_samples: int
    layers: list[int | None]  # layer of the earlier and of the later heads
    seed: int

    def table(self) -> Any:
        """One row per pair of heads."""
        first, second = np.indices(self.scores.shape).reshape(2, -1)
        columns = {"from": first, "to": second}
        for name in ("scores", "chance_mean", "chance_std", "z"):
            columns[name.removesuffix("s")] = getattr(self, name).reshape(-1)
        return columns


def composition(
    earlier: Sequence[Circuit],
    later: Sequence[Circuit],
    kind: Kind = "V",
    *,
    num_samples: int = 100,
    seed: int = 0,
) -> Composition:
    """Return composition scores between the heads of two layers, with a random baseline.

    Args:
        earlier: `heads(model, i)`.
        later: `heads(model, j)`, j > i.
        kind: composition with the later heads' queries (Q), keys (K) or values (V).
        num_samples: random pairs of subspaces for the spread of the baseline.
    """
    if kind not in ("Q", "K", "V"):
        raise UsageError(f"kind: expected Q, K or V, got {kind!r}")
    if not earlier or not later or earlier[0].d != later[0].d:
        raise ShapeError("expected heads of two layers of one width")
    first = [c.vo for c in earlier]
    second = [c.vo if kind == "V" else c.qk if kind == "Q" else c.qk.T for c in later]
    free = _dimension(earlier[0], later[0])
    scores = np.array([[composition_score(a, b) for b in second] for a in first])
    samples = _chance(first, second, free, num_samples, seed)
    mean, std = samples.mean(0).numpy(), samples.std(0).numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        z = (scores - mean) / std
    layers = [earlier[0].layer, later[0].layer]
    return Composition(kind, scores, 1 / math.sqrt(free), mean, std, z, num_samples, layers, seed)


def composition_score(first: Factored, second: Factored) -> float:
    """Return |M₁ M₂|_F / (|M₁|_F |M₂|_F) = |S₁ V₁ᵀ U₂ S₂|_F / …, from singular triples; 0 if either is 0."""
    core = first.singular_values[:, None] * (first.right.T @ second.left) * second.singular_values
    size = first.frobenius * second.frobenius
    return float(core.norm()) / size if size > 0 else 0.0


def copying_score(matrix: Factored) -> float:
    """Return Re Σλ / Σ|λ| over the eigenvalues of a square matrix: 1 copies, −1 negates."""
    total = float(matrix.eigenvalues.abs().sum())
    return float(matrix.eigenvalues.real.sum()) / total if total > 0 else 0.0


def through_vocabulary(matrix: Factored, E: Tensor, D: Tensor) -> Factored:
    """Return M (Dᵀ E), a d × d matrix with the non-zero eigenvalues of E M Dᵀ (V × V).

    Args:
        matrix: M, such as a head's W_VO.
        E: embedding rows of tokens (V, d).
        D: unembedding rows of tokens (V, d).
    """
    overlap = torch.zeros(E.shape[1], E.shape[1], dtype=torch.float64)
    for start in range(0, len(E), 4096):
        part = slice(start, start + 4096)
        overlap += D[part].double().T @ E[part].double()
    return Factored(matrix.A, overlap.T @ matrix.B, matrix.noise)


def _dimension(a: Circuit, b: Circuit) -> int:
    """Return the dimension of the space in which one head writes and the other reads."""
    both = a.kind == "layernorm" and b.kind == "layernorm"
    return max(a.d - 1 if both else a.d, 1)


def _chance(first: list[Factored], second: list[Factored], d: int, num_samples: int, seed: int) -> Tensor:
    """Return scores of matrices with these singular values and random directions: (S, H₁, H₂).

    The overlap of two random orthonormal frames is a corner O of a random rotation, and the score is
    √(s₁²ᵀ (O ∘ O) s₂²) over √(Σ s₁² Σ s₂²); the samples of O are shared by all pairs.
    """
    r, q = (max(f.rank for f in group) for group in (first, second))
    p = [torch.stack([_padded(f, n) for f in group]) for group, n in ((first, r), (second, q))]
    samples_of_scores = []
    for sample in range(num_samples):
        source = generator(seed, sample)
        frames = [
            torch.linalg.qr(torch.randn(d, n, generator=source, dtype=torch.float64))[0] for n in (r, q)
        ]
        overlap = (frames[0].T @ frames[1]).square()
        samples_of_scores.append((p[0] @ overlap @ p[1].T).clamp_min(0).sqrt())
    return torch.stack(samples_of_scores)


def _padded(matrix: Factored, width: int) -> Tensor:
    share = torch.zeros(width, dtype=torch.float64)
    share[: matrix.rank] = matrix.energy_share
    return share

"""Composition of heads: composition scores against chance, and copying scores."""

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
    W_VO (V). Chance is two matrices with the same singular values and random directions: the root mean
    square of the score is then exactly 1/√d′, d′ being the dimension of the space both live in.
    """

    kind: str
    scores: np.ndarray  # (H₁, H₂)
    chance: float  # 1/√d′
    chance_mean: np.ndarray  # (H₁, H₂) over the samples
    chance_std: np.ndarray  # (H₁, H₂)
    z: np.ndarray  # (H₁, H₂) standard deviations above the mean
    num_samples: int
    layers: list[int | None]  # of the earlier and the later heads
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
    """Composition scores between the heads of two layers, with a random baseline.

    Args:
        earlier: `heads(model, i)`.
        later: `heads(model, j)`, j > i.
        kind: through the later heads' queries, keys or values.
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
    """|M₁ M₂|_F / (|M₁|_F |M₂|_F), from the singular triples: |S₁ V₁ᵀ U₂ S₂|_F; 0 where either is 0."""
    core = first.singular_values[:, None] * (first.right.T @ second.left) * second.singular_values
    size = first.frobenius * second.frobenius
    return float(core.norm()) / size if size > 0 else 0.0


def copying_score(matrix: Factored) -> float:
    """Re Σλ / Σ|λ| over the eigenvalues of a square matrix: 1 copies, −1 negates, near 0 does neither."""
    total = float(matrix.eigenvalues.abs().sum())
    return float(matrix.eigenvalues.real.sum()) / total if total > 0 else 0.0


def through_vocabulary(matrix: Factored, E: Tensor, D: Tensor) -> Factored:
    """A matrix with the non-zero eigenvalues of E M Dᵀ (V × V), in d dimensions: M (Dᵀ E).

    Args:
        matrix: M, such as a head's W_VO.
        E: rows that tokens enter with (V, d).
        D: rows that logits are read with (V, d).
    """
    overlap = torch.zeros(E.shape[1], E.shape[1], dtype=torch.float64)
    for start in range(0, len(E), 4096):
        part = slice(start, start + 4096)
        overlap += D[part].double().T @ E[part].double()
    return Factored(matrix.A, overlap.T @ matrix.B, matrix.noise)


def _dimension(a: Circuit, b: Circuit) -> int:
    """Dimension of the space that what is written and what is read live in."""
    both = a.kind == "layernorm" and b.kind == "layernorm"
    return max(a.d - 1 if both else a.d, 1)


def _chance(first: list[Factored], second: list[Factored], d: int, num_samples: int, seed: int) -> Tensor:
    """Scores of matrices with these singular values whose directions are random: (S, H₁, H₂).

    The overlap of two random orthonormal frames is a corner O of a random rotation, and the score is
    √(s₁²ᵀ (O ∘ O) s₂²) over √(Σ s₁² Σ s₂²); the samples of O are shared by all pairs.
    """
    r, q = (max(f.rank for f in group) for group in (first, second))
    p = [torch.stack([_padded(f, n) for f in group]) for group, n in ((first, r), (second, q))]
    found = []
    for sample in range(num_samples):
        source = generator(seed, sample)
        frames = [
            torch.linalg.qr(torch.randn(d, n, generator=source, dtype=torch.float64))[0] for n in (r, q)
        ]
        overlap = (frames[0].T @ frames[1]).square()
        found.append((p[0] @ overlap @ p[1].T).clamp_min(0).sqrt())
    return torch.stack(found)


def _padded(matrix: Factored, width: int) -> Tensor:
    share = torch.zeros(width, dtype=torch.float64)
    share[: matrix.rank] = matrix.energy_share
    return share

"""Random zoo Transformers whose weight matrices have norms of their own, each drawn by itself.

Every matrix of a layer is W = U diag(s) Vᵀ with random orthonormal U and V and sᵢ ∝ i^(−a): a is uniform
between 0 (all singular values equal) and 2 (one dominates), and ‖W‖_F log-uniform over a factor of 16 around
that of the zoo's `scaled` scheme. So the norms of the roles are independent of each other, and the spectral
norm of a matrix is not its Frobenius norm in another unit. Embedding and unembedding are as the scheme has
them; the data are a Markov chain of the model's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.blocks.probes import extreme_ends
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.data.tasks.random_sequences import markov
from curvescope.models.load import load
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import Hessian
from curvescope.problem import Problem

ROLES = ("W_Q", "W_K", "W_V", "W_O", "W_1", "W_2")
VOCAB, LENGTH, SEQUENCES = 8, 8, 4
SHAPE = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 16, "n_ctx": LENGTH, "vocab_size": VOCAB}
SPREAD = 4.0  # a norm is at most so many times larger or smaller than the scheme's
STEEPEST = 2.0  # singular values fall as i^(−a) with a up to this


@dataclass(frozen=True)
class RandomModels(Result):
    """λ_max of the Hessians of M models, and the norms of their weights by role."""

    norm: str  # where the model's own norms stand: pre or none
    lambda_max: np.ndarray  # (M,)
    error: np.ndarray  # (M,) an eigenvalue lies within
    loss: np.ndarray  # (M,)
    spectral: np.ndarray  # (M, roles)
    frobenius: np.ndarray  # (M, roles)


def measure_random(norm: str, *, count: int, num_steps: int, seed: int) -> RandomModels:
    """Draw and measure `count` models, in float64."""
    rows = [
        _measured(random_problem(norm, seed=seed, index=index), num_steps)
        for index in track(range(count), "random models")
    ]
    top, error, loss, spectral, frobenius = (np.array(column) for column in zip(*rows, strict=True))
    return RandomModels(norm, top, error, loss, spectral, frobenius)


def random_problem(norm: str, *, seed: int, index: int) -> Problem:
    """The model of a number, on its own chains."""
    source = np.random.default_rng([seed & 0xFFFFFFFF, index])
    own = int(source.integers(2**31))
    cfg = TransformerConfig(**SHAPE, norm=norm, init="scaled", seed=own)  # pyright: ignore[reportArgumentType]
    module = Transformer(cfg).double()
    with torch.no_grad():
        for role in ROLES:
            W = module.get_parameter(f"L0.{role}")
            W.copy_(_drawn(W, source))
    data = markov(num_sequences=SEQUENCES, length=LENGTH, vocab=VOCAB, seed=own)
    return Problem(load(module), data)


def _drawn(W: Tensor, source: np.random.Generator) -> Tensor:
    """A matrix of W's shape: its norm and the fall of its singular values are drawn."""
    rows, columns = W.shape
    rank = min(rows, columns)
    U, V = (np.linalg.qr(source.normal(size=(size, rank)))[0] for size in (rows, columns))
    s = np.arange(1, rank + 1) ** -source.uniform(0, STEEPEST)
    scheme = 0.8 * math.sqrt(W.numel() / SHAPE["d_model"])
    size = scheme * math.exp(source.uniform(-1, 1) * math.log(SPREAD))
    return torch.from_numpy((U * (s * size / np.linalg.norm(s))) @ V.T)


def _measured(problem: Problem, num_steps: int) -> tuple[float, float, float, np.ndarray, np.ndarray]:
    ends = extreme_ends(Hessian(problem, engine="autograd"), num_steps=num_steps)
    weights = [problem.get_parameter(f"L0.{role}").detach() for role in ROLES]
    spectral = np.array([float(torch.linalg.matrix_norm(W, 2)) for W in weights])
    frobenius = np.array([float(W.norm()) for W in weights])
    return float(ends.values[1]), float(ends.residuals[1]), problem.loss_value(), spectral, frobenius

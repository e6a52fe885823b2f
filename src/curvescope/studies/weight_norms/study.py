"""Does λ_max follow the norms of weight matrices, over training and over random models?

Over training, the study measures λ_max of every weight matrix's diagonal block of the Hessian at every
checkpoint, with the spectral and the Frobenius norm of the matrix. Over random models, it measures λ_max of
the full Hessian and the norms of each role, which are drawn independently. It compares by rank correlations
and assumes no functional form.

The random models are small Transformers. Every matrix of a layer is W = U diag(s) Vᵀ with random orthonormal
U and V and sᵢ ∝ i^(−a). a is uniform between 0 (equal singular values) and 2 (one dominates); ‖W‖_F is
log-uniform within a factor of 4 above and below that of the `scaled` initialization. So the norms of
different roles are independent, and the spectral norm is not proportional to the Frobenius norm. Embedding
and unembedding keep the `scaled` initialization. Each model has its own Markov chain as data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.blocks.probes import extreme_ends
from curvescope.algorithms.estimates.ranks import Correlation, difference, mean_within, rank_correlation
from curvescope.core.config import setting
from curvescope.core.progress import Progress, track
from curvescope.core.result import Result
from curvescope.data.tasks.random_sequences import markov
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Shown
from curvescope.studies.problem_config import (
    OF_CHECKPOINTS,
    ModelOnData,
    load_checkpoints,
    make_problem,
    notes_of,
)

ROLES = ("W_Q", "W_K", "W_V", "W_O", "W_1", "W_2")
VOCAB, LENGTH, SEQUENCES = 8, 8, 4
SHAPE = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 16, "n_ctx": LENGTH, "vocab_size": VOCAB}
SPREAD = 4.0  # largest factor between a norm and that of the `scaled` initialization
STEEPEST = 2.0  # singular values fall as i^(−a) with a up to this value


@dataclass(frozen=True)
class RandomModels(Result):
    """λ_max of the Hessians of M models, and the norms of their weights by role."""

    norm: str  # position of the model's normalization layers: pre or none
    lambda_max: np.ndarray  # (M,)
    error: np.ndarray  # (M,) an eigenvalue lies within this distance
    loss: np.ndarray  # (M,)
    spectral: np.ndarray  # (M, roles)
    frobenius: np.ndarray  # (M, roles)


def measure_random(norm: str, *, count: int, num_steps: int, seed: int) -> RandomModels:
    """Draw and measure `count` models in float64."""
    rows = [
        _measured(random_problem(norm, seed=seed, index=index), num_steps)
        for index in track(range(count), "random models")
    ]
    top, error, loss, spectral, frobenius = (np.array(column) for column in zip(*rows, strict=True))
    return RandomModels(norm, top, error, loss, spectral, frobenius)


def random_problem(norm: str, *, seed: int, index: int) -> Problem:
    """Return a random model and its Markov data."""
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
    """Draw a matrix of W's shape with a random norm and a random decay of singular values."""
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


FAMILIES = ("pre", "none")  # normalization layers of the random models
KINDS = ("spectral", "frobenius")


@dataclass(frozen=True)
class Config(ModelOnData):
    """Settings of the study. The defaults take about a minute on a CPU."""

    tokens: int = setting(
        128, "tokens read from a text; for labeled texts and images: ⌈tokens / seq_len⌉ examples"
    )
    checkpoints: tuple[str, ...] = setting((), OF_CHECKPOINTS)
    blocks: tuple[str, ...] = setting(("L*.W_*",), "glob patterns of the weight matrices")
    num_steps: int = setting(8, "Lanczos steps for λ_max of a block", least=1)
    num_models: int = setting(
        96, "random models with normalization layers, and as many without; 0: none", least=0
    )
    num_random_steps: int = setting(16, "Lanczos steps for λ_max of a random model", least=1)
    draws: int = setting(1000, "bootstrap samples", least=50)


@dataclass(frozen=True)
class TrainedBlocks(Result):
    """λ_max of B blocks at one checkpoint, and the norms of their weights."""

    loss: float
    lambda_max: np.ndarray  # (B,)
    error: np.ndarray  # (B,) an eigenvalue lies within this distance
    spectral: np.ndarray  # (B,)
    frobenius: np.ndarray  # (B,)


@dataclass(frozen=True)
class WeightNorms(Shown):
    """Norms and eigenvalues over checkpoints and over random models, and their rank correlations."""

    model: str
    data: str
    blocks: list[str]
    trained: dict[str, TrainedBlocks]  # by checkpoint
    random: dict[str, RandomModels]  # by position of the normalization layers
    # By f"{where}.{role}.{kind of norm}"; also the difference ρ spectral − ρ Frobenius.
    correlations: dict[str, Correlation]

    def correlation(self, where: str, role: str, kind: str) -> Correlation:
        """Rank correlation of λ_max with the norms of a role."""
        return self.correlations[f"{where}.{role}.{kind}"]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> WeightNorms:
    """Measure checkpoints and random models."""
    problem = make_problem(cfg)
    points = load_checkpoints(cfg, cfg.checkpoints, problem.model)
    blocks = _matrices(cfg, problem)
    pieces = [
        Piece(f"checkpoint{i}", partial(_trained, problem, model, blocks, cfg), f"blocks at {name}")
        for i, (name, model) in enumerate(points.items())
    ]
    asked = {"count": cfg.num_models, "num_steps": cfg.num_random_steps, "seed": cfg.seed}
    families = FAMILIES if cfg.num_models else ()
    pieces += [
        Piece(
            f"random.{norm}", partial(measure_random, norm, **asked), f"random models, normalization: {norm}"
        )
        for norm in families
    ]
    contents = fingerprint(problem.model, problem.batches, *points.values())
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    trained = {name: found.take(TrainedBlocks, f"checkpoint{i}") for i, name in enumerate(points)}
    random = {norm: found.take(RandomModels, f"random.{norm}") for norm in families}
    return WeightNorms(
        model=problem.model.name,
        data=problem.batches.name,
        blocks=blocks,
        trained=trained,
        random=random,
        correlations=correlate(blocks, trained, random, draws=cfg.draws, seed=cfg.seed),
        notes=notes_of(cfg, problem),
    )


def _matrices(cfg: Config, problem: Problem) -> list[str]:
    """Names of the blocks that are matrices."""
    return [block.name for block in problem.space(*cfg.blocks) if len(block.shape) == 2]


def _trained(problem: Problem, model: Model, blocks: list[str], cfg: Config) -> TrainedBlocks:
    at = problem.at(dict(model.named_parameters()))
    how: Any = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    ends = [extreme_ends(Hessian(at, name, **how), num_steps=cfg.num_steps, seed=cfg.seed) for name in blocks]
    weights = [_weight(model, name) for name in blocks]
    return TrainedBlocks(
        loss=at.loss_value(),
        lambda_max=np.array([float(e.values[1]) for e in ends]),
        error=np.array([float(e.residuals[1]) for e in ends]),
        spectral=np.array([float(torch.linalg.matrix_norm(W, 2)) for W in weights]),
        frobenius=np.array([float(W.norm()) for W in weights]),
    )


def _weight(model: Model, name: str) -> torch.Tensor:
    """Return the matrix of a block in float64."""
    block = model.blocks[name]
    return block.take(model.get_parameter(block.parameter).detach()).double()


def correlate(
    blocks: list[str],
    trained: dict[str, TrainedBlocks],
    random: dict[str, RandomModels],
    *,
    draws: int,
    seed: int,
) -> dict[str, Correlation]:
    """Rank correlations over training (by role, pooled, within blocks) and over random models (by role)."""
    how: dict[str, Any] = {"draws": draws, "seed": seed}
    roles = np.array([name.rpartition(".")[2] for name in blocks] * len(trained))
    group = np.tile(np.arange(len(blocks)), len(trained))
    correlations = {}
    for kind in KINDS:
        top = np.concatenate([t.lambda_max for t in trained.values()])
        size = np.concatenate([getattr(t, kind) for t in trained.values()])
        correlations[f"blocks.all.{kind}"] = rank_correlation(size, top, groups=group, **how)
        correlations[f"within.all.{kind}"] = mean_within(size, top, groups=group)
        for role in dict.fromkeys(roles.tolist()):
            of = roles == role
            correlations[f"blocks.{role}.{kind}"] = rank_correlation(
                size[of], top[of], groups=group[of], **how
            )
        for norm, models in random.items():
            for i, role in enumerate(ROLES):
                of_role = getattr(models, kind)[:, i]
                correlations[f"{norm}.{role}.{kind}"] = rank_correlation(of_role, models.lambda_max, **how)
    for norm, models in random.items():
        for i, role in enumerate(ROLES):
            both = models.spectral[:, i], models.frobenius[:, i]
            correlations[f"{norm}.{role}.difference"] = difference(*both, models.lambda_max, **how)
    return correlations

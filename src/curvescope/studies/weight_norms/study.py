"""Does λ_max follow the norms of weight matrices? Over training, and over random models.

Over training: λ_max of every weight matrix's diagonal block of the Hessian at every checkpoint, beside the
spectral and the Frobenius norm of that matrix. Over random models: λ_max of the whole Hessian beside the
norms of each role, drawn independently (`random_models`). All is compared by ranks (`ranks`): no curve is
assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from curvescope.algorithms.blocks.probes import extreme_ends
from curvescope.algorithms.estimates.ranks import Correlation, difference, mean_within, rank_correlation
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.models.model import Model
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.setting import OF_CHECKPOINTS, ModelOnData, load_checkpoints, make_problem, notes_of
from curvescope.studies.weight_norms.analysis import ROLES, RandomModels, measure_random

if TYPE_CHECKING:
    pass

FAMILIES = ("pre", "none")  # where the norms of random models stand
KINDS = ("spectral", "frobenius")


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to look at and how hard. The defaults take about a minute on a CPU."""

    tokens: int = setting(128, "of a text; labeled texts and images: ⌈tokens / seq_len⌉ of them")
    checkpoints: tuple[str, ...] = setting((), OF_CHECKPOINTS)
    blocks: tuple[str, ...] = setting(("L*.W_*",), "globs: the weight matrices")
    num_steps: int = setting(8, "Lanczos steps for λ_max of a block")
    num_models: int = setting(96, "random models with norms, and as many without; 0: none")
    num_random_steps: int = setting(16, "Lanczos steps for λ_max of a random model")
    draws: int = setting(1000, "of the bootstrap")

    def __post_init__(self) -> None:
        as_tuples(self, "checkpoints", "blocks")
        super().__post_init__()
        at_least(self, 1, "num_steps", "num_random_steps")
        at_least(self, 0, "num_models")
        at_least(self, 50, "draws")


@dataclass(frozen=True)
class TrainedBlocks(Result):
    """λ_max of B blocks at one checkpoint, beside the norms of their weights."""

    loss: float
    lambda_max: np.ndarray  # (B,)
    error: np.ndarray  # (B,) an eigenvalue lies within
    spectral: np.ndarray  # (B,)
    frobenius: np.ndarray  # (B,)


@dataclass(frozen=True)
class WeightNorms(Shown):
    """Norms and eigenvalues over checkpoints and over random models, and their rank correlations."""

    model: str
    data: str
    blocks: list[str]
    trained: dict[str, TrainedBlocks]  # by checkpoint
    random: dict[str, RandomModels]  # by where the norms stand
    correlations: dict[str, Correlation]  # by f"{where}.{role}.{kind of norm}"; ρ spectral − ρ Frobenius too

    def correlation(self, where: str, role: str, kind: str) -> Correlation:
        """Of λ_max with the norms of a role."""
        return self.correlations[f"{where}.{role}.{kind}"]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> WeightNorms:
    """Measure checkpoints and random models.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
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
        Piece(f"random.{norm}", partial(measure_random, norm, **asked), f"random models, norms {norm}")
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
    """Blocks that are matrices."""
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
    """The matrix of a block, in float64."""
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
    """All rank correlations: over training by role, pooled and within blocks; over random models by role."""
    how: dict[str, Any] = {"draws": draws, "seed": seed}
    roles = np.array([name.rpartition(".")[2] for name in blocks] * len(trained))
    group = np.tile(np.arange(len(blocks)), len(trained))
    found = {}
    for kind in KINDS:
        top = np.concatenate([t.lambda_max for t in trained.values()])
        size = np.concatenate([getattr(t, kind) for t in trained.values()])
        found[f"blocks.all.{kind}"] = rank_correlation(size, top, groups=group, **how)
        found[f"within.all.{kind}"] = mean_within(size, top, groups=group)
        for role in dict.fromkeys(roles.tolist()):
            of = roles == role
            found[f"blocks.{role}.{kind}"] = rank_correlation(size[of], top[of], groups=group[of], **how)
        for norm, models in random.items():
            for i, role in enumerate(ROLES):
                of_role = getattr(models, kind)[:, i]
                found[f"{norm}.{role}.{kind}"] = rank_correlation(of_role, models.lambda_max, **how)
    for norm, models in random.items():
        for i, role in enumerate(ROLES):
            both = models.spectral[:, i], models.frobenius[:, i]
            found[f"{norm}.{role}.difference"] = difference(*both, models.lambda_max, **how)
    return found

"""One training with its checkpoints, and all that is measured at one of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from curvescope.core.result import Result
from curvescope.problem import Problem
from curvescope.studies.factors.descent import best_step
from curvescope.studies.factors.distances import between, distances, target
from curvescope.studies.factors.matrices import Loss, approximation, ggn_rows
from curvescope.studies.factors.setting import Config
from curvescope.train import TrainConfig, train


@dataclass(frozen=True)
class Course(Result):
    """Parameters at the C checkpoints of a training with Adam."""

    theta: np.ndarray  # (C, n)


@dataclass(frozen=True)
class Measured(Result):
    """Distances of M approximations at one checkpoint: of the whole matrix, and of every one of S blocks."""

    loss: float
    whole: np.ndarray  # (6, M) by MEASURES
    blocks: np.ndarray  # (6, M, S)
    decrease: np.ndarray  # (M,) of the loss by the best single step
    between: np.ndarray  # (2,) the share of ‖·‖² between blocks, of the GGN and of the Hessian


def train_one(cfg: Config, problem: Problem) -> Course:
    """Adam on all data at every step, its rate warmed up and lowered, without weight decay."""
    steps = cfg.checkpoints[-1]
    how = TrainConfig(
        steps=steps, lr=cfg.lr, warmup=min(10, steps), weight_decay=0.0, snapshots=cfg.checkpoints
    )
    _, _, kept = train(problem.model, problem.batches, how)
    space = problem.space().in_blocks()
    return Course(np.stack([space.gather(kept[step]).numpy() for step in cfg.checkpoints]))


def measure(cfg: Config, problem: Problem, theta: np.ndarray) -> Measured:
    """Every approximation beside the exact matrices at θ."""
    point = torch.as_tensor(theta)
    space = problem.space().in_blocks()
    here, loss, slices = problem.at(space.scatter(point)), Loss(problem), list(space.slices.values())
    value, g = loss.gradient(point)
    rows = ggn_rows(here)
    G, H = rows.T @ rows, loss.hessian(point)
    exact, own = target(G, cfg.damping), [target(G[s, s], cfg.damping) for s in slices]
    whole, blocks, decrease = [], [], []
    for name in cfg.approximations:
        A = approximation(name, here, rows)
        whole.append(distances(A, exact, H, g, cfg.damping))
        each = zip(slices, own, strict=True)
        found = [distances(A.block(s), one, H[s, s], g[s], cfg.damping) for s, one in each]
        blocks.append(np.stack(found, axis=-1))
        decrease.append(best_step(loss, point, A, G, g, cfg.dampings))
    return Measured(
        loss=value,
        whole=np.stack(whole, axis=-1),
        blocks=np.stack(blocks, axis=1),
        decrease=np.array(decrease),
        between=np.array([between(G, slices), between(H, slices)]),
    )

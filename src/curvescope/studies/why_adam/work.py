"""The pieces of the study: tuning of one configuration with one optimizer, and its curvature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.core.result import Result
from curvescope.data.tasks.addition import addition
from curvescope.studies.why_adam.curvature import MEASURES, Blocks, ggn_blocks, hessian_blocks
from curvescope.studies.why_adam.ensemble import Courses, Flat, Optimizer, flatten, train
from curvescope.studies.why_adam.networks import CHOICES, network
from curvescope.studies.why_adam.settings import APART, CHECKPOINTS, EVALUATED, LOOKS, Config
from curvescope.studies.why_adam.tuning import FIRST, Tuned, tune

OPTIMIZERS: tuple[Optimizer, ...] = ("adam", "sgd")
MOMENTS = ["start", *(f"{name} {share:.0%}" for name in OPTIMIZERS for share in CHECKPOINTS)]
"""When curvature is measured: before training, and along the chosen run of each optimizer."""


@dataclass(frozen=True)
class Measured(Result):
    """Heterogeneity of one configuration: M moments, S seeds, the MEASURES."""

    blocks: list[str]
    num_parameters: int
    ggn: np.ndarray  # (M, S, 3) nan where a run diverged
    hessian: np.ndarray  # (S, 3) at the start
    ggn_sizes: np.ndarray  # (S, B) mean |λ| of each block at the start
    hessian_sizes: np.ndarray  # (S, B)


def starts(cfg: Config, name: str, dtype: torch.dtype = torch.float32) -> tuple[Flat, Tensor]:
    """A configuration as a function, and the weights of every seed, (S, n)."""
    flats, weights = zip(
        *(
            flatten(network(CHOICES[name], cfg.profile.size, seed), cfg.profile.size.digits)
            for seed in seeds(cfg)
        ),
        strict=True,
    )
    return flats[0], torch.stack(weights).to(cfg.device, dtype)


def seeds(cfg: Config) -> range:
    """Seeds of weights and batches."""
    return range(APART * cfg.seed, APART * cfg.seed + cfg.profile.seeds)


def batches(cfg: Config) -> Tensor:
    """Tokens of all steps of every seed, (S, steps, B, T): drawn anew for each step."""
    profile = cfg.profile
    shape = (profile.steps, profile.batch_size, profile.size.length)
    count = profile.steps * profile.batch_size
    return torch.stack([_sums(cfg, count, seed).reshape(shape) for seed in seeds(cfg)])


def evaluated(cfg: Config) -> Tensor:
    """The sums whose loss is looked at, the same for all runs: (N, T)."""
    return _sums(cfg, EVALUATED, APART * (cfg.seed + 1) - 1)


def _sums(cfg: Config, count: int, seed: int) -> Tensor:
    drawn = addition(num_sequences=count, digits=cfg.profile.size.digits, seed=seed)
    return drawn[0].inputs.to(cfg.device)


def tuned(cfg: Config, name: str, optimizer: Optimizer) -> Tuned:
    """All runs of a configuration with an optimizer."""
    flat, start = starts(cfg, name)
    data, looked_at = batches(cfg), evaluated(cfg)
    looks, checkpoints = cfg.after(LOOKS), cfg.after(CHECKPOINTS)

    def run(rates: list[float]) -> Courses:
        return train(
            flat, start, data, rates, optimizer, evaluated=looked_at, looks=looks, checkpoints=checkpoints
        )

    return tune(FIRST[optimizer], run)


def measured(cfg: Config, name: str, adam: Result, sgd: Result) -> Measured:
    """Curvature at the start and along the chosen runs, in double precision."""
    assert isinstance(adam, Tuned)
    assert isinstance(sgd, Tuned)
    flat, start = starts(cfg, name, torch.float64)
    tokens = evaluated(cfg)[: cfg.measured]
    along = [torch.as_tensor(kept).to(start) for run in (adam, sgd) for kept in run.parameters]
    first = [ggn_blocks(flat, theta, tokens) for theta in start]
    exact = [hessian_blocks(flat, theta, tokens) for theta in start]
    return Measured(
        blocks=first[0].names,
        num_parameters=start.shape[1],
        ggn=np.stack([_stacked(first), *([_later(flat, theta, tokens) for theta in kept] for kept in along)]),
        hessian=_stacked(exact),
        ggn_sizes=np.stack([one.sizes for one in first]),
        hessian_sizes=np.stack([one.sizes for one in exact]),
    )


def _stacked(found: list[Blocks]) -> np.ndarray:
    return np.stack([one.heterogeneity for one in found])


def _later(flat: Flat, theta: Tensor, tokens: Tensor) -> np.ndarray:
    """Of a run that may have diverged."""
    if not bool(torch.isfinite(flat.loss(theta, tokens))):
        return np.full(len(MEASURES), np.nan)
    return ggn_blocks(flat, theta, tokens).heterogeneity

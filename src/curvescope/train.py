"""A plain training loop with snapshots: AdamW, warm-up, cosine decay, gradient clipping."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.config import Config
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import track
from curvescope.core.result import Tabular
from curvescope.data.batches import Batch, Batches
from curvescope.losses import Loss, as_loss
from curvescope.models.model import Model

Stream = Callable[[int], Batch]
"""Function that returns the batch of a step."""


@dataclass(frozen=True)
class TrainConfig(Config):
    """Settings of training. The learning rate rises linearly over `warmup` steps, then falls along a
    cosine.
    """

    steps: int = 1000
    lr: float = 1e-3
    lr_end: float = 0.1  # final learning rate as a fraction of lr
    warmup: int = 50
    weight_decay: float = 0.1  # for matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    snapshots: tuple[int, ...] = field(
        default_factory=tuple
    )  # steps after which weights are saved; 0 is before the first


@dataclass(frozen=True)
class Training(Tabular):
    """Record of training, step by step; the loss is that of the step's own batch, before its update."""

    step: np.ndarray  # (S,)
    loss: np.ndarray  # (S,)
    lr: np.ndarray  # (S,)
    grad_norm: np.ndarray  # (S,) before clipping

    def table(self) -> Any:
        """One row per step."""
        return {"step": self.step, "loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm}


def train(
    model: Model,
    data: Batches | Stream,
    cfg: TrainConfig | None = None,
    *,
    loss: str | Loss = "cross_entropy",
) -> tuple[Model, Training, dict[int, dict[str, Tensor]]]:
    """Train a copy of `model`; batches are cycled through, or requested by step.

    Returns:
        The trained model, the history, and the parameters after each step of `cfg.snapshots`.
    """
    cfg = cfg or TrainConfig()
    if cfg.steps < 1 or not cfg.lr > 0:
        raise UsageError(f"expected at least one step and a positive lr, got {cfg.steps} and {cfg.lr}")
    trained = _copy(model)
    stream = data if callable(data) else _round_and_round(data)
    objective = as_loss(loss)
    optimizer = _adamw(trained, cfg)
    snapshots = {0: _weights(trained)} if 0 in cfg.snapshots else {}
    losses, norms, rates = [], [], [_rate(cfg, step) for step in range(cfg.steps)]
    for step in track(range(cfg.steps), "training"):
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        value, norm = _step(trained, stream(step), objective, optimizer, cfg)
        losses.append(value)
        norms.append(norm)
        if step + 1 in cfg.snapshots:
            snapshots[step + 1] = _weights(trained)
    trained.module.train(model.module.training)
    history = _history(rates, losses, norms)
    return trained, history, snapshots


def _step(
    model: Model, batch: Batch, loss: Loss, optimizer: torch.optim.Optimizer, cfg: TrainConfig
) -> tuple[Tensor, Tensor]:
    batch = batch.map(lambda t: t.to(model.device, model.dtype if t.is_floating_point() else None))
    outputs = model.forward({}, batch.inputs)
    total = loss.total_weight(batch.targets, batch.weights) if loss.is_mean else 1.0
    value = loss.sum(outputs, batch.targets, batch.weights) / total
    optimizer.zero_grad(set_to_none=True)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.module.parameters(), cfg.clip)
    optimizer.step()
    return value.detach(), norm.detach()


def _copy(model: Model) -> Model:
    module = copy.deepcopy(model.module).train()
    module.requires_grad_(True)
    return replace(model, module=module)


def _adamw(model: Model, cfg: TrainConfig) -> torch.optim.Optimizer:
    parameters = list(model.module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=(cfg.beta1, cfg.beta2))


def _rate(cfg: TrainConfig, step: int) -> float:
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    progress = (step - cfg.warmup) / max(cfg.steps - cfg.warmup, 1)
    return cfg.lr * (cfg.lr_end + (1 - cfg.lr_end) * (1 + math.cos(math.pi * progress)) / 2)


def _weights(model: Model) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def _round_and_round(batches: Batches) -> Stream:
    return lambda step: batches[step % len(batches)]


def _history(rates: Sequence[float], losses: Sequence[Tensor], norms: Sequence[Tensor]) -> Training:
    loss = torch.stack(list(losses)).double().cpu().numpy()
    if not np.isfinite(loss).all():
        raise CurvescopeError(
            f"training diverged: the loss is not finite from step {int(np.argmin(np.isfinite(loss)))} on",
            hint="use a smaller lr or a longer warmup",
        )
    norm = torch.stack(list(norms)).double().cpu().numpy()
    return Training(np.arange(len(loss)), loss, np.asarray(rates), norm)

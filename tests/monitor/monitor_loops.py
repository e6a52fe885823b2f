"""Small training loops, with and without a monitor."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import curvescope as cs

IDS = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(0))
TARGETS = IDS.roll(-1, 1)
PROBE = [(IDS[:3], TARGETS[:3])]


def tiny() -> cs.Transformer:
    """236 parameters in float64, the same every time."""
    config = cs.TransformerConfig(n_layers=1, d_model=4, n_heads=1, n_ctx=4, vocab_size=5, d_ff=8)
    return cs.Transformer(config).double()


class Dropped(nn.Module):
    """Dropout and batch norm: a module whose training draws random numbers and writes buffers."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(5, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.3), nn.Linear(6, 5)
        ).double()
        for p in self.net.parameters():
            p.data = 0.5 * torch.randn(p.shape, generator=source, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


X = torch.randn(24, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.randint(0, 5, (24,), generator=torch.Generator().manual_seed(3))


def fit(module, optimizer, monitor=None, *, steps=range(6), data=(IDS, TARGETS), cast=False, scaler=None):
    """Train in order drawn from all three random sources; with the monitor behind every step."""
    inputs, targets = data
    for step in steps:
        shift = random.randrange(3) + int(np.random.randint(3)) + int(torch.randint(3, ()))
        chosen = torch.arange(len(inputs)).roll(shift)[: len(inputs) // 2]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            outputs = module(inputs[chosen])
            logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
            loss = F.cross_entropy(logits.flatten(0, -2), targets[chosen].flatten())
            optimizer.zero_grad()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if monitor is not None:
                monitor.step(step, optimizer=optimizer)


def seed_everything() -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def states() -> tuple:
    """Of the three random sources."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

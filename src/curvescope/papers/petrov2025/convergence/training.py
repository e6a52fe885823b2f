"""A plain training loop for networks of which only some parameters move, and the losses at its end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.core.progress import track
from curvescope.core.seeds import generator

SLOW_START = 50  # steps over which the learning rate rises
CHUNK = 256  # pictures that are evaluated at once


class Fit(NamedTuple):
    """How long, and how fast; AdamW without weight decay is Adam."""

    epochs: int
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.0


def fit(module: nn.Module, images: Tensor, classes: Tensor, how: Fit, *, seed: int) -> None:
    """Train the parameters that ask for a gradient, in place; the order of an epoch is from (seed, epoch)."""
    moving = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(moving, lr=how.lr, weight_decay=how.weight_decay)
    step, device = 0, next(module.parameters()).device
    module.train()
    for epoch in track(range(how.epochs), "training"):
        order = torch.randperm(len(classes), generator=generator(seed, epoch))
        for chosen in order.split(how.batch_size):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = how.lr * min(1.0, step / SLOW_START)
            logits = module(images[chosen].to(device))
            loss = nn.functional.cross_entropy(logits, classes[chosen].to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    module.eval()


@torch.no_grad()
def evaluate(module: nn.Module, images: Tensor, classes: Tensor) -> tuple[np.ndarray, float]:
    """The loss of every picture (n,), and the share that is classified rightly."""
    device, losses, right = next(module.parameters()).device, [], 0
    for X, y in zip(images.split(CHUNK), classes.split(CHUNK), strict=True):
        logits = module(X.to(device)).double().cpu()
        losses.append(nn.functional.cross_entropy(logits, y, reduction="none"))
        right += int((logits.argmax(-1) == y).sum())
    return torch.cat(losses).numpy(), right / len(classes)

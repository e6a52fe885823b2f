"""A multilayer perceptron, the baseline that attention is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from curvescope.core.config import Config
from curvescope.core.errors import UsageError
from curvescope.models.zoo.transformer import ACTIVATIONS


@dataclass(frozen=True)
class MLPConfig(Config):
    """Configuration of an MLP: matrices W_1 … W_depth with activations between them, on the last axis."""

    d_in: int = 8
    d_hidden: int = 16
    d_out: int = 4
    depth: int = 2
    activation: Literal["identity", "relu", "gelu"] = "relu"
    bias: bool = False
    vocab_size: int | None = None  # token inputs: an embedding E (vocab_size, d_in) comes first
    init_std: float | None = None  # None: U(±1/√rows), PyTorch's own for a linear layer
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("d_in", "d_hidden", "d_out", "depth", "vocab_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{name}: expected a positive number, got {getattr(self, name)}")
        if self.init_std is not None and not self.init_std >= 0:
            raise UsageError(f"init_std: expected a number of at least 0, got {self.init_std}")


class MLP(nn.Module):
    """z = … a(a(x W_1 + b_1) W_2 + b_2) …; (…, d_in) to (…, d_out), or tokens (…) to (…, d_out)."""

    def __init__(self, cfg: MLPConfig):
        super().__init__()
        self.cfg = cfg
        source = torch.Generator().manual_seed(cfg.seed)
        if cfg.vocab_size is not None:
            self.E = nn.Parameter(torch.empty(cfg.vocab_size, cfg.d_in).normal_(generator=source))
        sizes = [cfg.d_in, *[cfg.d_hidden] * (cfg.depth - 1), cfg.d_out]
        for i, (rows, columns) in enumerate(pairwise(sizes), start=1):
            W = torch.empty(rows, columns)
            if cfg.init_std is None:
                W.uniform_(-1 / math.sqrt(rows), 1 / math.sqrt(rows), generator=source)
            else:
                W.normal_(0.0, cfg.init_std, generator=source)
            self.register_parameter(f"W_{i}", nn.Parameter(W))
            if cfg.bias:
                self.register_parameter(f"b_{i}", nn.Parameter(torch.zeros(columns)))

    def forward(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.cfg.activation]
        if self.cfg.vocab_size is not None:
            x = nn.functional.embedding(x, self.E)
        for i in range(1, self.cfg.depth + 1):
            x = x @ getattr(self, f"W_{i}")
            x = x + getattr(self, f"b_{i}") if self.cfg.bias else x
            x = activation(x) if i < self.cfg.depth else x
        return x

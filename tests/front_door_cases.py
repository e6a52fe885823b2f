"""Small models that return their outputs in every way, and functions of one's own, for the front door."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles import drawn, shaken


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = normal(5, 3, seed=0), torch.tensor([0, 2, 1, 1, 0])


class Net(nn.Module):
    """Two layers; returns its outputs in some way."""

    def __init__(self, way: str = "tensor"):
        super().__init__()
        self.first, self.norm, self.last, self.way = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3), way

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        h = self.norm(self.first(x).tanh())
        z = self.last(h)
        loss = None if labels is None else F.cross_entropy(z, labels)
        ways: dict[str, Any] = {
            "tensor": z,
            "tuple": (z, h),
            "logits": {"h": h, "logits": z},
            "one entry": {"scores": z},
            "object": Result(z, h),
            "named": {"hidden": h, "scores": z},
            "second": (h, z),
            "loss": loss,
            "loss and logits": (loss, z),
            "loss entry": {"loss": loss, "logits": z},
        }
        return ways[self.way]


class Result(NamedTuple):
    """With a name for each entry."""

    scores: Tensor
    hidden: Tensor


def net(way: str = "tensor") -> Net:
    return shaken(drawn(lambda: Net(way)))  # pyright: ignore


def cut(*parts: Tensor, at: int = 2) -> list[tuple[Tensor, ...]]:
    return [tuple(t[:at] for t in parts), tuple(t[at:] for t in parts)]


def penalized(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y) + 0.1 * (model(2 * x) ** 2).mean()


def two_layers(params: dict[str, Any], x: Tensor) -> Tensor:
    return (x @ params["first"]["w"] + params["first"]["b"]).tanh() @ params["out"]

"""A small net with everything that a forward pass may depend on, layers with kernels, and their Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, D, T = 7, 4, 5
SCALES = {"now": 1.0}
GAIN = 1.0


class Net(nn.Module):
    """Everything that a forward pass may depend on, besides parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b, self.u = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, V)
        self.norm, self.act = nn.LayerNorm(D), nn.GELU()
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("keep", torch.ones(D, dtype=torch.bool))
        self.register_buffer("shift", torch.zeros(D, dtype=torch.int64))
        self.register_buffer("cache", torch.ones(D), persistent=False)
        self.plain = torch.ones(D, dtype=torch.float64)
        self.power, self.flags = 1.0, {"square": False}
        self.steps: list[Any] = [torch.tanh]
        self.tensors = [torch.ones(D, dtype=torch.float64)]
        self.fn: Callable[[Tensor], Tensor] = torch.sin
        self.options = Options()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.e(x)) * self.scale * self.keep * self.cache + self.shift
        h = self.act(self.a(h)) * self.plain * self.tensors[0] * self.power
        for step in self.steps:
            h = step(h)
        h = h**2 if self.flags["square"] else h
        return self.u(self.fn(self.b(h)) * SCALES["now"] * GAIN * self.options.gain)


class Options:
    def __init__(self) -> None:
        self.gain = 1.0


class Gated(nn.Module):
    """What a gated layer looks like, with a scale that only sometimes is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(D, D) for _ in range(3))
        self.act_fn: Any = F.silu
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.scale


class GatedMLP(Gated):
    pass


class LearnedMLP(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self._buffers["scale"]
        self.scale = nn.Parameter(torch.tensor(1.0))


class PlainMLP(Gated):
    def __init__(self) -> None:
        super().__init__()
        del self._buffers["scale"]
        self.scale = torch.ones((), dtype=torch.float64)


class MyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.is_causal, self.scaling = nn.Linear(D, 3 * D), True, None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=self.scaling)
        return x + y.transpose(1, 2).flatten(2)


class Inner(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.e, self.inner, self.u = nn.Embedding(V, D), inner, nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.u(self.inner(self.e(x)))


def module_and_data(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double(), torch.randint(0, V, (3, T)), torch.randint(0, V, (3, T))


def truth(m: nn.Module, x: Tensor, y: Tensor, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    """H v of the mean loss by double backward of the module itself, in eval mode."""
    modes = [(part, part.training) for part in m.modules()]
    frozen = [p for p in m.parameters() if not p.requires_grad]
    m.eval()
    for p in frozen:
        p.requires_grad_(True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = F.cross_entropy(m(x).flatten(0, 1), y.flatten())
    names, parameters = zip(*m.named_parameters(), strict=True)
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    inner = sum((g * vectors[name]).sum() for name, g in zip(names, first, strict=True))
    found = torch.autograd.grad(inner, parameters, allow_unused=True, materialize_grads=True)
    for p in frozen:
        p.requires_grad_(False)
    for part, training in modes:
        part.training = training
    return dict(zip(names, found, strict=True))

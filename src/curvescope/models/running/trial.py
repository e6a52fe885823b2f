"""Whether something computes what a submodule computes: both are tried, on its own numbers and on others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import prod

import torch
from torch import Tensor, nn

from curvescope.core.seeds import drawn_on, generator
from curvescope.models.running.exchange import Change, evaluation, exchanged, locked


def rounding(like: Tensor) -> float:
    """By how much of the largest output two ways to compute it may differ."""
    if like.dtype == torch.float64:
        return 1e-5  # eager attention may use float32 inside
    exact = like.device.type != "cuda" or torch.get_float32_matmul_precision() == "highest"
    return 1e-4 if like.dtype == torch.float32 and exact else 2e-2


def agrees(part: nn.Module, ours: Callable[..., Tensor], *, sequences: bool = False) -> bool:
    """Whether both give the same on random inputs, at the part's own numbers and at others.

    Args:
        part: A submodule that takes one tensor.
        ours: A function of that tensor.
        sequences: Two sequences of five rows (2, 5, d), else eight rows of all sizes (8, d).
    """
    like = next(part.parameters(), None)
    dtype, device = (torch.float64, "cpu") if like is None else (like.dtype, like.device)
    draws = count()

    def random(*shape: int) -> Tensor:
        source = generator(0, next(draws), device=drawn_on(prod(shape), device))
        options = {"generator": source, "dtype": torch.float64, "device": source.device}
        return torch.randn(shape, **options).to(device, dtype)

    width = next((p.shape[-1] for p in part.parameters() if p.dim()), 8)
    sizes = torch.logspace(-2, 4, 8, dtype=torch.float64)[:, None].to(device, dtype)
    x = random(2, 5, width) if sequences else random(8, width) * sizes
    others = [
        Change(held, name, random(*t.shape) / (t.shape[-1] ** 0.5 if sequences and t.dim() > 1 else 1))
        for child in part.modules()
        for held in (child._parameters, child._buffers)
        for name, t in held.items()
        if t is not None and t.is_floating_point()
    ]
    return _same(part, ours, x) and (not others or _same(part, ours, x, others))


@torch.no_grad()
def _same(
    part: nn.Module, ours: Callable[..., Tensor], x: Tensor, changes: list[Change] | None = None
) -> bool:
    try:
        with locked(part), exchanged([*evaluation(part), *(changes or [])]):
            theirs, found = part(x), ours(x)
    except Exception:  # it has another form, or expects other inputs
        return False
    if not isinstance(theirs, Tensor) or theirs.shape != found.shape:
        return False
    size = theirs.abs().amax(-1).clamp_min(1e-30)
    return bool(((theirs - found).abs().amax(-1) <= rounding(theirs) * size).all())

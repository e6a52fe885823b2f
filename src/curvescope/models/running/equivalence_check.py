"""Compare two ways to compute a submodule, at its own parameters and at random ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from math import prod

import torch
from torch import Tensor, nn

from curvescope.core.seeds import drawn_on, generator
from curvescope.models.running.patching import Change, evaluation, locked, patched


def rounding(like: Tensor) -> float:
    """Return the allowed difference of two ways to compute an output, relative to its largest entry."""
    if like.dtype == torch.float64:
        return 1e-5  # eager attention may use float32 inside
    exact = like.device.type != "cuda" or torch.get_float32_matmul_precision() == "highest"
    return 1e-4 if like.dtype == torch.float32 and exact else 2e-2


def agrees(part: nn.Module, replacement: Callable[..., Tensor], *, sequences: bool = False) -> bool:
    """Return True if both give the same outputs, at the part's own parameters and at random ones.

    Args:
        part: A submodule that takes one tensor.
        replacement: A function of that tensor.
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
    other_values = [
        Change(tensors, name, random(*t.shape) / (t.shape[-1] ** 0.5 if sequences and t.dim() > 1 else 1))
        for child in part.modules()
        for tensors in (child._parameters, child._buffers)
        for name, t in tensors.items()
        if t is not None and t.is_floating_point()
    ]
    return _same(part, replacement, x) and (not other_values or _same(part, replacement, x, other_values))


@torch.no_grad()
def _same(
    part: nn.Module, replacement: Callable[..., Tensor], x: Tensor, changes: list[Change] | None = None
) -> bool:
    try:
        with locked(part), patched([*evaluation(part), *(changes or [])]):
            expected, output = part(x), replacement(x)
    except Exception:  # the user's code may raise anything
        return False
    if not isinstance(expected, Tensor) or expected.shape != output.shape:
        return False
    size = expected.abs().amax(-1).clamp_min(1e-30)
    return bool(((expected - output).abs().amax(-1) <= rounding(expected) * size).all())

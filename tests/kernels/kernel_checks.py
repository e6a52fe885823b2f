"""Shared by the tests of the kernels: a function and its plain formula through two derivatives."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

RUNS_TRITON = importlib.util.find_spec("triton") is not None and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


WITHOUT = pytest.mark.skipif(not RUNS_TRITON, reason="needs Triton, and CUDA or TRITON_INTERPRET=1")
BACKENDS = ["torch", pytest.param("triton", marks=[pytest.mark.cuda, WITHOUT])]


def needs_triton(test: Callable) -> Callable:
    """Marks a test that runs on a card, or in Triton's interpreter."""
    return pytest.mark.cuda(WITHOUT(test))


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Leaves with standard normal entries."""
    source = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(*shape, generator=source, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype) for t in drawn]


def leaves(tensors: Sequence[Tensor], dtype: torch.dtype | None = None, device: str = "cpu") -> list[Tensor]:
    """Copies that require gradients."""
    return [t.detach().to(device, dtype or t.dtype).clone().requires_grad_() for t in tensors]


def two_derivatives(
    f: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    directions: Sequence[Tensor],
    *,
    batched: bool = False,
) -> list[Tensor | None]:
    """y, its gradients, and the gradients of ⟨directions, gradients⟩ in the cotangent and the inputs.

    With `batched` the directions are three at once.
    """
    g = cotangent.detach().clone().requires_grad_()
    y = f(*inputs)
    first = torch.autograd.grad(y, inputs, g, create_graph=True)
    if batched:
        directions = [torch.stack([v, -2 * v, v * v]) for v in directions]
    second = torch.autograd.grad(first, [g, *inputs], directions, allow_unused=True, is_grads_batched=batched)
    return [y, *first, *second]


def agree(found: Sequence[Tensor | None], want: Sequence[Tensor | None], tolerance: float) -> None:
    """Relative distance of every pair; a missing tensor is zero."""
    assert len(found) == len(want)
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        if a is None or b is None:
            left = b if a is None else a
            assert left is None or not left.any(), f"number {i} is missing"
            continue
        assert a.shape == b.shape
        assert torch.isfinite(a).all(), f"number {i} is not finite"
        distance = (a.detach().cpu().double() - b.detach().cpu().double()).norm()
        assert distance <= tolerance * (1 + b.detach().double().norm().cpu()), (
            f"number {i}: off by {distance}"
        )

"""Attention with PyTorch's signature: every derivative against plain float64, and PyTorch's own semantics."""

from __future__ import annotations

import pytest
import sdpa_grid
import torch
from torch import Tensor

from curvescope.kernels.attention import sdpa as entry

ALL = sdpa_grid.cases(2400)
FEW = 200


@pytest.fixture(params=["kernels", "plain", "auto"])
def path(request, monkeypatch) -> str:
    """Both ways to compute attention, whatever the size."""
    monkeypatch.setattr(entry, "PATH", request.param)
    return request.param


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(B=2, H=2, Lq=5, Lk=7, d=4, dv=3) -> list[Tensor]:
    shapes = [(B, H, Lq, d), (B, H, Lk, d), (B, H, Lk, dv)]
    return [draw(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


@pytest.mark.parametrize("start", range(0, FEW, 25))
def test_derivatives_are_those_of_plain_float64(start, path):
    check(ALL[start : start + 25])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FEW, len(ALL), 100))
def test_derivatives_are_those_of_plain_float64_on_the_whole_grid(start, path):
    check(ALL[start : start + 100])


def check(cases: list[sdpa_grid.Case]) -> None:
    errors = {str(case): sdpa_grid.error(case) for case in cases}
    bounds = {str(case): sdpa_grid.BOUND[case.dtype] for case in cases}
    assert {name: e for name, e in errors.items() if not e <= bounds[name]} == {}

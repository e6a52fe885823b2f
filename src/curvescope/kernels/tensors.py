"""Tensors that may be missing, and the precision of arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def given(t: Tensor | None) -> Tensor:
    """Narrow `Tensor | None` to `Tensor`."""
    assert t is not None
    return t


def plus(u: Tensor | None, v: Tensor | None) -> Tensor | None:
    """u + v; None counts as zero."""
    return v if u is None else u if v is None else u + v


def widen(t: Tensor) -> Tensor:
    """Convert to at least single precision, the precision of all arithmetic here."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t

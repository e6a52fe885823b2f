"""Tensors that may be missing, and the precision of arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def given(t: Tensor | None) -> Tensor:
    """t, which is there: only a bug of ours could have dropped it."""
    assert t is not None
    return t


def plus(u: Tensor | None, v: Tensor | None) -> Tensor | None:
    """u + v, where None is zero."""
    return v if u is None else u if v is None else u + v


def widen(t: Tensor) -> Tensor:
    """At least single precision, which is what all arithmetic is done in."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t

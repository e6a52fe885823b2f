"""Random numbers of a given source, for tests."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(source: torch.Generator, *shape: int) -> Tensor:
    """Standard normal float64 numbers."""
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def whole_number(source: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=source))

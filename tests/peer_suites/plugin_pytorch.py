"""PyTorch's tests of attention with our function behind theirs: `pytest -p plugin_pytorch`.

They need the package expecttest. Tests of nested tensors, and those that call the fused kernels by name, do
not come here.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.nn.functional as F
from harness import Harness, ours
from torch import Tensor

from curvescope.nn.functional import scaled_dot_product_attention


@wraps(scaled_dot_product_attention)
def attention(*args: Any, **kwargs: Any) -> Tensor:
    return ours(scaled_dot_product_attention(*args, **kwargs))


F.scaled_dot_product_attention = attention


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Harness([]))

"""PyTorch's own Transformer layers have a fast path: it has no derivatives, and it gives something else.

Where no gradient is recorded, `nn.TransformerEncoder` and its layers may take a fused path. Its outputs at
padded positions are zeros, or missing, where the path with derivatives has numbers. Curvature is that of the
path with derivatives, so values are taken from it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class SlowPath(TorchFunctionMode):
    """Changes nothing; PyTorch takes no fast path while somebody looks at its functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def slow_path(module: nn.Module) -> AbstractContextManager[Any]:
    """What a pass through a module runs in: `SlowPath` where a part of it has a fast one."""
    found = any(isinstance(part, WITH_FAST_PATH) for part in module.modules())
    return SlowPath() if found else nullcontext()

"""Operations and bytes of collective messages, counted as they are dispatched."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Counting(TorchDispatchMode):
    """Inside, `messages` by kind, their `bytes` of one rank's share, and `flops` of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=found)
        name = str(packet)
        if name.startswith("c10d."):
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.messages[name] += 1
            self.bytes[name] += min(sizes)
        return found

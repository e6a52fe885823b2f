"""A closure that is the same loss when it is called again: the same random numbers, and statistics kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from curvescope.optim.objective import Closure, Made


@final
class Replay:
    """A closure. Its second call draws what torch's generators drew in the first, and they go on from there.

    Batch norm learns its running statistics in the first call alone. Random numbers of Python and NumPy, of
    generators of one's own, and batches that a closure fetches are as they come.
    """

    def __init__(self, closure: Closure, device: torch.device):
        self._closure = closure
        self._generators = _generators(device)
        self._states: list[Tensor] | None = None

    def __call__(self) -> Made:
        now = [g.get_state() for g in self._generators]
        if self._states is None:
            self._states = now
            return self._closure()
        try:
            self._set(self._states)
            with kept_statistics():
                return self._closure()
        finally:
            self._set(now)

    def _set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    """Torch's own, of the CPU and of a GPU."""
    found = [torch.default_generator]
    if device.type == "cuda":
        at = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[at])
    return found


@contextmanager
def kept_statistics() -> Iterator[None]:
    """Running statistics of every normalization that is called inside are, after it, as they were."""
    before: dict[int, tuple[Tensor, Tensor]] = {}

    def remember(module: nn.Module, _: Any) -> None:
        if isinstance(module, _NormBase) and module.training:
            before.update({id(b): (b, b.clone()) for b in module.buffers() if id(b) not in before})

    handle = register_module_forward_pre_hook(remember)
    try:
        yield
    finally:
        handle.remove()
        for buffer, was in before.values():
            buffer.copy_(was)

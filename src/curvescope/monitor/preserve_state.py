"""Preserve the state of a training loop around a measurement: random numbers, modes, gradients, buffers.

Products run the user's own module in eval mode, at leaves of their own, and put everything back
(docs/architecture.md). A module's own code may still draw random numbers or write to a buffer meanwhile;
`preserve_state` undoes that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.models.model import Model


@contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Restore after the block everything that training depends on.

    Random states of Python, NumPy, PyTorch and the module's GPU; the mode of every submodule; `.grad` and
    `requires_grad` of every parameter; every buffer.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    states = _random_states(device)
    modes = {part: part.training for part in module.modules()}
    gradients = {p: (p.grad, p.requires_grad) for p in module.parameters()}
    buffers = [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    copies = {id(t): t.detach().clone() for _, own in buffers for t in own.values() if t is not None}
    try:
        with torch.autocast(device.type, enabled=False):  # ours would be rounded too
            yield
    finally:
        _put_back(modes, gradients)
        _put_back_buffers(buffers, copies)
        _set_random_states(device, states)


def synchronize(model: Model) -> None:
    """Wait until a GPU has finished the work of the training loop, whose time is not ours."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _random_states(device: torch.device) -> tuple[object, ...]:
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def _set_random_states(device: torch.device, states: tuple) -> None:
    python, numpy, cpu, gpu = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu, device)


def _put_back(
    modes: dict[nn.Module, bool], gradients: dict[nn.Parameter, tuple[Tensor | None, bool]]
) -> None:
    for part, training in modes.items():
        if part.training != training:
            part.training = training
    for p, (grad, requires_grad) in gradients.items():
        if p.grad is not grad:
            p.grad = grad
        if p.requires_grad != requires_grad:
            p.requires_grad_(requires_grad)


def _put_back_buffers(
    buffers: list[tuple[nn.Module, dict[str, Tensor | None]]], copies: dict[int, Tensor]
) -> None:
    """Write only where something differs: autograd notices writing."""
    for part, own in buffers:
        for name, tensor in own.items():
            if part._buffers.get(name) is not tensor:
                part._buffers[name] = tensor
            if tensor is not None and not torch.equal(tensor, copies[id(tensor)]):
                with torch.no_grad():
                    tensor.copy_(copies[id(tensor)])

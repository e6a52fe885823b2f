"""Implementations of attention that are measured, and four computations with each.

A contender is a function of query, key and value. It raises an error if it does not support a computation;
the table shows the first line of that error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvescope.core.seeds import generator
from curvescope.nn import functional

Derivative = Literal["forward", "backward", "jvp", "double backward"]
DERIVATIVES: tuple[Derivative, ...] = ("forward", "backward", "jvp", "double backward")
MATH = "math path"
"""PyTorch's math path, the unit of all times."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Query, key, value (1, H, L, d), a cotangent, three tangents, and the mask."""

    tensors: tuple[Tensor, Tensor, Tensor]
    cotangent: Tensor
    tangents: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    is_causal: bool


def draw(
    heads: int, length: int, width: int, mask: str, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    """Gaussian tensors; a boolean mask shows 80 % of the keys, an additive one is Gaussian."""
    source = generator(seed, length, width)
    size = (1, heads, length, width)
    q, k, v, g, *tangents = (
        torch.randn(size, generator=source, dtype=torch.float32).to(device, dtype) for _ in range(7)
    )
    chosen: Tensor | None = None
    if mask == "boolean":
        chosen = (torch.rand(length, length, generator=source) < 0.8) | torch.eye(length, dtype=torch.bool)
    elif mask == "additive":
        chosen = torch.randn(length, length, generator=source).to(dtype)
    chosen = None if chosen is None else chosen.to(device)
    return Inputs((q, k, v), g, (tangents[0], tangents[1], tangents[2]), chosen, mask == "causal")


# ------------------------------------------------------------------------------------------- attention


def ours(x: Inputs) -> Attend:
    """`curvescope.nn.functional.scaled_dot_product_attention`."""
    return partial(functional.scaled_dot_product_attention, attn_mask=x.mask, is_causal=x.is_causal)


def fused(x: Inputs) -> Attend:
    """PyTorch's function with the kernel that PyTorch chooses."""
    return partial(F.scaled_dot_product_attention, attn_mask=x.mask, is_causal=x.is_causal)


def jvp_flash(x: Inputs) -> Attend:
    """The package jvp-flash-attention, called through its entry point for forward mode.

    Its mask check is off, because the check synchronizes the device and rejects additive masks that hide no
    key.
    """
    theirs: Any = import_module("jvp_flash_attention.jvp_attention").JVPAttn
    q = x.tensors[0]
    mask = None if x.mask is None else x.mask.expand(*q.shape[:2], *x.mask.shape).contiguous()
    return partial(theirs.fwd_dual, attn_mask=mask, causal=x.is_causal, verify_attn_mask=False)


def _written_out(x: Inputs) -> Attend:
    """Plain attention in operations that a compiler can fuse."""
    bias = None if x.mask is None or x.mask.dtype == torch.bool else x.mask
    hidden = ~x.mask if x.mask is not None and x.mask.dtype == torch.bool else None
    L = x.tensors[0].shape[-2]
    if x.is_causal:
        hidden = torch.ones(L, L, dtype=torch.bool, device=x.tensors[0].device).triu(1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores if bias is None else scores + bias
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ v

    return attend


COMPILED = "math path, compiled"
CONTENDERS: dict[str, Callable[[Inputs], Attend]] = {
    "ours": ours,
    MATH: fused,  # inside `allowed` it takes the math path
    "PyTorch fused": fused,
    "jvp-flash-attention": jvp_flash,
    COMPILED: _written_out,
}


def allowed(name: str) -> AbstractContextManager[object]:
    """Return the context in which a contender runs; for the math path it disables PyTorch's other kernels."""
    return sdpa_kernel(SDPBackend.MATH) if name == MATH else nullcontext()


def absent(name: str, device: torch.device) -> str | None:
    """Return why a contender cannot be measured on this machine, or None if it can."""
    if name == "jvp-flash-attention":
        if device.type != "cuda":
            return "jvp-flash-attention needs CUDA: it consists of Triton kernels"
        if find_spec("jvp_flash_attention") is None:
            return "jvp-flash-attention is not installed"
    return None


# ---------------------------------------------------------------------------------------- computations


def computation(name: str, derivative: Derivative, x: Inputs) -> Callable[[], Sequence[Tensor]]:
    """Return the function that is timed: a derivative of a contender, with everything before it."""
    attend: Any = CONTENDERS[name](x)
    compiled = partial(torch.compile, dynamic=False) if name == COMPILED else lambda f: f
    if derivative == "jvp":
        forward = compiled(partial(torch.func.jvp, attend))
        return lambda: forward(x.tensors, x.tangents)
    attend = compiled(attend)
    return lambda: _reverse(attend, x, derivative)


def _reverse(attend: Attend, x: Inputs, derivative: Derivative) -> Sequence[Tensor]:
    """O; O and its gradients; or O and the derivatives of ⟨gradients, tangents⟩."""
    q, k, v = (t.detach().requires_grad_() for t in x.tensors)
    o = attend(q, k, v)
    if derivative == "forward":
        return (o.detach(),)
    again = derivative == "double backward"
    first = torch.autograd.grad(o, (q, k, v), x.cotangent, create_graph=again)
    if not again:
        return first
    return torch.autograd.grad(first, (q, k, v), x.tangents)

"""Forward mode inside forward mode: a `jvp` of an autograd function whose result has a `jvp` again.

While PyTorch runs the `jvp` of an autograd function, forward mode is switched off, so a derivative of its
result would silently be missing. `below` enables it again for the outer levels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from curvescope.kernels.backends import is_batched, transformed


def below(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` of the primals, recorded by every level of forward mode but the innermost.

    Call it from the `jvp` of an autograd function that has its own `vmap` rule: the innermost transform is
    then the one that called the `jvp`.
    """
    if not transformed():
        with _set_fwd_grad_enabled(True):
            return function(*(_primal(x) for x in args))
    innermost = retrieve_current_functorch_interpreter()
    assert innermost.key() == TransformType.Jvp, "a batch was left in the jvp of an autograd function"
    level = innermost.level()
    lower = [_unwrap_for_grad(x, level) if isinstance(x, Tensor) else x for x in args]
    with torch.enable_grad(), _set_fwd_grad_enabled(True), innermost.lower():
        result = function(*lower)
    if isinstance(result, Tensor):
        return _wrap_for_grad(result, level)
    return tuple(_wrap_for_grad(x, level) if isinstance(x, Tensor) else x for x in result)


def _primal(x: Any) -> Any:
    """A tensor without its tangent, in the graph of reverse mode as before."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or is_batched(x):
        return x
    return torch.ops.aten._fw_primal(x, 0)

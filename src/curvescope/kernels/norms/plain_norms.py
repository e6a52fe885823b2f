"""torch's norms as plain arithmetic, which can be differentiated any number of times.

Three reverse passes are right for plain arithmetic and silently wrong through torch's `layer_norm`, and
through its `batch_norm` and `instance_norm` where these use the statistics of the batch (relative errors of
0.2 to 0.7, torch 2.13, CPU; `rms_norm` and `group_norm` are right there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvescope.core.errors import CurvescopeError
from curvescope.core.tensors import graph_nodes
from curvescope.kernels.tensors import given, widen

# For inputs in half precision, PyTorch 2.6 takes the ε of that precision (0.008 for bfloat16) and later
# versions that of float32. The result for 10⁻³ tells: about 0.01 or about 1.
_PROBE = torch.tensor([1e-3], dtype=torch.bfloat16, device="cpu")
EPS_OF_THE_INPUT = float(torch.rms_norm(_PROBE, (1,))) < 0.5
FUSED = ("LayerNormBackward", "BatchNormBackward", "RmsNormBackward", "GroupNormBackward")


@contextmanager
def plain_norms() -> Iterator[None]:
    """Replace torch's norms by plain arithmetic, which can be differentiated any number of times. This
    covers calls from Python (modules, `torch.nn.functional`, `torch.layer_norm` and similar), but not
    scripted code. Running statistics are read, never updated.
    """
    with _PlainNorms():
        yield


def refuse_fused_norms(s: Tensor) -> None:
    """Raise if the graph of s contains a norm that was not replaced, from scripted code or torch.ops."""
    for node in graph_nodes(s):
        if any(word in type(node).__name__ for word in FUSED):
            raise CurvescopeError(
                f"the module calls a norm of torch's ({type(node).__name__}) where it cannot be replaced, "
                "and its third derivative is wrong",
                hint="call torch.nn.functional.layer_norm from Python, not from scripted code",
            )


def _normalized(
    x: Tensor,
    axes: Sequence[int],
    eps: float,
    *,
    center: bool = True,
    moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """(x − mean)/√(var + ε), moments over `axes` unless given; x/√(mean x² + ε) if not `center`."""
    if moments is not None:
        return (x - moments[0]) * torch.rsqrt(moments[1] + eps)
    x = x - x.mean(tuple(axes), keepdim=True) if center else x
    return x * torch.rsqrt((x * x).mean(tuple(axes), keepdim=True) + eps)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _channels(t: Tensor | None, x: Tensor) -> Tensor | None:
    """One number per channel, shaped to broadcast along axis 1 of x."""
    return None if t is None else t.reshape(1, -1, *[1] * (x.dim() - 2))


def plain_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """F.layer_norm in plain arithmetic."""
    x, gain, shift = (None if t is None else widen(t) for t in (input, weight, bias))
    y = _affine(_normalized(given(x), range(-len(normalized_shape), 0), eps), gain, shift)
    return y.to(_output_dtype(input))


def plain_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """F.rms_norm in plain arithmetic."""
    x, gain = widen(input), None if weight is None else widen(weight)
    eps = default_eps(input) if eps is None else eps
    y = _affine(_normalized(x, range(-len(normalized_shape), 0), eps, center=False), gain, None)
    return y.to(_output_dtype(input))


def default_eps(input: Tensor) -> float:
    """Default ε of F.rms_norm: of the precision of its arithmetic (single for half), or of its input."""
    if EPS_OF_THE_INPUT:
        return torch.finfo(input.dtype).eps
    return torch.finfo(widen(input[:0] if input.dim() else input).dtype).eps


def _output_dtype(input: Tensor) -> torch.dtype:
    """Return the type of the output: that of the input, or single precision under CUDA autocast."""
    single = input.is_cuda and torch.is_autocast_enabled("cuda") and input.dtype != torch.float64
    return torch.float32 if single else input.dtype


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    groups = input.reshape(input.shape[0], num_groups, -1)
    y = _normalized(groups, (2,), eps).reshape(input.shape)
    return _affine(y, _channels(weight, input), _channels(bias, input))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    mean, var = _channels(running_mean, input), _channels(running_var, input)
    moments = None if training or mean is None or var is None else (mean, var)
    y = _normalized(input, [0, *range(2, input.dim())], eps, moments=moments)
    return _affine(y, _channels(weight, input), _channels(bias, input))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    mean, var = _channels(running_mean, input), _channels(running_var, input)
    moments = None if use_input_stats or mean is None or var is None else (mean, var)
    y = _normalized(input, range(2, input.dim()), eps, moments=moments)
    return _affine(y, _channels(weight, input), _channels(bias, input))


def _weights_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `norm` to take its arguments in the order of torch.batch_norm and torch.instance_norm."""

    def reordered(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        return norm(input, running_mean, running_var, weight, bias, *rest, **named)

    return reordered


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: plain_layer_norm,
    torch.layer_norm: plain_layer_norm,
    F.rms_norm: plain_rms_norm,
    torch.rms_norm: plain_rms_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _weights_first(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _weights_first(_instance_norm),
}


class _PlainNorms(TorchFunctionMode):
    """Redirect calls of torch's norms to the functions above."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call: Callable[..., Any] = _REPLACED.get(func) or func
        return call(*args, **(kwargs or {}))

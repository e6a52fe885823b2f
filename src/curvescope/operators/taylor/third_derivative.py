"""Third derivatives of a problem along a direction: how curvature itself changes.

    ∇³L[u,u,·] = ∇_θ (uᵀ H(θ) u),     ∇³L[u,u,u] = d/dt uᵀ H(θ + t u) u at t = 0,

so that L(θ + t u) = L + t ∇L·u + (t²/2) uᵀHu + (t³/6) ∇³L[u,u,u] + O(t⁴).

Three reverse passes are right for plain arithmetic and silently wrong through torch's `layer_norm`, and
through its `batch_norm` and `instance_norm` where these use the statistics of the batch (relative errors of
0.2 to 0.7, torch 2.13, CPU; `rms_norm` and `group_norm` are right there). Hence every norm of the module is
replaced by its own arithmetic while the graph is built: `written_out_norms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.core.graph import nodes, once_differentiable_node
from curvescope.core.result import Result
from curvescope.data.batches import Batch
from curvescope.models.choice.params import Params
from curvescope.problem import Leaves, Problem, check_finite


@dataclass(frozen=True)
class ThirdDerivative(Result):
    """∇³L along a direction u."""

    value: float  # ∇³L[u,u,u]
    vector: np.ndarray  # ∇³L[u,u,·], (n,), block after block
    sizes: dict[str, int]  # entries of each block, in the order of `vector`


def third_derivative(problem: Problem, u: Tensor, *blocks: Params) -> ThirdDerivative:
    """∇³L[u,u,u] and ∇³L[u,u,·] over the blocks that match the globs (all of them without one).

    `u` is a vector (n,) of `problem.space(*blocks)`, and so is ∇³L[u,u,·]. Batches are read once, one at a
    time, and the model is left as it was. Time and memory are those of a few Hessian-vector products.
    """
    if not isinstance(problem, Problem):
        raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
    space = problem.space(*blocks)
    _check_direction(u, space)
    with torch.inference_mode(False), torch.enable_grad():  # whatever the caller is in
        direction = space.scatter(u.detach())
        total = torch.zeros(space.size, dtype=space.dtype, device=space.device)
        for batch in problem.placed_batches("third derivative"):
            total += space.gather(_batch_third(problem, batch, direction))
    total /= problem.num_terms
    check_finite(total, problem)
    sizes = {block.name: block.size for block in space}
    return ThirdDerivative(float(total @ u.detach()), total.cpu().numpy(), sizes)


@contextmanager
def written_out_norms() -> Iterator[None]:
    """Inside, torch's norms are plain arithmetic, which can be differentiated any number of times.

    It reaches what Python code calls (modules, `torch.nn.functional`, `torch.layer_norm` and its like), not
    what is scripted. Running statistics are read, never written.
    """
    with _WrittenOut():
        yield


def _batch_third(problem: Problem, batch: Batch, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Σ over one batch's terms of ∇³ℓ[u,u,·], by parameter; not divided."""

    def loss(leaves: Leaves) -> Tensor:
        with written_out_norms():
            return problem.loss.sum(problem.outputs(batch, leaves), batch.targets, batch.weights)

    leaves, s = problem.differentiable(tuple(direction), loss, lambda s: [s])
    for _ in range(2):
        tree = _reverse(s, leaves, create_graph=True)
        if not tree:
            return {}
        s = torch.stack([(g * direction[name]).sum() for name, g in tree.items()]).sum()
    return _reverse(s, leaves, create_graph=False)


def _reverse(s: Tensor, leaves: Mapping[str, Tensor], *, create_graph: bool) -> dict[str, Tensor]:
    """Gradients of s, by name; a leaf that it does not depend on is missing."""
    if not s.requires_grad:
        return {}
    _refuse_wrong_nodes(s)
    try:
        found = torch.autograd.grad(s, list(leaves.values()), create_graph=create_graph, allow_unused=True)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("derivative", "double backward", "checkpoint")):
            raise
        raise CurvescopeError(
            f"the module cannot be differentiated three times: {str(error).splitlines()[0]}",
            hint="switch it to plain attention, e.g. attn_implementation='eager', and turn compilation and "
            "gradient checkpointing off",
        ) from error
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


def _check_direction(u: Any, space: ParamSpace) -> None:
    if not isinstance(u, Tensor) or u.shape != (space.size,):
        got = tuple(u.shape) if isinstance(u, Tensor) else type(u).__name__
        raise ShapeError(
            f"expected a direction u of {space.size} entries, got {got}",
            hint="problem.space(*blocks).gather(tree) makes a vector from parameters",
        )
    if u.dtype != space.dtype or u.device.type != space.device.type:
        raise ShapeError(
            f"expected {space.dtype} on {space.device}, got {u.dtype} on {u.device}",
            hint="u.to(dtype=problem.dtype, device=problem.device)",
        )


FUSED = ("LayerNormBackward", "BatchNormBackward", "RmsNormBackward", "GroupNormBackward")


def _refuse_wrong_nodes(s: Tensor) -> None:
    """Raise when the graph holds a norm that was not replaced, or an operation differentiable only once.

    The first comes from scripted code and torch.ops, the second from `@once_differentiable`; torch would take
    a wrong third derivative of the one and silently count the other as constant.
    """
    if once_differentiable_node(s) is not None:
        raise CurvescopeError(
            "the module cannot be differentiated three times: an operation is @once_differentiable",
            hint="write its backward pass in operations that torch can differentiate",
        )
    for node in nodes(s):
        if any(word in type(node).__name__ for word in FUSED):
            raise CurvescopeError(
                f"the module calls a norm of torch's ({type(node).__name__}) where it cannot be replaced, "
                "and its third derivative is wrong",
                hint="call torch.nn.functional.layer_norm from Python, not from scripted code",
            )


# --------------------------------------------------------------------------------------- norms, written out


def _normalised(
    x: Tensor,
    axes: Sequence[int],
    eps: float,
    *,
    centre: bool = True,
    moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """(x − mean)/√(var + ε), moments over `axes` unless given; x/√(mean x² + ε) if not `centre`."""
    if moments is not None:
        return (x - moments[0]) * torch.rsqrt(moments[1] + eps)
    x = x - x.mean(tuple(axes), keepdim=True) if centre else x
    return x * torch.rsqrt((x * x).mean(tuple(axes), keepdim=True) + eps)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _channels(t: Tensor | None, x: Tensor) -> Tensor | None:
    """One number per channel, shaped to broadcast along axis 1 of x."""
    return None if t is None else t.reshape(1, -1, *[1] * (x.dim() - 2))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _affine(_normalised(input, range(-len(normalized_shape), 0), eps), weight, bias)


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _affine(_normalised(input, range(-len(normalized_shape), 0), eps, centre=False), weight, None)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    groups = input.reshape(input.shape[0], num_groups, -1)
    y = _normalised(groups, (2,), eps).reshape(input.shape)
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
    y = _normalised(input, [0, *range(2, input.dim())], eps, moments=moments)
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
    y = _normalised(input, range(2, input.dim()), eps, moments=moments)
    return _affine(y, _channels(weight, input), _channels(bias, input))


def _weights_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`norm` with its arguments in the order of torch.batch_norm and torch.instance_norm."""

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
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _weights_first(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _weights_first(_instance_norm),
}


class _WrittenOut(TorchFunctionMode):
    """Calls of torch's norms go to the functions above."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call: Callable[..., Any] = _REPLACED.get(func) or func
        return call(*args, **(kwargs or {}))

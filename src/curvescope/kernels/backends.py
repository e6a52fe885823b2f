"""Choice of the backend, detection of recorded graphs, and several directions at once.

A second derivative is taken many times through one retained graph, one direction after the other or several
at once: `torch.autograd.grad(…, is_grads_batched=True)` calls a backward with batched tensors of an older
kind than those of torch.vmap. Neither kind can be passed to a Triton kernel or modified in place. So kernels
take all directions on a leading axis k, and `launch` moves them there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from curvescope.core.errors import CurvescopeError, MissingExtra, ShapeError, UsageError, warn
from curvescope.kernels.autograd import Function
from curvescope.kernels.tensors import given

Backend = Literal["auto", "torch", "triton"]
Tensors = Sequence[Tensor | None]
Core = Callable[[Tensors, Tensors], Tensors]  # constants, directions (k, …) -> outputs (k, …)

_torch: Any = torch  # for names that torch does not declare
MAX_NESTING = 64  # nesting of batched backwards
_warned: set[str] = set()  # warnings issued in this process
_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@cache
def has_triton() -> bool:
    """Return True if Triton can be imported; it is not a requirement."""
    return find_spec("triton") is not None


def use_triton(backend: str, *tensors: Tensor | None) -> bool:
    """Return True if these inputs go to Triton: on `auto`, if all are on CUDA in at most single precision."""
    if backend not in get_args(Backend):
        raise UsageError(f"expected a backend of {', '.join(get_args(Backend))}, got {backend!r}")
    if backend == "torch":
        return False
    present = [t for t in tensors if t is not None]
    is_single = all(t.dtype in _SINGLE for t in present)
    if backend == "auto":
        return is_single and has_triton() and all(t.is_cuda for t in present)
    if not has_triton():
        raise MissingExtra("the triton backend needs the package triton", hint="use backend='torch'")
    if not is_single or not (interpreted() or all(t.is_cuda for t in present)):
        raise ShapeError(
            "expected CUDA tensors of float32, bfloat16 or float16 for Triton, got "
            + ", ".join(f"{str(t.dtype).removeprefix('torch.')} on {t.device.type}" for t in present),
            hint="use backend='auto'",
        )
    return True


def interpreted() -> bool:
    """Return True if Triton runs in its interpreter, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def recorded() -> bool:
    """Return True if the current computation may be differentiated: a graph is built, or forward mode
    is on.
    """
    return torch.is_grad_enabled() or forward_mode()


def forward_mode() -> bool:
    """Return True if forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Return True if a transform of torch.func is active; a batched backward is one."""
    return _torch._C._are_functorch_transforms_active()


def casting() -> bool:
    """Return True if autocast is on; PyTorch then chooses the dtypes, and the kernels are not used."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """Launch kernels on the device of t inside the context."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def num_programs(t: Tensor, rows: int) -> int:
    """Number of programs that share the rows of t: four for each multiprocessor, one wave."""
    units = torch.cuda.get_device_properties(t.device).multi_processor_count if t.is_cuda else 2
    return max(1, min(rows, 4 * units))


def launch(core: Core, constants: Tensors, directions: Tensors) -> Tensors:
    """Call `core` for one direction, or for all at once if they are batched.

    Args:
        core: Takes the constants, and the directions with a leading axis k; its outputs have that axis. It
            gets plain tensors, is not differentiated, and may modify its own results in place.
        constants: Tensors that do not depend on the direction; entries may be None.
        directions: Directions; entries may be None, but not all of them.
    """
    if transformed():
        return _Launch.apply(core, len(constants), *constants, *directions)
    if not any(is_batched(t) for t in directions):
        return _single(core, constants, directions)
    level = next(level_of(t) for t in directions if t is not None and is_batched(t))
    k = next(without_batch(t, level).shape[0] for t in directions if t is not None and is_batched(t))
    plain = [None if t is None else without_batch(t, level, k) for t in directions]
    return tuple(None if t is None else with_batch(t, level) for t in core(constants, plain))


def is_batched(t: Tensor | None) -> bool:
    """Return True if t belongs to a batched backward (`is_grads_batched`)."""
    return t is not None and _torch._C._functorch.is_legacy_batchedtensor(t)


def refuse_batched(t: Tensor) -> None:
    """Raise for a batched backward that builds a graph: Python Functions would lose the graph."""
    if torch.is_grad_enabled() and is_batched(t):
        raise UsageError(
            "expected a backward with create_graph=True to take one cotangent, got a batch of them",
            hint="call torch.autograd.grad once for each, without is_grads_batched",
        )


def refuse_third() -> None:
    """Raise if a third derivative would be recorded, because the kernels have only two."""
    if recorded() and not transformed():
        raise CurvescopeError(
            "a second derivative of these kernels was taken in order to differentiate it again",
            hint="use PyTorch's own functions for third derivatives, or leave out create_graph",
        )


def warn_of_third(what: str, cost: str = "") -> None:
    """Warn once per process that plain operations compute a third derivative."""
    if what not in _warned:
        _warned.add(what)
        warn(f"a third derivative of {what} is taken: it is computed by plain operations{cost}")


def plain_second(
    what: str, value: Callable[..., Tensor], args: Tensors, dy: Tensor, directions: Tensors
) -> Any:
    """The derivative of ⟨first, directions⟩ in dy and args, where first is that of ⟨value(args), dy⟩ in args.

    It can be differentiated any number of times. Arguments and directions may be None.
    """
    warn_of_third(what)
    present = [i for i, x in enumerate(args) if x is not None]

    values = [given(args[i]) for i in present]

    def full_value(*values: Tensor) -> Tensor:
        by_position = dict(zip(present, values, strict=True))
        return value(*(by_position.get(i) for i in range(len(args))))

    def first(dy: Tensor, *values: Tensor) -> Sequence[Tensor]:
        return pulled(full_value, values, dy)

    moves = [directions[i] for i in present]
    filled = [torch.zeros_like(x) if u is None else u for x, u in zip(values, moves, strict=True)]
    of_dy, *gradients = pulled(first, (dy, *values), filled)
    by_position = dict(zip(present, gradients, strict=True))
    return of_dy, *(by_position.get(i) for i in range(len(args)))


def pulled(function: Callable[..., Any], args: Sequence[Tensor], cotangents: Any) -> Sequence[Tensor]:
    """Vector-Jacobian product of all arguments."""
    return torch.func.vjp(function, *args)[1](
        cotangents if isinstance(cotangents, Tensor) else tuple(cotangents)
    )


def pushed(function: Callable[..., Any], args: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    """Jacobian-vector product by two vector-Jacobian products: forward mode cannot be nested everywhere."""
    outputs, pull = torch.func.vjp(function, *args)[:2]
    single = isinstance(outputs, Tensor)
    zeros = torch.zeros_like(outputs) if single else tuple(map(torch.zeros_like, outputs))
    (tangent,) = torch.func.vjp(pull, zeros)[1](tuple(tangents))
    return tangent


def level_of(t: Tensor) -> int:
    """Nesting level of batched backward passes at which t was batched.

    The level is read from the tensor, not from the thread: on a GPU a backward runs in autograd's own
    threads, which do not know the caller's level.
    """
    for level in range(1, MAX_NESTING + 1):
        if not is_batched(without_batch(t, level)):
            return level
    raise RuntimeError("batching rule not implemented: nested is_grads_batched")


def without_batch(t: Tensor, level: int, k: int = 1) -> Tensor:
    """Return the tensor with its batch as axis 0; an unbatched one gets an axis of k equal entries."""
    return _torch._remove_batch_dim(t, level, k, 0)


def with_batch(t: Tensor, level: int, axis: int = 0) -> Tensor:
    """Make an axis of a tensor its batch."""
    return _torch._add_batch_dim(t, axis, level)


def _single(core: Core, constants: Tensors, directions: Tensors) -> tuple[Tensor | None, ...]:
    outputs = core(constants, [None if t is None else t[None] for t in directions])
    return tuple(None if t is None else t[0] for t in outputs)


class _Launch(Function):
    """Call that torch.vmap can batch. It is marked as not differentiable; the surrounding Functions have
    derivatives.
    """

    @staticmethod
    def forward(core: Core, split: int, *tensors: Tensor | None) -> Any:
        return _single(core, tensors[:split], tensors[split:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        k, dims, core, split, tensors = info.batch_size, in_dims[2:], args[0], args[1], args[2:]
        if all(dim is None for dim in dims[:split]):
            pairs = zip(tensors[split:], dims[split:], strict=True)
            outputs = core(tensors[:split], [_to_front(t, dim, k) for t, dim in pairs])
        else:
            parts = [[_entry(t, dim, j) for t, dim in zip(tensors, dims, strict=True)] for j in range(k)]
            results = [_single(core, part[:split], part[split:]) for part in parts]
            outputs = [None if some[0] is None else torch.stack(some) for some in zip(*results, strict=True)]
        return tuple(outputs), tuple(None if t is None else 0 for t in outputs)


def _to_front(t: Tensor | None, dim: int | None, k: int) -> Tensor | None:
    """Move the batch axis to the front; a tensor without one is expanded without a copy."""
    if t is None:
        return None
    return t.expand(k, *t.shape) if dim is None else t.movedim(dim, 0)


def _entry(t: Tensor | None, dim: int | None, j: int) -> Tensor | None:
    return t if t is None or dim is None else t.select(dim, j)

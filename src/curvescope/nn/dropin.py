"""Complete models with every second derivative: our functions replace PyTorch's while a model runs.

A mode of PyTorch (`TorchFunctionMode`) sees each call of a function of torch in its thread, whatever class it
comes from. Calls of attention, norms, activations and cross-entropy go to `curvescope.nn.functional`, and
batch and instance norms, whose forward mode is wrong inside another derivative, are computed by plain
operations. Transformers (Hugging Face) with an attention other than "sdpa" get ours through their
configuration. Functions without a counterpart stay PyTorch's own, and are listed with the reason.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from threading import local
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from curvescope.core.errors import UsageError
from curvescope.kernels.tensors import widen
from curvescope.nn import functional

if TYPE_CHECKING:
    from curvescope.nn.hf import Attention

_PASSIVE = (nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict)
_FUNCTION = (types.FunctionType, types.BuiltinFunctionType)
_FRAMES = 12  # most stack frames between a call of torch and the calling module


@dataclass
class Replacements:
    """Replacements in a model by the two functions of this module; prints as a list.

    Attributes:
        replaced: Names of submodules, with the functions that are replaced in them.
        kept: Names of submodules or functions that stay PyTorch's own, with the reason.
        calls: Number of replaced calls of each function so far, including calls outside the model.
    """

    model: str
    replaced: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.replaced)} replaced, {len(self.kept)} kept"]
        for title, entries in (("replaced", self.replaced), ("kept", self.kept)):
            lines += [f"  {title}  {names}: {words}" for names, words in _grouped(entries)]
        return "\n".join(lines)

    __repr__ = __str__


def _grouped(entries: dict[str, str]) -> list[tuple[str, str]]:
    """Return names with their text; names that differ only in a number share one line, with their count."""
    groups = Counter((re.sub(r"\d+", "*", name), words) for name, words in entries.items())
    single = {(re.sub(r"\d+", "*", name), words): name for name, words in entries.items()}
    return [(f"{key[0]} ({n})" if n > 1 else single[key], key[1]) for key, n in groups.items()]


class twice_differentiable(ContextDecorator):
    """Give a model every second derivative inside the context: reverse and forward mode, in any order.

    Calls of the model and of everything else in this thread are replaced, so a loss inside is too. Other
    threads are not affected, except that a Hugging Face model with an attention other than "sdpa" uses our
    attention in all threads meanwhile. A layer that is recomputed by activation checkpointing needs the
    replacement during the backward pass: call `backward` inside, or, on CUDA, whose backward passes have
    their own threads, use `make_twice_differentiable`.

    Args:
        model: Module whose parts are listed and whose configuration is changed inside.

    Yields:
        A `Replacements`. The context restores everything at its end, also after errors.
    """

    def __init__(self, model: nn.Module):
        self.model = _checked(model)
        self._entered = local()

    def __enter__(self) -> Replacements:
        report, attention = _planned(self.model)
        with ExitStack() as stack:
            if attention is not None:
                stack.enter_context(attention.patched())
            stack.enter_context(Functions(report, self.model))
            self._entered.__dict__.setdefault("stacks", []).append(stack.pop_all())
        return report

    def __exit__(self, *error: Any) -> None:
        self._entered.stacks.pop().__exit__(*error)


def make_twice_differentiable(model: nn.Module) -> nn.Module:
    """Give a module every second derivative from now on, in all threads.

    Its class, parameters, hooks and `state_dict` stay; `forward` of each submodule becomes an attribute of
    the instance, which is pickled and copied with it. A function that no submodule calls, such as a loss
    outside of the model, stays PyTorch's. `torch.utils.checkpoint` may only recompute submodules.
    `curvescope.nn.replacements(model)` lists the replacements.

    Args:
        model: A module, changed in place.

    Returns:
        The module itself.
    """
    if replacements(_checked(model)) is not None:
        return model
    report, attention = _planned(model)
    if attention is not None:
        attention.exchange()
    for part in model.modules():
        if (part is model or not isinstance(part, _PASSIVE)) and not isinstance(part.forward, Forward):
            vars(part)["forward"] = Forward(part, report)
    return model


def replacements(model: nn.Module) -> Replacements | None:
    """Return what `make_twice_differentiable` replaced in a model; None if it was not called."""
    forward = vars(model).get("forward")
    return forward.report if isinstance(forward, Forward) else None


class Forward:
    """Replacement of a module's `forward` that uses our functions. It is pickled and copied with its
    module.
    """

    def __init__(self, module: nn.Module, report: Replacements):
        self.module, self.report = module, report
        self.before = vars(module).get("forward")  # an instance attribute set by other code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_on():
            return self._run(*args, **kwargs)
        with Functions(self.report, self.module):
            return self._run(*args, **kwargs)

    @property
    def _run(self) -> Callable[..., Any]:
        return self.before or partial(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._run)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if any("transformers" in words for words in self.report.replaced.values()):
            from curvescope.nn.hf import register

            register()  # the unpickling process may not have registered our attention yet


def is_on() -> bool:
    """Return True if calls in this thread are replaced already."""
    return any(isinstance(mode, Functions) for mode in _get_current_function_mode_stack())


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    return model


# -------------------------------------------------------------------------------------- calls, as they come


class Functions(TorchFunctionMode):
    """Replace PyTorch's functions by ours in this thread."""

    def __init__(self, report: Replacements, model: nn.Module):
        super().__init__()
        self.report, self.model = report, model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ENGINE:  # replace calls in layers recomputed in a backward pass too
            with self:
                return _ENGINE[func](*args, **(kwargs or {}))
        rule = RULES.get(func)
        if rule is None:
            if func in KEPT:
                self._note(func, KEPT[func])
            return func(*args, **(kwargs or {}))
        result = rule(*args, **(kwargs or {}))
        if isinstance(result, str):
            self._note(func, result)
            return func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            self.report.calls[func.__name__] += 1
        return result

    def _note(self, func: Any, reason: str) -> None:
        if not torch.compiler.is_compiling():
            self.report.kept.setdefault(_caller(self.model) or func.__name__, f"{func.__name__}: {reason}")


def _caller(model: nn.Module) -> str | None:
    """Return the name of the submodule whose method is calling torch."""
    names = {id(part): name or type(part).__name__ for name, part in model.named_modules()}
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return name
        frame = frame.f_back
    return None


def _silu(input: Tensor, inplace: bool = False) -> Tensor | str:
    return "in place it is PyTorch's own, which has every derivative" if inplace else functional.silu(input)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | str:
    if not training:
        return "in eval mode it is affine, and PyTorch's own has every derivative"
    axes = [0, *range(2, input.dim())]
    return _plain_norm(input, axes, (running_mean, running_var), (weight, bias), momentum, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | str:
    if not use_input_stats:
        return "with running statistics it is affine, and PyTorch's own has every derivative"
    axes = list(range(2, input.dim()))
    return _plain_norm(input, axes, (running_mean, running_var), (weight, bias), momentum, eps)


def _plain_norm(
    input: Tensor,
    axes: list[int],
    running: tuple[Tensor | None, Tensor | None],
    affine: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
) -> Tensor | str:
    """(x − mean)/√(var + ε) in plain operations, with PyTorch's running statistics."""
    x = widen(input)
    mean = x.mean(axes, keepdim=True)
    num = x.numel() // max(1, mean.numel())
    if num < 2:
        return "there is one value per channel, which PyTorch refuses"
    centered = x - mean
    var = centered.square().mean(axes, keepdim=True)
    y = centered * (var + eps).rsqrt()
    with torch.no_grad():
        for old, new in zip(running, (mean, var * (num / (num - 1))), strict=True):
            if old is not None:
                old.lerp_(new.detach().mean(0).flatten().to(old.dtype), momentum)
    shape = (1, -1, *[1] * (x.dim() - 2))
    weight, bias = (None if t is None else t.view(shape) for t in affine)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(input.dtype)


def _without_dispatch(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a torch function that does not dispatch to modes again, with other values for some
    globals.
    """
    space = vars(sys.modules[function.__module__]) | names
    space |= dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    del space["__name__"]  # TorchDynamo would use the globals of the module of that name
    ours = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__)
    ours.__kwdefaults__ = function.__kwdefaults__
    return ours


_ENGINE = {f: _without_dispatch(f) for f in (torch.autograd.grad, torch.autograd.backward, Tensor.backward)}
RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: functional.scaled_dot_product_attention,
    F.multi_head_attention_forward: _without_dispatch(  # it computes requested weights by plain operations
        F.multi_head_attention_forward, scaled_dot_product_attention=functional.scaled_dot_product_attention
    ),
    F.layer_norm: functional.layer_norm,
    F.rms_norm: functional.rms_norm,
    F.gelu: functional.gelu,
    F.silu: _silu,
    F.cross_entropy: functional.cross_entropy,
    F.glu: _glu,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}
"""PyTorch's functions and ours, with equal signatures; a returned string is the reason to keep PyTorch's."""
_NO_SECOND = "PyTorch has no second derivative of it"
KEPT: dict[Callable[..., Any], str] = {
    F.hardsigmoid: _NO_SECOND,
    F.embedding_bag: f"{_NO_SECOND}; F.embedding and a sum have one",
    F.grid_sample: "PyTorch has no forward mode of it",
    F.ctc_loss: _NO_SECOND,
    F.multi_margin_loss: _NO_SECOND,
    torch.cdist: f"{_NO_SECOND}; the norm of differences has one",
}
"""Functions that are not replaced, and the derivatives that they lack."""
_FOREIGN = {
    "flex_attention": "PyTorch's flex_attention has no second derivative and cannot be seen from outside",
    "flash_attn_func": "flash-attn has no second derivative and cannot be seen from outside",
    "flash_attn_varlen_func": "flash-attn has no second derivative and cannot be seen from outside",
    "memory_efficient_attention": "xFormers has no second derivative and cannot be seen from outside",
}


# ---------------------------------------------------------------------------- models, before they are called


def _planned(model: nn.Module) -> tuple[Replacements, Attention | None]:
    """Return the planned replacements in a model, and the attention of its Transformers modules."""
    report = Replacements(type(model).__name__)
    for name, part in model.named_modules():
        attributes = [value for value in vars(part).values() if isinstance(value, _FUNCTION)]
        called = dict.fromkeys([*_called(type(part)), *(f for f in attributes if f in RULES or f in KEPT)])
        ours = [f"{f.__name__}" for f in called if f in RULES]
        if ours:
            report.replaced[name or type(part).__name__] = ", ".join(ours)
        reasons = [f"{f.__name__}: {KEPT[f]}" for f in called if f in KEPT]
        reasons += [_FOREIGN[f.__name__] for f in called if getattr(f, "__name__", "") in _FOREIGN]
        if isinstance(part, nn.RNNBase) and any(p.is_cuda for p in part.parameters()):
            reasons.append("cuDNN has no second derivative; torch.backends.cudnn.flags(enabled=False) has")
        if reasons:
            report.kept[name or type(part).__name__] = "; ".join(reasons)
    attention = _of_transformers(model)
    if attention is not None:
        report.replaced |= attention.replaced
        report.kept |= attention.kept
    return report, attention


@cache
def _called(kind: type) -> tuple[Any, ...]:
    """Return the replaceable, kept and foreign functions that the methods of a class call."""
    functions: dict[Any, None] = {}
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, method in vars(base).items():
            method = inspect.unwrap(method) if callable(method) else method
            if isinstance(method, types.FunctionType) and not name.startswith("__"):
                functions |= dict.fromkeys(_named(method))
    return tuple(functions)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Functions that a function's code names through its globals: `f`, `F.f`, `torch.nn.functional.f`."""
    value: Any = None
    for step in dis.get_instructions(function):
        if step.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
            value = getattr(value, step.argval, None)
        else:
            value = None
        if isinstance(value, types.ModuleType) or not callable(value) or isinstance(value, type):
            continue
        if value in RULES or value in KEPT or getattr(value, "__name__", "") in _FOREIGN:
            yield value


def _of_transformers(model: nn.Module) -> Attention | None:
    """Return the attention of Transformers modules; None if that package is not loaded."""
    if "transformers" not in sys.modules:
        return None
    from curvescope.nn.hf import replaceable

    return replaceable(model)

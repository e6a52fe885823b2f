"""Read or add tensors at a hook site of a module: changes for one pass, under the module's lock.

A hook site is the first input or the first output of a module, or of a method of it. It is reached by hooks
next to the user's own, or by replacing the method.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvescope.core.errors import UsageError
from curvescope.models.running.patching import Change

Side = Literal["input", "output"]
TensorHook = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class HookSite:
    """The first input or the (first) output of a module, or of a method of it."""

    owner: nn.Module
    side: Side
    method: str = ""  # the module itself

    @property
    def key(self) -> tuple[int, str, Side]:
        """Key that identifies the site."""
        return id(self.owner), self.method, self.side

    def changes(self, hook: TensorHook, others: Sequence[Change] = ()) -> list[Change]:
        """Return changes of the module that pass the site's tensor through `hook`.

        Args:
            hook: A function of the tensor that returns its replacement.
            others: Changes for other sites in the same pass.
        """
        attributes = vars(self.owner)
        if self.method:
            inner = [c.value for c in others if c.holder is attributes and c.name == self.method]
            original = inner[-1] if inner else getattr(self.owner, self.method)
            return [Change(attributes, self.method, _hooked_method(original, self.side, hook))]
        key = object()  # hooks are known by any key
        if self.side == "output":

            def after(module: nn.Module, arguments: Any, output: Any) -> Any:
                return _hook_first(output, hook)

            hooks = OrderedDict([*self.owner._forward_hooks.items(), (key, after)])
            return [Change(attributes, "_forward_hooks", hooks)]

        def before_call(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            return _hook_argument(arguments, options, hook)

        hooks = OrderedDict([*self.owner._forward_pre_hooks.items(), (key, before_call)])
        takes_options = OrderedDict([*self.owner._forward_pre_hooks_with_kwargs.items(), (key, True)])
        return [
            Change(attributes, "_forward_pre_hooks", hooks),
            Change(attributes, "_forward_pre_hooks_with_kwargs", takes_options),
        ]


@dataclass(frozen=True, eq=False)
class Point:
    """Site where δ is added, and the sites whose weighted sum is x. A head has some of the columns."""

    name: str
    write: HookSite
    read: tuple[tuple[float, HookSite], ...]
    columns: slice | None = None
    by_head: bool = field(default=False, kw_only=True)  # heads may be an axis of their own

    def shaped(self, x: Tensor, num_sequences: int) -> Tensor:
        """Return a site's tensor in the shape of x: (B, T, w), or as the module has it."""
        if self.by_head and x.dim() == 4:
            x = x.flatten(2)  # TransformerLens keeps heads apart
        if x.dim() == 2 and x.shape[0] != num_sequences:
            x = x.unflatten(0, (num_sequences, -1))  # OPT flattens tokens
        return x if self.columns is None else x[..., self.columns]

    def shifted(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return a site's tensor plus δ, where δ has the shape of x."""
        if self.columns is not None:
            width = x.shape[-2:].numel() if x.dim() == 4 else x.shape[-1]
            delta = nn.functional.pad(delta, (self.columns.start, width - self.columns.stop))
        return x + delta.reshape(x.shape)


class AddedActivation:
    """Tensor that a pass adds at a point: a given δ, or a leaf of zeros in the shape of x.

    With a leaf, the graph begins at the point, because derivatives do not need earlier operations.
    """

    def __init__(self, point: Point, num_sequences: int, given: Tensor | None = None):
        self.point, self._given, self._num_sequences = point, given, num_sequences
        self.count, self._leaf = 0, given

    def changes(self) -> list[Change]:
        """Return the changes for one pass; each pass needs its own."""
        self.count, self._leaf = 0, self._given
        return self.point.write.changes(self._add)

    def _add(self, x: Tensor) -> Tensor:
        self.count += 1
        if not x.is_floating_point():
            raise UsageError(f"expected real numbers at {self.point.name!r}, got {x.dtype}")
        if self._given is None:
            like = self.point.shaped(x, self._num_sequences)
            self._leaf = torch.zeros(like.shape, dtype=x.dtype, device=x.device, requires_grad=True)
            x = x.detach()
        return self.point.shifted(x, self.delta)

    @property
    def delta(self) -> Tensor:
        """δ of the last pass."""
        assert self._leaf is not None, "δ exists only after a pass"
        return self._leaf

    def check(self) -> None:
        """Raise unless the point was passed once."""
        _check_once(self.point.name, self.count)


class ActivationReader:
    """Reader of the activations at points in a pass; `values` has the tensors x by name."""

    def __init__(self, points: Sequence[Point], num_sequences: int):
        self._points, self._num_sequences = points, num_sequences
        self._tensors: dict[tuple[int, str, Side], list[Tensor]] = {}

    def changes(self) -> list[Change]:
        """Return the changes for one pass."""
        sites = {site.key: site for point in self._points for _, site in point.read}
        self._tensors = {key: [] for key in sites}
        changes: list[Change] = []
        for key, site in sites.items():
            changes += site.changes(self._reader(key), changes)
        return changes

    def _reader(self, key: tuple[int, str, Side]) -> TensorHook:
        def read(x: Tensor) -> Tensor:
            self._tensors[key].append(x)
            return x

        return read

    @property
    def values(self) -> dict[str, Tensor]:
        """The tensor x of every point, (B, T, w) or as the module has it."""
        return {point.name: self._value(point) for point in self._points}

    def _value(self, point: Point) -> Tensor:
        parts = [(scale, self._tensors[site.key]) for scale, site in point.read]
        for _, tensors in parts:
            _check_once(point.name, len(tensors))
        shaped = [(s, point.shaped(tensors[0], self._num_sequences)) for s, tensors in parts]
        scaled = [x if s == 1.0 else s * x for s, x in shaped]
        return scaled[0] if len(scaled) == 1 else scaled[0] + scaled[1]


def _check_once(name: str, count: int) -> None:
    if count != 1:
        raise UsageError(
            f"expected a point that is passed once in a forward pass, {name!r} is passed {count} times",
            hint="choose a submodule that is called once",
        )


# ------------------------------------------------------------------------------------- hooked functions


def _hooked_method(original: Callable[..., Any], side: Side, hook: TensorHook) -> Callable[..., Any]:
    """Wrap a method so that `hook` is applied to its first argument or to its result."""

    def call(x: Tensor, *more: Any, **options: Any) -> Any:
        if side == "input":
            return original(hook(x), *more, **options)
        return hook(original(x, *more, **options))

    return call


def _hook_first(output: Any, hook: TensorHook) -> Any:
    if isinstance(output, Tensor):
        return hook(output)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return (hook(output[0]), *output[1:])
    raise UsageError(f"expected a submodule that returns a tensor first, got a {type(output).__name__}")


def _hook_argument(arguments: tuple[Any, ...], options: dict[str, Any], hook: TensorHook) -> Any:
    if arguments and isinstance(arguments[0], Tensor):
        return (hook(arguments[0]), *arguments[1:]), options
    name = next((name for name, value in options.items() if isinstance(value, Tensor)), None)
    if arguments or name is None:
        raise UsageError("expected a submodule whose first argument is a tensor")
    return arguments, {**options, name: hook(options[name])}

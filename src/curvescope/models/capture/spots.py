"""What is read or added at a spot of a module while it runs: changes for one pass, under its lock.

A spot is the first input or the first output of a module, or of a method of it. It is met by hooks that stand
beside the user's own, or by a method in the place of another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from curvescope.core.errors import UsageError
from curvescope.models.running.exchange import Change

Side = Literal["input", "output"]
Meet = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Spot:
    """The first input or the (first) output of a module, or of a method of it."""

    owner: nn.Module
    side: Side
    method: str = ""  # the module itself

    @property
    def key(self) -> tuple[int, str, Side]:
        """What tells it from other spots."""
        return id(self.owner), self.method, self.side

    def changes(self, meet: Meet, others: Sequence[Change] = ()) -> list[Change]:
        """Changes of the module under which `meet` is given the tensor here, and returns what goes on.

        Args:
            meet: A function of the tensor.
            others: Changes of other spots in the same pass.
        """
        own = vars(self.owner)
        if self.method:
            inner = [c.value for c in others if c.holder is own and c.name == self.method]
            original = inner[-1] if inner else getattr(self.owner, self.method)
            return [Change(own, self.method, _met(original, self.side, meet))]
        key = object()  # hooks are known by any key
        if self.side == "output":

            def behind(module: nn.Module, arguments: Any, output: Any) -> Any:
                return _first_met(output, meet)

            hooks = OrderedDict([*self.owner._forward_hooks.items(), (key, behind)])
            return [Change(own, "_forward_hooks", hooks)]

        def before(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            return _argument_met(arguments, options, meet)

        hooks = OrderedDict([*self.owner._forward_pre_hooks.items(), (key, before)])
        named = OrderedDict([*self.owner._forward_pre_hooks_with_kwargs.items(), (key, True)])
        return [
            Change(own, "_forward_pre_hooks", hooks),
            Change(own, "_forward_pre_hooks_with_kwargs", named),
        ]


@dataclass(frozen=True, eq=False)
class Point:
    """Where δ is added, and the spots whose weighted sum is x; of a head, some of the columns there."""

    name: str
    write: Spot
    read: tuple[tuple[float, Spot], ...]
    columns: slice | None = None
    by_head: bool = field(default=False, kw_only=True)  # heads may be an axis of their own

    def shaped(self, x: Tensor, num_sequences: int) -> Tensor:
        """A tensor of a spot as x: (B, T, w), or as the module has it."""
        if self.by_head and x.dim() == 4:
            x = x.flatten(2)  # TransformerLens keeps heads apart
        if x.dim() == 2 and x.shape[0] != num_sequences:
            x = x.unflatten(0, (num_sequences, -1))  # OPT flattens tokens
        return x if self.columns is None else x[..., self.columns]

    def moved(self, x: Tensor, delta: Tensor) -> Tensor:
        """A tensor of the spot where δ, in the shape of x, is added."""
        if self.columns is not None:
            width = x.shape[-2:].numel() if x.dim() == 4 else x.shape[-1]
            delta = nn.functional.pad(delta, (self.columns.start, width - self.columns.stop))
        return x + delta.reshape(x.shape)


class Added:
    """What is added at a point in a pass: δ as given, or a leaf of zeros in the shape of x.

    Derivatives in a leaf do not need what comes before it, so the graph begins there.
    """

    def __init__(self, point: Point, num_sequences: int, given: Tensor | None = None):
        self.point, self._given, self._num_sequences = point, given, num_sequences
        self.count, self._leaf = 0, given

    def changes(self) -> list[Change]:
        """For one pass; asked for again, for another one."""
        self.count, self._leaf = 0, self._given
        return self.point.write.changes(self._meet)

    def _meet(self, x: Tensor) -> Tensor:
        self.count += 1
        if not x.is_floating_point():
            raise UsageError(f"expected real numbers at {self.point.name!r}, got {x.dtype}")
        if self._given is None:
            like = self.point.shaped(x, self._num_sequences)
            self._leaf = torch.zeros(like.shape, dtype=x.dtype, device=x.device, requires_grad=True)
            x = x.detach()
        return self.point.moved(x, self.delta)

    @property
    def delta(self) -> Tensor:
        """δ of the last pass."""
        assert self._leaf is not None, "behind a pass"
        return self._leaf

    def check(self) -> None:
        """Raise unless the point was passed once."""
        _check_once(self.point.name, self.count)


class Seen:
    """What is read at points in a pass, by name: `values` are the tensors x."""

    def __init__(self, points: Sequence[Point], num_sequences: int):
        self._points, self._num_sequences = points, num_sequences
        self._found: dict[tuple[int, str, Side], list[Tensor]] = {}

    def changes(self) -> list[Change]:
        """For one pass."""
        spots = {spot.key: spot for point in self._points for _, spot in point.read}
        self._found = {key: [] for key in spots}
        changes: list[Change] = []
        for key, spot in spots.items():
            changes += spot.changes(self._reader(key), changes)
        return changes

    def _reader(self, key: tuple[int, str, Side]) -> Meet:
        def read(x: Tensor) -> Tensor:
            self._found[key].append(x)
            return x

        return read

    @property
    def values(self) -> dict[str, Tensor]:
        """x of every point, (B, T, w) or as the module has it."""
        return {point.name: self._value(point) for point in self._points}

    def _value(self, point: Point) -> Tensor:
        parts = [(scale, self._found[spot.key]) for scale, spot in point.read]
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


# ------------------------------------------------------------------------------------------- what is called


def _met(original: Callable[..., Any], side: Side, meet: Meet) -> Callable[..., Any]:
    """A method with `meet` at its first argument or at what it returns."""

    def call(x: Tensor, *more: Any, **options: Any) -> Any:
        if side == "input":
            return original(meet(x), *more, **options)
        return meet(original(x, *more, **options))

    return call


def _first_met(output: Any, meet: Meet) -> Any:
    if isinstance(output, Tensor):
        return meet(output)
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return (meet(output[0]), *output[1:])
    raise UsageError(f"expected a submodule that returns a tensor first, got a {type(output).__name__}")


def _argument_met(arguments: tuple[Any, ...], options: dict[str, Any], meet: Meet) -> Any:
    if arguments and isinstance(arguments[0], Tensor):
        return (meet(arguments[0]), *arguments[1:]), options
    name = next((name for name, value in options.items() if isinstance(value, Tensor)), None)
    if arguments or name is None:
        raise UsageError("expected a submodule whose first argument is a tensor")
    return arguments, {**options, name: meet(options[name])}

"""What a module does, apart from the numbers in its tensors: everything that Python code in it may read.

Submodules, attributes, settings and what they hold, functions with their closures, defaults and the globals
they name, hooks, classes. Every container found is read again and compared entry by entry, by identity or,
for plain values, by equality, so that nothing needs to be copied: some thousand entries take about a
millisecond. What a module itself writes while it is called (a counter, a cache) is left out by `settle`.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from curvescope.kernels.backends import casting

MOST = 50_000  # containers; what lies beyond is left to asking the module
VALUES = (int, float, complex, str, bytes, bool, type(None))
FOREIGN = {"torch", "numpy", "builtins", "logging", "threading", "typing", "collections", "abc", "re", "os"}
"""Whose objects are not looked into."""
LIBRARIES = FOREIGN | {"transformers", "peft", "transformer_lens", "curvescope", "functools", "contextlib"}
"""Whose functions are not asked for the globals they name."""
HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
ANYTHING = object()
Read = Callable[[], tuple[Any, ...]]


class Snapshot:
    """The containers that are reachable from some roots, as they were.

    Attributes:
        tensors: The tensors found in them, apart from parameters.
    """

    def __init__(self, *roots: Any):
        self.tensors: list[Tensor] = []
        self._seen: dict[int, Any] = {}
        self._watched: list[tuple[Read, tuple[Any, ...]]] = []
        waiting: list[Any] = [*roots, *HOOKS]
        while waiting and len(self._watched) < MOST:
            self._look(waiting.pop(), waiting)
        self._versions = [version(t) for t in self.tensors]

    def same(self) -> bool:
        """Whether all of them still hold what they held."""
        return all(
            len(now := read()) == len(then) and (all(map(is_, now, then)) or all(map(_equal, now, then)))
            for read, then in self._watched
        )

    def settle(self) -> None:
        """Leave out what has changed since: the module, which has been called, wrote it itself."""
        self._watched = [
            (read, then if all(map(_equal, now, then)) else tuple(map(_settled, now, then)))
            for read, then in self._watched
            if len(now := read()) == len(then)
        ]
        kept = zip(self.tensors, self._versions, strict=True)
        self.tensors = [t for t, before in kept if version(t) == before]

    def _look(self, x: Any, waiting: list[Any]) -> None:
        if isinstance(x, VALUES) or id(x) in self._seen:
            return
        self._seen[id(x)] = x  # held, so that no other object gets its place in memory
        if isinstance(x, Tensor):
            if not isinstance(x, nn.Parameter):
                self.tensors.append(x)
            return
        for read in _containers(x):
            found = read()
            self._watched.append((read, found))
            waiting += found


def _containers(x: Any) -> list[Read]:
    """How to read what an object holds; nothing for what is not looked into."""
    if isinstance(x, dict):
        return [partial(_items, x)]
    if isinstance(x, list | tuple | set | frozenset):
        return [partial(tuple, x)]
    if isinstance(x, types.FunctionType):
        return [partial(_function, x)]
    if isinstance(x, types.MethodType):
        return [partial(tuple, (x.__self__, x.__func__))]
    if isinstance(x, partial):
        return [lambda: (x.func, x.args, x.keywords)]
    if isinstance(x, type):
        return [] if _within(x, FOREIGN) else [partial(_items, vars(x)), partial(tuple, x.__bases__)]
    if isinstance(x, types.ModuleType):
        return []
    own: list[Read] = [partial(_items, vars(x))] if hasattr(x, "__dict__") else []
    slots = [name for c in type(x).__mro__ for name in _slots(c)]
    own += [partial(_slotted, x, slots)] if slots else []
    own += [partial(tuple, (type(x),))] if own else []
    return own if isinstance(x, nn.Module) or not _within(type(x), FOREIGN) else []


def _slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _slotted(x: Any, names: list[str]) -> tuple[Any, ...]:
    return tuple(getattr(x, name, None) for name in names if not name.startswith("__"))


def _within(x: Any, libraries: set[str]) -> bool:
    """Whether a class or a function comes from one of these libraries."""
    return (x.__module__ or "").split(".")[0] in libraries


def _items(held: Any) -> tuple[Any, ...]:
    """Keys and values; whether a module is in train mode does not count, because eval mode is used."""
    if "training" not in held:
        return (*held, *held.values())
    rest = {key: value for key, value in held.items() if key != "training"}
    return (*rest, *rest.values())


def _function(f: types.FunctionType) -> tuple[Any, ...]:
    """Its code and defaults, what its closure holds, and the globals that it names."""
    cells = []
    for cell in f.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not yet filled
            cells.append(None)
    if _within(f, LIBRARIES):
        return f.__code__, f.__defaults__, f.__kwdefaults__, *cells
    named = [_named(f.__globals__, *names) for names in _globals_of(f.__code__)]
    return f.__code__, f.__defaults__, f.__kwdefaults__, *cells, *vars(f).values(), *named


def _named(found: dict[str, Any], name: str, attribute: str | None) -> Any:
    """A global that a function names, or what it takes from a Python module of that name."""
    value = found.get(name)
    return getattr(value, attribute or "", None) if isinstance(value, types.ModuleType) else value


@cache
def _globals_of(code: types.CodeType) -> tuple[tuple[str, str | None], ...]:
    """The globals that code loads, each with the attribute that it takes from it next, if it does."""
    steps = list(dis.get_instructions(code))
    return tuple(
        (step.argval, after.argval if after.opname in ("LOAD_ATTR", "LOAD_METHOD") else None)
        for step, after in pairwise([*steps, steps[-1]])
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def _equal(now: Any, then: Any) -> bool:
    """Whether an entry is the same object, a plain value that is equal, or one that may be anything."""
    if now is then or then is ANYTHING:
        return True
    if type(now) is not type(then) or not isinstance(now, VALUES):
        return False
    return now == then or (now != now and then != then)


def _settled(now: Any, then: Any) -> Any:
    return then if _equal(now, then) else ANYTHING


def version(t: Tensor) -> int:
    """How often autograd saw a tensor being written."""
    return 0 if t.is_inference() else t._version


def modes() -> tuple[Any, ...]:
    """Global settings that numbers depend on."""
    return (
        casting(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )

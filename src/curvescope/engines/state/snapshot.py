"""What a module does, apart from the numbers in its tensors: everything that Python code in it may read.

Submodules, attributes, settings and what they hold, functions with their closures, defaults and the globals
they name, hooks, classes. Everything found is read again and compared entry by entry, by identity or, for
plain values, by equality, so that nothing needs to be copied. Entries of one kind are read together, without
a step of Python for each: ten thousand take less than a millisecond. What a module itself writes while it is
called (a counter, a cache) is left out by `settle`.
"""

from __future__ import annotations

import copyreg
import dis
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, compress, pairwise, starmap
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from curvescope.kernels.backends import casting

MOST = 50_000  # containers; what lies beyond is left to asking the module
VALUES = (int, float, complex, str, bytes, bool, type(None))
FOREIGN = {"torch", "numpy", "builtins", "logging", "threading", "typing", "collections", "abc", "re", "os"}
FOREIGN |= {"dataclasses", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
"""Whose objects are not looked into, modules apart: a LightningModule holds its trainer, that the loop."""
LIBRARIES = FOREIGN | {"transformers", "peft", "transformer_lens", "curvescope", "functools", "contextlib"}
"""Whose functions are not asked for the globals they name."""
OWN = {"training", "_flat_weights", "_flat_weight_refs"}
"""Attributes that do not count: eval mode is used, and torch's recurrent layers list their parameters anew at
every call."""
HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
_slotnames: Callable[[type], Any] = copyreg._slotnames  # pyright: ignore[reportAttributeAccessIssue]
ANYTHING = object()  # in the place of an entry that does not count
Read = Callable[[Sequence[Any]], Iterable[Any]]
"""What some holders hold, entry after entry."""


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


KINDS: dict[str, Read] = {
    "keys": chain.from_iterable,  # and what is in a list or a set
    "values": lambda held: chain.from_iterable(map(methodcaller("values"), held)),
    "class": partial(map, type),
    "bases": partial(map, attrgetter("__bases__")),
    "function": lambda held: chain.from_iterable(map(PARTS, held)),
    "cell": partial(map, _contents),
    "attribute": partial(starmap, getattr),  # of (object, name, otherwise)
    "global": partial(starmap, dict.get),  # of (dictionary, name)
}
PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")


class Snapshot:
    """What is reachable from some roots, as it was.

    Attributes:
        tensors: The tensors found, apart from parameters.
    """

    def __init__(self, *roots: Any):
        self.tensors: list[Tensor] = []
        self._seen: dict[int, Any] = {}
        self._found: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {kind: [] for kind in KINDS}
        waiting: list[Any] = [*roots, *HOOKS]
        while waiting and len(self._seen) < MOST:
            self._look(waiting.pop(), waiting)
        self._versions = [version(t) for t in self.tensors]
        self._line_up()

    def same(self) -> bool:
        """Whether everything still is what it was."""
        if list(map(len, self._sized)) != self._sizes:
            return False
        now = list(compress(self._read(), self._counted))
        if all(map(is_, now, self._then)):
            return True
        if not all(map(_equal, now, self._then)):
            return False
        self._then = now  # equal, and next time the same objects again
        return True

    def settle(self) -> None:
        """Leave out what has changed since: the module, which has been called, wrote it itself."""
        for kind, read in KINDS.items():
            again = [(x, then, tuple(read([x]))) for x, then in self._found[kind]]
            self._found[kind] = [
                (x, tuple(map(_settled, now, then))) for x, then, now in again if len(now) == len(then)
            ]
        self._line_up()
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
        waiting += _fixed(x)
        for kind, holder in _containers(x):
            found = tuple(KINDS[kind]([holder]))
            self._found[kind].append((holder, found))
            waiting += found

    def _read(self) -> Iterator[Any]:
        """Every entry as it is now, in one fixed order."""
        return chain.from_iterable(read(self._holders[kind]) for kind, read in KINDS.items())

    def _line_up(self) -> None:
        """Put what every entry was into one list, apart from `OWN`."""
        self._sized = [x for x, _ in self._found["keys"]]
        self._sizes = [len(then) for _, then in self._found["keys"]]
        full = {kind: [(x, then) for x, then in found if then] for kind, found in self._found.items()}
        self._holders = {kind: [x for x, _ in found] for kind, found in full.items()}
        everything = [entry for found in full.values() for _, then in found for entry in then]
        self._counted = [entry is not ANYTHING for entry in everything]
        start = sum(len(then) for _, then in full["keys"])  # values come next
        for holder, then in full["values"]:
            for place, key in zip(range(start, start + len(then)), holder, strict=False):
                self._counted[place] &= key not in OWN
            start += len(then)
        self._then = list(compress(everything, self._counted))


def _fixed(x: Any) -> tuple[Any, ...]:
    """What an object that cannot be changed is made of."""
    if isinstance(x, tuple | frozenset):
        return tuple(x)
    if isinstance(x, types.MethodType):
        return x.__self__, x.__func__
    return (x.func, x.args, x.keywords) if isinstance(x, partial) else ()


def _containers(x: Any) -> list[tuple[str, Any]]:
    """The kinds of entries that an object holds, with their holders; nothing for what is not looked into."""
    if isinstance(x, dict):
        return [("keys", x), ("values", x)]
    if isinstance(x, list | set):
        return [("keys", x)]
    if isinstance(x, types.FunctionType):
        return _in_function(x)
    if isinstance(x, type):
        if _within(x, FOREIGN):
            return []
        _slotnames(x)  # which Python writes into a class when one of its objects is first copied
        own = vars(x)
        return [("keys", own), ("values", own), ("bases", x)]
    if isinstance(x, tuple | frozenset | types.MethodType | partial | types.ModuleType):
        return []
    if _within(type(x), FOREIGN) and not isinstance(x, nn.Module):
        return []
    names = [name for c in type(x).__mro__ for name in _slots(c) if not name.startswith("__")]
    found: list[tuple[str, Any]] = [("attribute", (x, name, None)) for name in names]
    if hasattr(x, "__dict__"):
        own = vars(x)
        found += [("keys", own), ("values", own)]
    return [*found, ("class", x)] if found else []


def _in_function(f: types.FunctionType) -> list[tuple[str, Any]]:
    """Its code and defaults, what its closure holds, its attributes, and the globals that it names."""
    found: list[tuple[str, Any]] = [("function", f), *(("cell", cell) for cell in f.__closure__ or ())]
    if _within(f, LIBRARIES):
        return found
    own = vars(f)
    found += [("keys", own), ("values", own)]
    for name, attribute in _globals_of(f.__code__):
        value = f.__globals__.get(name)
        found.append(("global", (f.__globals__, name)))
        if attribute and isinstance(value, types.ModuleType):
            found.append(("attribute", (value, attribute, None)))
    return found


def _slots(cls: type) -> tuple[str, ...]:
    found = vars(cls).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _within(x: Any, libraries: set[str]) -> bool:
    """Whether a class or a function comes from one of these libraries."""
    return (x.__module__ or "").split(".")[0] in libraries


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
    """Whether an entry is the same object, or a plain value that is equal."""
    if now is then:
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

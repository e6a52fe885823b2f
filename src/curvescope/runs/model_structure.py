"""What a model computes, apart from the numbers in its parameters and buffers: plain attributes, and code.

Of every submodule the numbers, strings and other plain values among its attributes, and the functions; of
every class and function that is not of PyTorch, Transformers or this package, the code: instructions, names
and constants, of what it calls too, and the plain globals that it names. It is the same in every process, and
before and behind a forward pass: what the code behind `forward` writes to the module is left out.
"""

from __future__ import annotations

import argparse
import dis
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.models.model import Model

ADDRESS = re.compile(r"0x[0-9a-f]+")  # in the words of an object, another in every process
SIMPLE = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
DEEP = 6
LIBRARIES = {"torch", "transformers", "curvescope", "numpy"} | (
    set(sys.stdlib_module_names) - {"builtins", "__main__"}
)
"""Whose code is known by its name."""
LEFT_OUT = {"training", "name_or_path", "warnings_issued", "max_seq_len_cached", *vars(nn.Module())}
"""Attributes of modules that say nothing of what they compute, or that libraries write in a forward pass."""
MUTATING = {
    "append",
    "extend",
    "update",
    "setdefault",
    "add",
    "pop",
    "clear",
    "insert",
    "remove",
    "__setitem__",
}
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
NEAR = 8  # instructions between an attribute and what is written into it
FILLED = dict | list | set | Tensor
MOST = 20_000  # functions and classes
Part = tuple[str, bytes]
_structures: WeakKeyDictionary[Model, str] = WeakKeyDictionary()


def structure(model: Model) -> str:
    """A digest of what a model is made of: its layers, shapes, attributes and code, no numbers of weights.

    Found once for a model.
    """
    if model not in _structures:
        digest = hashlib.blake2b(address_free(repr(model.module)).encode(), digest_size=16)
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.module.named_parameters()]
        digest.update(repr(shapes).encode())
        for label, content in made_of(model):
            digest.update(f"{label}:{len(content)};".encode() + content)
        _structures[model] = digest.hexdigest()
    return _structures[model]


def made_of(model: Model) -> Iterator[Part]:
    """Labeled bytes; equal sequences of them mean that equal tensors give equal outputs."""
    walk = _Walk()
    for name, module in model.module.named_modules():
        yield from walk.module(name, module)
    for name, thing in (("call", model.call), ("output", model.output)):
        held = vars(thing) if hasattr(thing, "__dict__") and not callable_code(thing) else {"": thing}
        for key in sorted(held):
            yield from walk.value(f"{name} {key}", held[key])


class _Walk:
    """Everything once; what was told of before is known by its label."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # held, so that no other object gets its place in memory
        self._written: dict[type, tuple[set[str], set[str]]] = {}

    def module(self, name: str, module: nn.Module) -> Iterator[Part]:
        """Attributes of one module, and its class."""
        kind = type(module)
        if kind not in self._written:
            self._written[kind] = (set(), set()) if _known(kind) else written_by(kind)
        for key in sorted(vars(module).keys() - LEFT_OUT):
            value, (stored, filled) = vars(module)[key], self._written[kind]
            left_out = key in stored or (key in filled and isinstance(value, FILLED))
            if not left_out and not (_known(kind) and key.startswith("_")):
                yield from self.value(f"{name}.{key}", value)
        for hooks in HOOKS:
            for i, hook in enumerate(vars(module).get(hooks, {}).values()):
                yield from self.value(f"{name}.{hooks}[{i}]", hook)
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{name} script", str(getattr(module, "code", "")).encode()
        yield from self.a_class(kind)

    def value(self, label: str, value: Any) -> Iterator[Part]:
        """A plain value, a tensor that is no parameter, code, or what holds such; no objects of libraries."""
        if isinstance(value, list | tuple | dict) and not only_plain(value):
            yield from self.held(label, value)
        elif (text := plain(value)) is not None:
            yield label, text.encode("utf-8", "surrogatepass")
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            flat = value.detach().cpu().contiguous().reshape(-1)
            yield f"{label} {value.dtype} {tuple(value.shape)}", flat.view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray):
            yield f"{label} {value.dtype} {value.shape}", np.ascontiguousarray(value).tobytes()
        elif isinstance(value, partial):
            yield from self.value(f"{label} func", value.func)
            yield from self.value(f"{label} arguments", (value.args, value.keywords))
        elif isinstance(value, type):
            yield from self.a_class(value)
        elif callable_code(value):
            yield from self.function(label, value)
        elif not isinstance(value, nn.Module | types.ModuleType) and _of_ones_own(value):
            yield from self.a_class(type(value))
            yield from self.held(label, vars(value))

    def held(self, label: str, holder: Any) -> Iterator[Part]:
        """What a container holds, or an object of one's own."""
        if not self._new(holder):
            return
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in sorted(pairs, key=lambda pair: repr(pair[0])):
            yield from self.value(f"{label}[{key!r}]", value)

    def a_class(self, kind: type) -> Iterator[Part]:
        """Methods and plain attributes of a class and of those it is made from, up to a library's."""
        for own in kind.__mro__:
            if _known(own) or own is object or not self._new(own):
                continue
            for key in sorted(vars(own)):
                value = vars(own)[key]
                value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if callable_code(value) or not key.startswith("__"):
                    yield from self.value(f"{own.__qualname__}.{key}", value)

    def function(self, label: str, f: Any) -> Iterator[Part]:
        """The code of a function with what it holds and names; a library's by its name."""
        f = getattr(f, "__func__", f)
        if not isinstance(f, types.FunctionType) or _known(f):
            yield label, f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', '')}".encode()
            return
        if not self._new(f):
            return
        yield label, code_words(f.__code__, f.__doc__).encode("utf-8", "surrogatepass")
        yield from self.value(f"{label} defaults", (f.__defaults__, f.__kwdefaults__))
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if _filled(cell):
                yield from self.value(f"{label} {name}", cell.cell_contents)
        for name in sorted(_global_names(f.__code__)):
            value = f.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not _known_name(value.__name__):
                for key in sorted(set(_names(f.__code__)) & vars(value).keys()):
                    yield from self.value(f"{name}.{key}", vars(value)[key])
            elif value is not None:
                yield from self.value(f"global {name}", value)

    def _new(self, thing: Any) -> bool:
        new = id(thing) not in self._seen and len(self._seen) < MOST
        self._seen[id(thing)] = thing
        return new


def _of_ones_own(x: Any) -> bool:
    """Whether something is an object with attributes, of a class that is no library's."""
    return hasattr(x, "__dict__") and type(x).__module__ != "builtins" and not _known(type(x))


def callable_code(x: Any) -> bool:
    """Whether something is a function, of Python or compiled, or a method."""
    return isinstance(x, types.FunctionType | types.MethodType | types.BuiltinFunctionType)


def code_words(code: types.CodeType, doc: str | None = None) -> str:
    """Instructions, names and constants, without the places in a file, and without the docstring."""
    consts = [
        code_words(c) if isinstance(c, types.CodeType) else plain(c) or repr(c)
        for c in code.co_consts
        if doc is None or c is not doc
    ]
    about = code.co_argcount, code.co_kwonlyargcount, code.co_names, code.co_freevars
    return repr((code.co_code.hex(), about, consts))


def written_by(kind: type) -> tuple[set[str], set[str]]:
    """Attributes that the code behind `forward` writes, and those that it may write into."""
    stored, filled, waiting, seen = set[str](), set[str](), ["forward", "__call__"], set[str]()
    while waiting:
        name = waiting.pop()
        f = getattr(kind, name, None)
        f = inspect.unwrap(f) if isinstance(f, types.FunctionType) else getattr(f, "__func__", None)
        if name in seen or not isinstance(f, types.FunctionType) or _known(f):
            continue
        seen.add(name)
        for code in _codes(f.__code__):
            steps = list(dis.get_instructions(code))
            for i, step in enumerate(steps):
                if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                    stored.add(step.argval)
                elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    waiting.append(step.argval)
                    if any(_writes(after) for after in steps[i + 1 : i + 1 + NEAR]):
                        filled.add(step.argval)
    return stored, filled


def _writes(step: dis.Instruction) -> bool:
    called = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in MUTATING
    return called or step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code and all that is inside of it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _names(code: types.CodeType) -> Iterable[str]:
    return (name for one in _codes(code) for name in one.co_names)


def _global_names(code: types.CodeType) -> set[str]:
    return {
        step.argval
        for one in _codes(code)
        for step in dis.get_instructions(one)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _known(x: Any) -> bool:
    """Whether a class or a function is a library's."""
    return _known_name(getattr(x, "__module__", None) or "")


def _known_name(module: str) -> bool:
    return module.split(".")[0] in LIBRARIES


# ----------------------------------------------------------------------------- plain values


def address_free(words: str) -> str:
    """The words of an object without its place in memory."""
    return ADDRESS.sub("", words)


def plain(value: Any, *, deep: int = DEEP) -> str | None:
    """The text of a plain value; None of one that is not, and "?" in its place inside of a container."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, SIMPLE):
        return repr(value)
    if isinstance(value, NAMED):
        return str(value)
    if deep == 0:
        return None
    if isinstance(value, tuple | list):
        return f"({', '.join(_inner(x, deep) for x in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_inner(x, deep) for x in value))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_inner(k, deep)}: {_inner(v, deep)}' for k, v in value.items())}}}"
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return f"{type(value).__name__}{plain(held, deep=deep - 1)}"
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return f"{type(value).__name__}{plain(vars(value), deep=deep - 1)}"
    return None


def only_plain(value: Any, *, deep: int = DEEP) -> bool:
    """Whether a value is plain, and all that a list, tuple or dictionary holds."""
    if deep and isinstance(value, tuple | list | dict):
        held = value.values() if isinstance(value, dict) else value
        return all(only_plain(x, deep=deep - 1) for x in held)
    return plain(value, deep=deep) is not None


def _inner(value: Any, deep: int) -> str:
    return plain(value, deep=deep - 1) or "?"

"""Structure of a model apart from the numbers in its parameters and buffers: plain attributes, and code.

The structure covers the numbers, strings, other plain values and functions among the attributes of every
submodule. For user-defined classes and functions, and for the functions they call, it covers the code:
instructions, names, constants and plain globals. Classes of PyTorch, Transformers and this package count by
name. The structure is the same in every process, before and after a forward pass: attributes that `forward`
writes are left out.
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

ADDRESS = re.compile(r"0x[0-9a-f]+")  # memory address in the text of an object, different in every process
SIMPLE = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
DEEP = 6
LIBRARIES = {"torch", "transformers", "curvescope", "numpy"} | (
    set(sys.stdlib_module_names) - {"builtins", "__main__"}
)
"""Packages whose code is identified by its name."""
LEFT_OUT = {"training", "name_or_path", "warnings_issued", "max_seq_len_cached", *vars(nn.Module())}
"""Attributes of modules that do not affect their outputs, or that libraries write in a forward pass."""
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
MAX_WRITE_DISTANCE = 8  # most instructions between loading an attribute and writing into it
FILLED = dict | list | set | Tensor
MAX_VISITED = 20_000  # most functions and classes to visit
Part = tuple[str, bytes]
_structures: WeakKeyDictionary[Model, str] = WeakKeyDictionary()


def structure(model: Model) -> str:
    """Digest of a model's layers, shapes, attributes and code, without the values of its weights.

    The digest is cached per model.
    """
    if model not in _structures:
        digest = hashlib.blake2b(without_addresses(repr(model.module)).encode(), digest_size=16)
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.module.named_parameters()]
        digest.update(repr(shapes).encode())
        for label, content in structure_bytes(model):
            digest.update(f"{label}:{len(content)};".encode() + content)
        _structures[model] = digest.hexdigest()
    return _structures[model]


def structure_bytes(model: Model) -> Iterator[Part]:
    """Yield labeled bytes; if two sequences are equal, equal tensors give equal outputs."""
    walk = _StructureWalk()
    for name, module in model.module.named_modules():
        yield from walk.module(name, module)
    for name, function in (("call", model.call), ("output", model.output)):
        attributes = (
            vars(function)
            if hasattr(function, "__dict__") and not is_callable_code(function)
            else {"": function}
        )
        for key in sorted(attributes):
            yield from walk.value(f"{name} {key}", attributes[key])


class _StructureWalk:
    """Visit every object once; later visits yield only its label."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # references, so that no other object reuses an id
        self._written: dict[type, tuple[set[str], set[str]]] = {}

    def module(self, name: str, module: nn.Module) -> Iterator[Part]:
        """Yield the attributes of one module, and its class."""
        kind = type(module)
        if kind not in self._written:
            self._written[kind] = (set(), set()) if _is_library(kind) else written_attributes(kind)
        for key in sorted(vars(module).keys() - LEFT_OUT):
            value, (stored, filled) = vars(module)[key], self._written[kind]
            left_out = key in stored or (key in filled and isinstance(value, FILLED))
            if not left_out and not (_is_library(kind) and key.startswith("_")):
                yield from self.value(f"{name}.{key}", value)
        for hooks in HOOKS:
            for i, hook in enumerate(vars(module).get(hooks, {}).values()):
                yield from self.value(f"{name}.{hooks}[{i}]", hook)
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{name} script", str(getattr(module, "code", "")).encode()
        yield from self.a_class(kind)

    def value(self, label: str, value: Any) -> Iterator[Part]:
        """Yield plain values, tensors other than parameters, code, and containers of them."""
        if isinstance(value, list | tuple | dict) and not is_plain(value):
            yield from self.held(label, value)
        elif (text := plain_text(value)) is not None:
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
        elif is_callable_code(value):
            yield from self.function(label, value)
        elif not isinstance(value, nn.Module | types.ModuleType) and _is_user_object(value):
            yield from self.a_class(type(value))
            yield from self.held(label, vars(value))

    def held(self, label: str, holder: Any) -> Iterator[Part]:
        """Yield the contents of a container or of a user's object."""
        if not self._new(holder):
            return
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in sorted(pairs, key=lambda pair: repr(pair[0])):
            yield from self.value(f"{label}[{key!r}]", value)

    def a_class(self, kind: type) -> Iterator[Part]:
        """Yield methods and plain attributes of a class and its bases, up to the first class of a library."""
        for base in kind.__mro__:
            if _is_library(base) or base is object or not self._new(base):
                continue
            for key in sorted(vars(base)):
                value = vars(base)[key]
                value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if is_callable_code(value) or not key.startswith("__"):
                    yield from self.value(f"{base.__qualname__}.{key}", value)

    def function(self, label: str, f: Any) -> Iterator[Part]:
        """Yield a function's code, closure and globals; of a library's function only the name."""
        f = getattr(f, "__func__", f)
        if not isinstance(f, types.FunctionType) or _is_library(f):
            yield label, f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', '')}".encode()
            return
        if not self._new(f):
            return
        yield label, code_text(f.__code__, f.__doc__).encode("utf-8", "surrogatepass")
        yield from self.value(f"{label} defaults", (f.__defaults__, f.__kwdefaults__))
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if _has_contents(cell):
                yield from self.value(f"{label} {name}", cell.cell_contents)
        for name in sorted(_global_names(f.__code__)):
            value = f.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not _is_library_name(value.__name__):
                for key in sorted(set(_names(f.__code__)) & vars(value).keys()):
                    yield from self.value(f"{name}.{key}", vars(value)[key])
            elif value is not None:
                yield from self.value(f"global {name}", value)

    def _new(self, value: Any) -> bool:
        new = id(value) not in self._seen and len(self._seen) < MAX_VISITED
        self._seen[id(value)] = value
        return new


def _is_user_object(x: Any) -> bool:
    """Return True if an object has attributes and its class is not from a library."""
    return hasattr(x, "__dict__") and type(x).__module__ != "builtins" and not _is_library(type(x))


def is_callable_code(x: Any) -> bool:
    """Return True for a Python or compiled function, or a method."""
    return isinstance(x, types.FunctionType | types.MethodType | types.BuiltinFunctionType)


def code_text(code: types.CodeType, doc: str | None = None) -> str:
    """Return instructions, names and constants as text, without line numbers and docstring."""
    consts = [
        code_text(c) if isinstance(c, types.CodeType) else plain_text(c) or repr(c)
        for c in code.co_consts
        if doc is None or c is not doc
    ]
    about = code.co_argcount, code.co_kwonlyargcount, code.co_names, code.co_freevars
    return repr((code.co_code.hex(), about, consts))


def written_attributes(kind: type) -> tuple[set[str], set[str]]:
    """Return the attributes that `forward` and its callees assign, and those they may modify in place."""
    stored, filled, waiting, seen = set[str](), set[str](), ["forward", "__call__"], set[str]()
    while waiting:
        name = waiting.pop()
        f = getattr(kind, name, None)
        f = inspect.unwrap(f) if isinstance(f, types.FunctionType) else getattr(f, "__func__", None)
        if name in seen or not isinstance(f, types.FunctionType) or _is_library(f):
            continue
        seen.add(name)
        for code in _nested_codes(f.__code__):
            steps = list(dis.get_instructions(code))
            for i, step in enumerate(steps):
                if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                    stored.add(step.argval)
                elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    waiting.append(step.argval)
                    if any(_is_write(after) for after in steps[i + 1 : i + 1 + MAX_WRITE_DISTANCE]):
                        filled.add(step.argval)
    return stored, filled


def _is_write(step: dis.Instruction) -> bool:
    called = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in MUTATING
    return called or step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all nested ones."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested_codes(const)


def _names(code: types.CodeType) -> Iterable[str]:
    return (name for nested in _nested_codes(code) for name in nested.co_names)


def _global_names(code: types.CodeType) -> set[str]:
    return {
        step.argval
        for nested in _nested_codes(code)
        for step in dis.get_instructions(nested)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _has_contents(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_library(x: Any) -> bool:
    """Return True if a class or function is from a library."""
    return _is_library_name(getattr(x, "__module__", None) or "")


def _is_library_name(module: str) -> bool:
    return module.split(".")[0] in LIBRARIES


# ----------------------------------------------------------------------------- plain values


def without_addresses(words: str) -> str:
    """Return the text of an object without memory addresses."""
    return ADDRESS.sub("", words)


def plain_text(value: Any, *, deep: int = DEEP) -> str | None:
    """Return the text of a plain value, None for other values, with "?" for them inside containers."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, SIMPLE):
        return repr(value)
    if isinstance(value, NAMED):
        return str(value)
    if deep == 0:
        return None
    if isinstance(value, tuple | list):
        return f"({', '.join(_plain_or_unknown(x, deep) for x in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_plain_or_unknown(x, deep) for x in value))}}}"
    if isinstance(value, dict):
        items = (f"{_plain_or_unknown(k, deep)}: {_plain_or_unknown(v, deep)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return f"{type(value).__name__}{plain_text(values, deep=deep - 1)}"
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return f"{type(value).__name__}{plain_text(vars(value), deep=deep - 1)}"
    return None


def is_plain(value: Any, *, deep: int = DEEP) -> bool:
    """Return True if a value is plain; containers must hold only plain values."""
    if deep and isinstance(value, tuple | list | dict):
        items = value.values() if isinstance(value, dict) else value
        return all(is_plain(x, deep=deep - 1) for x in items)
    return plain_text(value, deep=deep) is not None


def _plain_or_unknown(value: Any, deep: int) -> str:
    return plain_text(value, deep=deep - 1) or "?"

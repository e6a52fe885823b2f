"""Plain values as text that is the same in every process: numbers, strings, and containers of them."""

from __future__ import annotations

import argparse
import re
import types
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

ADDRESS = re.compile(r"0x[0-9a-f]+")  # in the words of an object, another in every process
SIMPLE = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
DEEP = 6


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

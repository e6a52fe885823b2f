"""Which parameters a person means: names, globs and regular expressions, modules, parameters, lists of them.

A module inside of the model stands for all of its parameters, and a parameter for the blocks that lie in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from curvescope.core.errors import UsageError
from curvescope.models.choice.selecting import Word

Params = str | re.Pattern[str] | nn.Module | Tensor | Iterable[Any]


def as_params(given: Params) -> tuple[Any, ...]:
    """What is given, one thing or a list of them, as a flat tuple."""
    if isinstance(given, Mapping):
        raise UsageError("expected names, modules or parameters, got a dictionary", hint="list(parameters)")
    if isinstance(given, str | re.Pattern | nn.Module | Tensor) or not isinstance(given, Iterable):
        return (given,)
    found = tuple(one for item in given for one in as_params(item))
    if not found:
        raise UsageError("expected at least one block or glob, got none", hint="'*' takes all blocks")
    return found


def words_of(given: Iterable[Params], module: nn.Module, name: str) -> list[Word]:
    """Modules, parameters and second names of tied ones as names of parameters; other words as they are."""
    return [_word(item, module, name) for one in given for item in as_params(one)]


def _word(item: Any, module: nn.Module, name: str) -> Word:
    if isinstance(item, nn.Module):
        inside = any(item is part for part in module.modules())
        wanted, what = list(item.parameters()), f"a {type(item).__name__}"
        if inside and not wanted:
            raise UsageError(f"expected a module with parameters, the {type(item).__name__} has none")
    elif isinstance(item, Tensor):
        wanted, what, inside = [item], f"a tensor of {tuple(item.shape)}", True
    elif isinstance(item, str) and (tied := _tied(item, module)) is not None:
        wanted, what, inside = [tied], item, True
    else:
        return item
    ids = {id(p) for p in wanted}
    names = frozenset(key for key, p in module.named_parameters() if id(p) in ids)
    if not inside or not names:
        raise UsageError(
            f"expected a module or a parameter of {name}, got {what} that is not in it",
            hint="another dtype or device is a copy: take it from problem.model.module",
        )
    return names


def _tied(name: str, module: nn.Module) -> Tensor | None:
    """The parameter of this name where it is another name's too, under which its blocks are."""
    first = dict(module.named_parameters())
    return None if name in first else dict(module.named_parameters(remove_duplicate=False)).get(name)

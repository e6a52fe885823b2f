"""Selection of the parameters of a problem: patterns, what they match, and what is frozen.

A pattern is a glob, a regular expression, or the name of a block or a parameter. It is compared with the
names of blocks first. If no block matches, it is compared with the names of parameters, and selects every
block inside them: `encoder.*`, `transformer.h.0.mlp.c_fc.weight`.

Users may also give modules, parameters and lists of them. A module inside of the model selects all of its
parameters, and a parameter selects the blocks inside it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from curvescope.core.blocks import Block, ParamSpace
from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.core.number_format import plural
from curvescope.models.running.patching import locked

if TYPE_CHECKING:
    from curvescope.models.model import Model

REGEX = "re:"
HEAD = re.compile(r"(?P<layer>[^.]+)\.h\d+\.(?P<role>[^.]+)")
Blocks = Mapping[str, Block]
ParameterPattern = str | re.Pattern[str] | frozenset[str]
"""A glob, a regular expression (or the string "re:…"), or full names of parameters."""


def select(
    patterns: Iterable[ParameterPattern],
    blocks: Blocks,
    heads: Blocks,
    *,
    first: Collection[str] | None = None,
) -> list[Block]:
    """Return the blocks that match one of the patterns, in the model's order.

    Only a pattern that names heads (`L0.h*.W_Q`) is compared with `heads`. Regular expressions match full
    names. A pattern without a match is an error that suggests the nearest names. A pattern that matches
    blocks and, in addition, names of other parameters is an error, too.

    Args:
        first: Names of blocks or heads that a pattern is compared with first; then with all, if none matches.
    """
    preferred = {name: block for name, block in {**blocks, **heads}.items() if name in (first or ())}
    own_heads = {name: block for name, block in heads.items() if matrix_of_head(name) in preferred}
    chosen: dict[str, Block] = {}
    for pattern in patterns:
        if not isinstance(pattern, str | re.Pattern | frozenset):
            raise UsageError(f"expected the name of a block or a glob, got {pattern!r}")
        matched = _matched(pattern, preferred, own_heads) or _matched(pattern, blocks, heads)
        if not matched:
            raise UsageError(f"no block matches {_quoted(pattern)}", hint=_nearest(pattern, blocks, heads))
        chosen.update((block.name, block) for block in matched)
    order = {name: i for i, name in enumerate([*blocks, *heads])}
    selected = sorted(chosen.values(), key=lambda block: order[block.name])
    _refuse_overlap(selected)
    return selected


def matrix_of_head(head: str) -> str | None:
    """Return `L0.W_Q` for `L0.h3.W_Q`, and None if the block is not a head's."""
    match = HEAD.fullmatch(head)
    return f"{match['layer']}.{match['role']}" if match else None


def _matched(pattern: ParameterPattern, blocks: Blocks, heads: Blocks) -> list[Block]:
    """Return the blocks that match a pattern by block name, or by parameter name, or by head."""
    if isinstance(pattern, frozenset):
        return [block for block in blocks.values() if block.parameter in pattern]
    fits = _test(pattern)
    named = [block for name, block in blocks.items() if fits(name)]
    stored = [block for block in blocks.values() if fits(block.parameter)]
    if named and all(block.name == block.parameter for block in named):
        return stored  # the glob matches parameters, some with roles
    if named:
        _refuse_both(pattern, named, stored)
        return named
    if stored or not _may_be_heads(pattern):
        return stored
    return [block for name, block in heads.items() if fits(name)]


def _test(pattern: str | re.Pattern[str]) -> Callable[[str], bool]:
    """Return a function that is True if a full name matches."""
    if isinstance(pattern, str) and not pattern.startswith(REGEX):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    try:
        rule = re.compile(pattern.removeprefix(REGEX)) if isinstance(pattern, str) else pattern
        rule.fullmatch("")
    except (re.error, TypeError) as error:
        raise UsageError(f"expected a regular expression, got {_quoted(pattern)}: {error}") from error
    return lambda name: rule.fullmatch(name) is not None


def _refuse_both(pattern: str | re.Pattern[str], named: list[Block], stored: list[Block]) -> None:
    names = {block.name for block in named}
    more = next((block for block in stored if block.name not in names), None)
    if more is not None:
        raise UsageError(
            f"{_quoted(pattern)} matches the name of the block {named[0].name}, and also the parameter "
            f"{more.parameter} of the block {more.name}",
            hint="name the blocks, or give modules or parameters",
        )


def _nearest(pattern: ParameterPattern, blocks: Blocks, heads: Blocks) -> str | None:
    """Return a hint: the number of layers if the layer does not exist, else the nearest names."""
    if isinstance(pattern, frozenset):
        return None
    if not isinstance(pattern, str) or pattern.startswith(REGEX):
        return "a regular expression must match full names, such as " + ", ".join(list(blocks)[:3])
    layer = re.match(r"L(\d+)\.", pattern)
    layers = {int(match[1]) for name in blocks if (match := re.match(r"L(\d+)\.", name))}
    if layer and layers and int(layer[1]) not in layers:
        last = max(layers)
        return f"{last + 1} layers, L0 to L{last}" if last else "one layer, L0"
    if layer and not layers:
        known = ", ".join(list(blocks)[:4]) + (", …" if len(blocks) > 4 else "")
        return (
            "no layers were found, so blocks have the names of parameters: "
            f"{known}; cs.load(module, roles={{'L{{layer}}.W_Q': …}}) gives them roles"
        )
    names = [*blocks, *heads, *(block.parameter for block in blocks.values())]
    return near_misses(pattern, list(dict.fromkeys(names)))


def _may_be_heads(pattern: str | re.Pattern[str]) -> bool:
    """Return True if the second part of a glob begins with h, as in `L0.h3.W_Q`; True for any expression."""
    if not isinstance(pattern, str) or pattern.startswith(REGEX):
        return True
    parts = pattern.split(".")
    return len(parts) == 3 and parts[1].startswith("h")


def _quoted(pattern: ParameterPattern) -> str:
    if isinstance(pattern, re.Pattern):
        return repr(f"{REGEX}{pattern.pattern}")
    return repr(pattern) if isinstance(pattern, str) else f"the parameters {', '.join(sorted(pattern))}"


def _refuse_overlap(selected: list[Block]) -> None:
    names = {block.name for block in selected}
    for block in selected:
        if (whole := matrix_of_head(block.name)) in names:
            raise UsageError(
                f"the blocks {whole} and {block.name} overlap",
                hint="choose the whole matrix or its heads, not both",
            )


MAX_LISTED = 4  # names listed in a note


class ParameterChoice:
    """Parameters that vary in a problem: `params`, or all that are not frozen (`requires_grad=False`).

    The frozen parameters are determined once; `check` raises if they have changed.
    """

    def __init__(self, model: Model, params: Params | None = None):
        self._model, self.params = model, params
        self._frozen: frozenset[str] | None = None
        if params is not None:
            self._own = frozenset(block.name for block in model.space(params))
            return
        self._frozen = frozen_names = frozen(model)
        self._own = frozenset(
            name for name, block in model.blocks.items() if block.parameter not in frozen_names
        )
        if not self._own:
            raise UsageError(
                f"every parameter of {model.name} is frozen (requires_grad=False), so nothing varies",
                hint="params='*' takes all of them",
            )

    def space(self, *patterns: Params) -> ParamSpace:
        """Return the space over the parameters that vary, or over selected blocks.

        A pattern is matched with the parameters that vary first, and with all blocks if none of them matches.
        """
        return self._model.space(*patterns, first=self._own)

    def check(self) -> None:
        """Raise if parameters were frozen or unfrozen since the choice was made."""
        if self._frozen is None or (frozen_now := frozen(self._model)) == self._frozen:
            return
        changed = sorted(frozen_now ^ self._frozen)
        word = "frozen" if changed[0] in frozen_now else "thawed"
        raise CurvescopeError(
            f"since the problem was made, {plural(len(changed), 'parameter')} of {self._model.name} became "
            f"{word}: {_list(changed)}",
            hint="make a new Problem; with params='*', or names, frozen parameters do not matter",
        )

    def notes(self) -> list[str]:
        """Notes on the parameters that were left out."""
        return frozen_notes(self._model, self._frozen) if self._frozen else []


def frozen(model: Model) -> frozenset[str]:
    """Return the frozen parameters, waiting for products in other threads that unfreeze them temporarily."""
    with locked(model.module):
        return frozenset(name for name, p in model.named_parameters() if not p.requires_grad)


def frozen_notes(model: Model, frozen: frozenset[str]) -> list[str]:
    """Return notes on how much is frozen, in which blocks, and how to include it."""
    frozen_blocks = [block for block in model.blocks.values() if block.parameter in frozen]
    if not frozen_blocks:
        return []
    count, total = model.size_of(*frozen_blocks), plural(model.num_parameters, "parameter")
    return [
        f"{count:,} of {total} are frozen (requires_grad=False) and left out: "
        f"{_list([block.name for block in frozen_blocks])}; params='*', or their names, include them"
    ]


def _list(names: list[str]) -> str:
    """Format the first names, and the number of others."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


Params = str | re.Pattern[str] | nn.Module | Tensor | Iterable[Any]


def as_params(given: Params) -> tuple[Any, ...]:
    """Return the given selection, single or a list, as a flat tuple."""
    if isinstance(given, Mapping):
        raise UsageError("expected names, modules or parameters, got a dictionary", hint="list(parameters)")
    if isinstance(given, str | re.Pattern | nn.Module | Tensor) or not isinstance(given, Iterable):
        return (given,)
    items = tuple(part for item in given for part in as_params(item))
    if not items:
        raise UsageError("expected at least one block or glob, got none", hint="'*' takes all blocks")
    return items


def as_patterns(given: Iterable[Params], module: nn.Module, name: str) -> list[ParameterPattern]:
    """Convert modules, parameters and second names of tied parameters to names; keep other patterns."""
    return [_target_pattern(item, module, name) for entry in given for item in as_params(entry)]


def _target_pattern(item: Any, module: nn.Module, name: str) -> ParameterPattern:
    if isinstance(item, nn.Module):
        inside = any(item is part for part in module.modules())
        tensors, description = list(item.parameters()), f"a {type(item).__name__}"
        if inside and not tensors:
            raise UsageError(f"expected a module with parameters, but the {type(item).__name__} has none")
    elif isinstance(item, Tensor):
        tensors, description, inside = [item], f"a tensor of {tuple(item.shape)}", True
    elif isinstance(item, str) and (tied := _tied(item, module)) is not None:
        tensors, description, inside = [tied], item, True
    else:
        return item
    ids = {id(p) for p in tensors}
    names = frozenset(key for key, p in module.named_parameters() if id(p) in ids)
    if not inside or not names:
        raise UsageError(
            f"expected a module or a parameter of {name}, got {description} that is not in it",
            hint="a model in another dtype or on another device is a copy: use problem.model.module",
        )
    return names


def _tied(name: str, module: nn.Module) -> Tensor | None:
    """Return the tied parameter with this second name; its blocks have its first name."""
    first = dict(module.named_parameters())
    return None if name in first else dict(module.named_parameters(remove_duplicate=False)).get(name)

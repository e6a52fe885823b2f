"""Which parameters a problem is about: words for them, what they match, what is frozen.

A word is a glob, a regular expression, or the name of a block or a parameter. It is compared with the names
of blocks first. Where none of them matches, it is compared with the names of parameters, and stands for every
block that lies in one: `encoder.*`, `transformer.h.0.mlp.c_fc.weight`.

A person may also give modules, parameters and lists of them. A module inside of the model stands for all of
its parameters, and a parameter for the blocks that lie in it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from curvescope.core.blocks import Block, ParamSpace
from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.core.numbers import plural
from curvescope.models.running.exchange import locked

if TYPE_CHECKING:
    from curvescope.models.model import Model

REGEX = "re:"
HEAD = re.compile(r"(?P<layer>[^.]+)\.h\d+\.(?P<role>[^.]+)")
Blocks = Mapping[str, Block]
Word = str | re.Pattern[str] | frozenset[str]
"""A glob, a regular expression (or the string "re:…"), or whole names of parameters."""


def select(
    patterns: Iterable[Word], blocks: Blocks, heads: Blocks, *, first: Collection[str] | None = None
) -> list[Block]:
    """Blocks that match one of the patterns, in the model's order.

    Only a pattern that names heads (`L0.h*.W_Q`) looks among `heads`. Regular expressions match whole names.
    What matches nothing is an error that names the nearest, and so is what matches names of blocks and beside
    them names of further parameters.

    Args:
        first: Names of blocks or heads; a pattern looks among these, and only where none matches among all.
    """
    own = {name: block for name, block in {**blocks, **heads}.items() if name in (first or ())}
    own_heads = {name: block for name, block in heads.items() if whole_of(name) in own}
    chosen: dict[str, Block] = {}
    for pattern in patterns:
        if not isinstance(pattern, str | re.Pattern | frozenset):
            raise UsageError(f"expected the name of a block or a glob, got {pattern!r}")
        matched = _matched(pattern, own, own_heads) or _matched(pattern, blocks, heads)
        if not matched:
            raise UsageError(f"no block matches {_word(pattern)}", hint=_nearest(pattern, blocks, heads))
        chosen.update((block.name, block) for block in matched)
    order = {name: i for i, name in enumerate([*blocks, *heads])}
    found = sorted(chosen.values(), key=lambda block: order[block.name])
    _refuse_overlap(found)
    return found


def whole_of(head: str) -> str | None:
    """`L0.W_Q` for `L0.h3.W_Q`, and None for the name of a block that is no head's."""
    match = HEAD.fullmatch(head)
    return f"{match['layer']}.{match['role']}" if match else None


def _matched(pattern: Word, blocks: Blocks, heads: Blocks) -> list[Block]:
    """By the names of blocks, else of parameters, else of heads."""
    if isinstance(pattern, frozenset):
        return [block for block in blocks.values() if block.parameter in pattern]
    fits = _test(pattern)
    named = [block for name, block in blocks.items() if fits(name)]
    stored = [block for block in blocks.values() if fits(block.parameter)]
    if named and all(block.name == block.parameter for block in named):
        return stored  # a glob over names of parameters, some of which have roles
    if named:
        _refuse_both(pattern, named, stored)
        return named
    if stored or not _may_be_heads(pattern):
        return stored
    return [block for name, block in heads.items() if fits(name)]


def _test(pattern: str | re.Pattern[str]) -> Callable[[str], bool]:
    """Whether a name matches as a whole."""
    if isinstance(pattern, str) and not pattern.startswith(REGEX):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    try:
        rule = re.compile(pattern.removeprefix(REGEX)) if isinstance(pattern, str) else pattern
        rule.fullmatch("")
    except (re.error, TypeError) as error:
        raise UsageError(f"expected a regular expression, got {_word(pattern)}: {error}") from error
    return lambda name: rule.fullmatch(name) is not None


def _refuse_both(pattern: str | re.Pattern[str], named: list[Block], stored: list[Block]) -> None:
    names = {block.name for block in named}
    more = next((block for block in stored if block.name not in names), None)
    if more is not None:
        raise UsageError(
            f"{_word(pattern)} matches the block {named[0].name} by its name, and the parameter "
            f"{more.parameter} of another one, {more.name}",
            hint="name the blocks, or give modules or parameters",
        )


def _nearest(pattern: Word, blocks: Blocks, heads: Blocks) -> str | None:
    """A hint: how many layers there are where another is asked for, else the nearest names."""
    if isinstance(pattern, frozenset):
        return None
    if not isinstance(pattern, str) or pattern.startswith(REGEX):
        return "a regular expression matches whole names, such as " + ", ".join(list(blocks)[:3])
    asked = re.match(r"L(\d+)\.", pattern)
    layers = {int(found[1]) for name in blocks if (found := re.match(r"L(\d+)\.", name))}
    if asked and layers and int(asked[1]) not in layers:
        last = max(layers)
        return f"{last + 1} layers, L0 to L{last}" if last else "one layer, L0"
    if asked and not layers:
        known = ", ".join(list(blocks)[:4]) + (", …" if len(blocks) > 4 else "")
        return (
            "no layers were found, so blocks have the names of parameters: "
            f"{known}; cs.load(module, roles={{'L{{layer}}.W_Q': …}}) gives them roles"
        )
    names = [*blocks, *heads, *(block.parameter for block in blocks.values())]
    return near_misses(pattern, list(dict.fromkeys(names)))


def _may_be_heads(pattern: str | re.Pattern[str]) -> bool:
    """Whether a glob's second dotted part begins with h, as in `L0.h3.W_Q` or `*.h*.W_O`; any expression."""
    if not isinstance(pattern, str) or pattern.startswith(REGEX):
        return True
    parts = pattern.split(".")
    return len(parts) == 3 and parts[1].startswith("h")


def _word(pattern: Word) -> str:
    if isinstance(pattern, re.Pattern):
        return repr(f"{REGEX}{pattern.pattern}")
    return repr(pattern) if isinstance(pattern, str) else f"the parameters {', '.join(sorted(pattern))}"


def _refuse_overlap(found: list[Block]) -> None:
    names = {block.name for block in found}
    for block in found:
        if (whole := whole_of(block.name)) in names:
            raise UsageError(
                f"blocks {whole} and {block.name} overlap",
                hint="choose the whole matrix or its heads, not both",
            )


SHOWN = 4  # names in a note


class Choice:
    """What varies in a problem: `params`, or all that is not frozen (`requires_grad=False`).

    What is frozen counts as it is when the choice is made; `check` raises where that has changed.
    """

    def __init__(self, model: Model, params: Params | None = None):
        self._model, self.params = model, params
        self._frozen: frozenset[str] | None = None
        if params is not None:
            self._own = frozenset(block.name for block in model.space(params))
            return
        self._frozen = left = frozen(model)
        self._own = frozenset(name for name, block in model.blocks.items() if block.parameter not in left)
        if not self._own:
            raise UsageError(
                f"every parameter of {model.name} is frozen (requires_grad=False), so that nothing varies",
                hint="params='*' takes all of them",
            )

    def space(self, *patterns: Params) -> ParamSpace:
        """Vectors over what varies, or over the blocks that are meant: among these, else among all."""
        return self._model.space(*patterns, first=self._own)

    def check(self) -> None:
        """Raise when parameters were frozen or thawed since."""
        if self._frozen is None or (now := frozen(self._model)) == self._frozen:
            return
        changed = sorted(now ^ self._frozen)
        word = "frozen" if changed[0] in now else "thawed"
        raise CurvescopeError(
            f"since the problem was made, {plural(len(changed), 'parameter')} of {self._model.name} became "
            f"{word}: {_list(changed)}",
            hint="make a new Problem; with params='*', or names, what is frozen does not matter",
        )

    def notes(self) -> list[str]:
        """What was left out, where something was."""
        return notes_of(self._model, self._frozen) if self._frozen else []


def frozen(model: Model) -> frozenset[str]:
    """Parameters that are frozen by their owner; a product in another thread may thaw them for a while."""
    with locked(model.module):
        return frozenset(name for name, p in model.named_parameters() if not p.requires_grad)


def notes_of(model: Model, frozen: frozenset[str]) -> list[str]:
    """How much is frozen, which blocks, and how to take them."""
    left = [block for block in model.blocks.values() if block.parameter in frozen]
    if not left:
        return []
    count, total = model.size_of(*left), plural(model.num_parameters, "parameter")
    return [
        f"{count:,} of {total} are frozen (requires_grad=False) and left out: "
        f"{_list([block.name for block in left])}; params='*' takes them too, and so does naming them alone"
    ]


def _list(names: list[str]) -> str:
    """The first of the names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


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
    return [_target_word(item, module, name) for one in given for item in as_params(one)]


def _target_word(item: Any, module: nn.Module, name: str) -> Word:
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

"""Which blocks a person means: globs, regular expressions, and names of blocks or of parameters.

A word is compared with the names of blocks first. Where none of them matches, it is compared with the names
of parameters, and stands for every block that lies in one: `encoder.*`, `transformer.h.0.mlp.c_fc.weight`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from curvescope.core.blocks import Block
from curvescope.core.errors import UsageError, near_misses

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

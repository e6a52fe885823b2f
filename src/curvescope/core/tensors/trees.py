"""Trees of tensors: a tensor, or a tuple or mapping of trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Tree = Any
"""A tensor, or a tuple (named ones too), list or mapping of trees."""


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with `function` applied to each leaf; lists become tuples, mappings dictionaries."""
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        branches = [tree_map(function, branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    return function(tree)


def leaves(tree: Tree) -> list[Any]:
    """The leaves, from the first to the last."""
    branches = tree.values() if isinstance(tree, Mapping) else tree
    if isinstance(tree, Mapping | tuple | list):
        return [leaf for branch in branches for leaf in leaves(branch)]
    return [tree]

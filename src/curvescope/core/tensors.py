"""Tensors: trees of them, the autograd graph behind one, and how much memory is left for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

IGNORED = -100
"""A target that does not count, in sums and in the number of terms."""


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


_ONCE = once_differentiable(lambda ctx: None).__code__  # the code of every backward that is so marked


def nodes(z: Tensor) -> list[Node]:
    """Return all nodes of the graph that made z, each once."""
    found = [] if z.grad_fn is None else [z.grad_fn]
    seen = set(found)
    for node in found:  # which grows meanwhile
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                found.append(other)
    return found


def leaves_of(z: Tensor) -> Iterator[Tensor]:
    """The tensors that the graph of z begins with."""
    for node in nodes(z):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


def lookup_settings(node: Node) -> tuple[Any, ...]:
    """The settings of an embedding that its gradient alone depends on; () for any other function."""
    names = ("padding_idx", "scale_grad_by_freq", "sparse")
    return tuple(getattr(node, f"_saved_{name}", None) for name in names) if is_lookup(node) else ()


def is_lookup(node: Node) -> bool:
    """Return True if a function in the graph is that of an embedding."""
    return node.name().startswith("Embedding")


def lookup_option(node: Node) -> str | None:
    """The option of an embedding that makes its gradient sparse, or another one than that of the loss."""
    if not is_lookup(node):
        return None
    options = ("scale_grad_by_freq", "sparse")
    return next((option for option in options if getattr(node, f"_saved_{option}", False)), None)


def constant_rows(z: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Leaves of the graph of z with the row that a lookup holds constant: that of its `padding_idx`.

    Autograd has no derivative in it, but a finite difference that moves it has.
    """
    for node in nodes(z):
        row = getattr(node, "_saved_padding_idx", None)
        if is_lookup(node) and row is not None:
            leaf = getattr(node.next_functions[0][0], "variable", None)
            if isinstance(leaf, Tensor) and 0 <= row < len(leaf):  # −1, no padding, may be stored unsigned
                yield leaf, row


def once_differentiable_node(z: Tensor) -> Node | None:
    """A function marked @once_differentiable in the graph that made z, if there is one.

    Such a function cuts the graph of the gradient, so that its second derivative would silently be zero.
    """
    return next((node for node in nodes(z) if _is_marked(node)), None)


def custom_functions(z: Tensor) -> list[str]:
    """Names of functions with a hand-written backward in the graph that made z, without this package's."""
    return sorted({name for node in nodes(z) if (name := _custom_name(node)) is not None})


def _custom_name(node: Node) -> str | None:
    cls = getattr(node, "_forward_cls", None)
    if cls is None:  # one written in C++ has no class of its own in Python
        return node.name() if type(node).__name__ == "CppFunction" else None
    return None if cls.__module__.split(".")[0] == __name__.split(".")[0] else cls.__qualname__


def _is_marked(node: Node) -> bool:
    """Return True if the node's backward is marked, also beneath further decorators."""
    backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
    while backward is not None:
        if getattr(backward, "__code__", None) is _ONCE:
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


def take_each(
    ends: Sequence[Tensor],
    leaves: Sequence[Tensor],
    take: Callable[[int, Tensor], object],
    *,
    cotangents: Sequence[Tensor] | None = None,
    create_graph: bool = False,
) -> None:
    """Hand Σ cᵀ ∂end/∂leaf over, `take(number of the leaf, derivative)`, as soon as it is whole.

    Leaves that nothing depends on are left out. The memory of a derivative is free once `take` has let it go.
    """

    def hook(number: int, derivative: Tensor | None) -> Tensor | None:
        if derivative is None:  # some function's result for a leaf that it does not depend on
            return None
        take(number, derivative)
        return derivative.new_zeros(()).expand(derivative.shape)

    hooks = [leaf.register_hook(partial(hook, number)) for number, leaf in enumerate(leaves)]
    try:
        torch.autograd.grad(ends, leaves, cotangents, create_graph=create_graph, allow_unused=True)
    finally:
        for one in hooks:
            one.remove()


GROUP = Path("/sys/fs/cgroup")  # where Linux says what a container may have


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated now."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2 * 2**30  # no way to ask: assume a small machine


def free_host_bytes() -> int:
    """Memory of the machine that this process could have, in a container too."""
    free = free_bytes(torch.device("cpu"))
    with suppress(OSError, ValueError, IndexError):  # no container, or "max", which is no number
        most = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        files = next(x for x in (GROUP / "memory.stat").read_text().splitlines() if x.startswith("file "))
        free = min(free, most - used + int(files.split()[1]))  # files in its memory give way
    return max(free, 0)

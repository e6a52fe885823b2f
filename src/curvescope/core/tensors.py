"""Trees of tensors, inspection of autograd graphs, and free memory."""

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
"""Target label that is ignored in sums and in the number of terms."""


Tree = Any
"""A tensor, or a tuple, named tuple, list or mapping of trees."""


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply `function` to each leaf of a tree; lists become tuples, mappings dictionaries."""
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        branches = [tree_map(function, branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    return function(tree)


def leaves(tree: Tree) -> list[Any]:
    """Leaves of a tree, in order."""
    branches = tree.values() if isinstance(tree, Mapping) else tree
    if isinstance(tree, Mapping | tuple | list):
        return [leaf for branch in branches for leaf in leaves(branch)]
    return [tree]


_ONCE_DIFFERENTIABLE_CODE = once_differentiable(
    lambda ctx: None
).__code__  # shared by all backwards with this mark


def graph_nodes(z: Tensor) -> list[Node]:
    """Return all nodes of the autograd graph of z, each once."""
    result = [] if z.grad_fn is None else [z.grad_fn]
    seen = set(result)
    for node in result:  # the list grows during the loop
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                result.append(next_node)
    return result


def graph_leaves(z: Tensor) -> Iterator[Tensor]:
    """Leaf tensors of the autograd graph of z."""
    for node in graph_nodes(z):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


LOOKUP = "Embedding"  # start of the name of an embedding's node in autograd's graph


def lookup_settings(node: Node) -> tuple[Any, ...]:
    """Settings of an embedding's node that change its gradient but not its output."""
    names = ("padding_idx", "scale_grad_by_freq", "sparse")
    return tuple(getattr(node, f"_saved_{name}", None) for name in names)


def is_lookup(node: Node) -> bool:
    """Return True if a function in the graph is that of an embedding."""
    return node.name().startswith(LOOKUP)


def lookup_option(node: Node) -> str | None:
    """Option of an embedding that makes its gradient sparse or different from the gradient of the loss."""
    if not is_lookup(node):
        return None
    options = ("scale_grad_by_freq", "sparse")
    return next((option for option in options if getattr(node, f"_saved_{option}", False)), None)


def constant_rows(z: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Leaves of the graph of z with the row of their `padding_idx`, which an embedding holds constant.

    Autograd's derivative with respect to this row is zero, but a finite difference would not be.
    """
    for node in graph_nodes(z):
        row = getattr(node, "_saved_padding_idx", None)
        if is_lookup(node) and row is not None:
            leaf = getattr(node.next_functions[0][0], "variable", None)
            if isinstance(leaf, Tensor) and 0 <= row < len(leaf):  # −1, no padding, may be stored unsigned
                yield leaf, row


def once_differentiable_node(z: Tensor) -> Node | None:
    """Return a node of the graph of z whose function is marked @once_differentiable, or None.

    Such a function cuts the graph of the gradient, so its second derivative would silently be zero.
    """
    return next((node for node in graph_nodes(z) if _is_marked(node)), None)


def custom_functions(z: Tensor) -> list[str]:
    """Names of custom autograd functions in the graph of z, except those of this package."""
    return sorted({name for node in graph_nodes(z) if (name := _custom_name(node)) is not None})


def _custom_name(node: Node) -> str | None:
    cls = getattr(node, "_forward_cls", None)
    if cls is None:  # a function written in C++ has no Python class
        return node.name() if type(node).__name__ == "CppFunction" else None
    return None if cls.__module__.split(".")[0] == __name__.split(".")[0] else cls.__qualname__


def _is_marked(node: Node) -> bool:
    """Return True if the node's backward is marked @once_differentiable, also beneath other decorators."""
    backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
    while backward is not None:
        if getattr(backward, "__code__", None) is _ONCE_DIFFERENTIABLE_CODE:
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


def receive_gradients(
    ends: Sequence[Tensor],
    leaves: Sequence[Tensor],
    receive: Callable[[int, Tensor], object],
    *,
    cotangents: Sequence[Tensor] | None = None,
    create_graph: bool = False,
) -> None:
    """Call `receive(index of leaf, Σ cᵀ ∂end/∂leaf)` for each leaf as soon as its derivative is complete.

    Leaves that no end depends on are skipped. A derivative's memory is freed once `receive` drops it.
    """

    def hook(number: int, derivative: Tensor | None) -> Tensor | None:
        if derivative is None:  # a function returned None for a leaf that it does not depend on
            return None
        receive(number, derivative)
        return derivative.new_zeros(()).expand(derivative.shape)

    handles = [leaf.register_hook(partial(hook, number)) for number, leaf in enumerate(leaves)]
    try:
        torch.autograd.grad(ends, leaves, cotangents, create_graph=create_graph, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


GROUP = Path("/sys/fs/cgroup")  # memory limits of a container on Linux


def free_bytes(device: torch.device) -> int:
    """Number of bytes that can be allocated now."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2 * 2**30  # unknown: assume a small machine


def free_host_bytes() -> int:
    """Number of bytes of host memory that this process can allocate, also in a container."""
    free = free_bytes(torch.device("cpu"))
    with suppress(OSError, ValueError, IndexError):  # no container, or the limit is "max"
        limit = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        file_cache = next(
            x for x in (GROUP / "memory.stat").read_text().splitlines() if x.startswith("file ")
        )
        free = min(free, limit - used + int(file_cache.split()[1]))  # the kernel frees cached files
    return max(free, 0)

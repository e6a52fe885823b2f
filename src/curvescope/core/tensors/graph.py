"""A walk over the nodes of an autograd graph, and what is to be known of those in it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

_ONCE = once_differentiable(lambda ctx: None).__code__  # the code of every backward that is so marked


def nodes(z: Tensor) -> Iterator[Node]:
    """Every node of the graph that made z, each once."""
    waiting = [] if z.grad_fn is None else [z.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        before = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= before
        waiting += before


def leaves_of(z: Tensor) -> Iterator[Tensor]:
    """The tensors that the graph of z begins with."""
    for node in nodes(z):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


def lookup_option(node: Node) -> str | None:
    """The option of an embedding that makes its gradient sparse, or another one than that of the loss."""
    if not node.name().startswith("Embedding"):
        return None
    options = ("scale_grad_by_freq", "sparse")
    return next((option for option in options if getattr(node, f"_saved_{option}", False)), None)


def constant_rows(z: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Leaves of the graph of z with the row that a lookup holds constant: that of its `padding_idx`.

    Autograd has no derivative in it, but a finite difference that moves it has.
    """
    for node in nodes(z):
        if node.name().startswith("Embedding") and hasattr(node, "_saved_padding_idx"):
            row, before = node._saved_padding_idx, node.next_functions[0][0]
            leaf = getattr(before, "variable", None)
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
    """Whether the node's backward is marked, also beneath further decorators."""
    backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
    while backward is not None:
        if getattr(backward, "__code__", None) is _ONCE:
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False

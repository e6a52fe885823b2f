"""Parameters that a module holds in a second way (a closure, a list), which exchanging does not reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvescope.core.errors import UsageError


class DispatchMode(TorchDispatchMode):
    """Torch's own mode, which does not hide its calls from `torch.compile`.

    To hide them, torch imports its compiler at the first call of a mode: two seconds before a first product.
    A compiled module gives the same numbers either way.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RefuseHeld(DispatchMode):
    """A pass inside raises where it reads memory of a parameter that another tensor stands for.

    Args:
        own: The module's parameters.
        values: Tensors in the place of some; where they share memory with the parameter nothing is refused.
    """

    def __init__(self, own: Mapping[str, Tensor], values: Mapping[str, Tensor]):
        super().__init__()
        self._spans = [
            (own[name].data_ptr(), own[name].data_ptr() + own[name].nbytes, name)
            for name, value in values.items()
            if value.data_ptr() != own[name].data_ptr()
        ]

        self._low = min((start for start, _, _ in self._spans), default=0)
        self._high = max((stop for _, stop, _ in self._spans), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._refuse(args)
        if kwargs:
            self._refuse(kwargs)
        return func(*args, **(kwargs or {}))

    def _refuse(self, x: Any) -> None:
        if isinstance(x, list | tuple | dict):
            for item in x.values() if isinstance(x, dict) else x:
                self._refuse(item)
        elif isinstance(x, Tensor) and x.layout == torch.strided:
            at = x.data_ptr()
            if self._low <= at < self._high:
                for start, stop, name in self._spans:
                    if start <= at < stop:
                        raise moved(name)


def moved(name: str) -> UsageError:
    """What is said where the parameter is held in a second way and other values were asked for."""
    return UsageError(
        f"the module holds {name!r} in a second way (a closure or a list), "
        "so the problem cannot be moved to other parameters",
        hint="write them into the module instead",
    )


def refuse_half(name: str, held: Iterable[str], ends: Iterable[Tensor | None]) -> None:
    """Raise where weights that are kept in half precision are read in a way that does not widen them.

    Args:
        name: Of the model.
        held: Parameters that the graph found by themselves.
        ends: What is differentiated; undefined where the number of a leaf was read.
    """
    found = sorted(held)
    undefined = any(end is not None and bool(end.detach().isnan().any()) for end in ends)
    if not found and not undefined:
        return
    which = repr(found[0]) if found else "some of them"
    raise UsageError(
        f"{name} keeps its weights in half precision, and {which} would be read outside of the layers that "
        "widen them (in a loss_fn, a closure, or parts of layers), or its outputs are undefined",
        hint="cs.load(…, dtype='float32')",
    )

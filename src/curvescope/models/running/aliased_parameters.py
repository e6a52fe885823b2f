"""Parameters that a module also holds in a closure or a list, where patching does not replace them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvescope.core.errors import UsageError


class DispatchMode(TorchDispatchMode):
    """Torch's dispatch mode, without hiding its calls from `torch.compile`.

    To hide them, torch would import its compiler at the first call of a mode, which takes two seconds. A
    compiled module gives the same numbers either way.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class RefuseAliased(DispatchMode):
    """Raise if a pass inside reads the memory of a parameter that is replaced by another tensor.

    Args:
        parameters: The module's parameters.
        values: Tensors that replace some parameters; a tensor that shares memory with its parameter is
            allowed.
    """

    def __init__(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]):
        super().__init__()
        self._spans = [
            (parameters[name].data_ptr(), parameters[name].data_ptr() + parameters[name].nbytes, name)
            for name, value in values.items()
            if value.data_ptr() != parameters[name].data_ptr()
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
                        raise aliased_error(name)


def aliased_error(name: str) -> UsageError:
    """Return the error for a replaced parameter that the module also holds in a closure or a list."""
    return UsageError(
        f"the module also holds {name!r} in a closure or a list, so the problem cannot be evaluated at "
        f"other parameters",
        hint="write the other values into the module instead",
    )


def refuse_unwidened(name: str, aliased: Iterable[str], ends: Iterable[Tensor | None]) -> None:
    """Raise if weights stored in half precision are read where they are not converted to float32.

    Args:
        name: Name of the model.
        aliased: Parameters that the graph reads directly.
        ends: Tensors to differentiate; they are NaN if the value of a leaf was read.
    """
    names = sorted(aliased)
    undefined = any(end is not None and bool(end.detach().isnan().any()) for end in ends)
    if not names and not undefined:
        return
    which = repr(names[0]) if names else "some of them"
    raise UsageError(
        f"{name} stores its weights in half precision, and {which} would be read outside of the layers "
        f"that convert them to float32 (in a loss_fn, a closure, or parts of layers), or its outputs are "
        f"NaN",
        hint="cs.load(…, dtype='float32')",
    )

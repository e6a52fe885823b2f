"""Modules for functions of parameters and inputs, f(params, x), in the style of torch.func."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor, nn

from curvescope.core.errors import UsageError

Params = Mapping[str, Any]
"""Tensors by name, or nested dictionaries of them."""


@final
class FunctionModule(nn.Module):
    """Module that calls f(params, x); its parameters share memory with the tensors given.

    Names of nested dictionaries are joined by points, `layer.weight`, and f gets the dictionaries back.
    """

    def __init__(self, function: Callable[..., Any], params: Params):
        super().__init__()
        self.function = function
        self._tree = {key: _names(value, f"{key}") for key, value in params.items()}
        for name, value in _flat(params):
            # register_parameter refuses names with points
            self._parameters[name] = nn.Parameter(value.detach())

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return f at the current parameters."""
        return self.function(_filled(self._tree, self._parameters), *inputs, **options)

    @property
    def name(self) -> str:
        """Name of f."""
        return name_of(self.function)

    @property
    def takes(self) -> inspect.Signature:
        """Signature of f without its parameters."""
        whole = inspect.signature(self.function)
        return whole.replace(parameters=list(whole.parameters.values())[1:])


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of its class."""
    return getattr(function, "__name__", type(function).__name__)


def is_function(source: Any) -> bool:
    """Return True if an object is callable and not a module."""
    return callable(source) and not isinstance(source, nn.Module | type)


def function_module(function: Callable[..., Any], params: Any) -> FunctionModule:
    """Return the module of f(params, x); raise unless `params` are real tensors by name."""
    name = name_of(function)
    if not isinstance(params, Mapping) or not params:
        raise UsageError(
            f"expected the parameters of the function {name} as a dictionary of tensors, got {params!r:.60}",
            hint="cs.Problem(f, data, params={'w': w}) for f(params, x)",
        )
    seen: set[str] = set()
    for key, value in _flat(params):
        if key in seen:
            raise UsageError(f"expected one parameter of {name} per name, but two are called {key!r}")
        seen.add(key)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"expected real tensors as parameters of {name}, but {key!r} is {kind}")
    return FunctionModule(function, params)


def _flat(params: Params, front: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{front}{key}.")
        else:
            yield f"{front}{key}", value


def _names(value: Any, name: str) -> Any:
    """Return the same nested dictionaries with names instead of values."""
    return {k: _names(v, f"{name}.{k}") for k, v in value.items()} if isinstance(value, Mapping) else name


def _filled(tree: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(tree, str):
        return values[tree]
    return {key: _filled(value, values) for key, value in tree.items()}

"""What flows through a model: each sublayer's input, attention pattern and output, by place."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.models.adapters.table import Place
from curvescope.models.model import Model
from curvescope.models.running.exchange import evaluating, exchanged
from curvescope.models.zoo.transformer import Transformer


def capture(
    model: Model, inputs: Tensor | Mapping[str, Tensor], *patterns: str, grad: bool = False
) -> dict[str, Tensor]:
    """The tensors at the places that match the globs, all without one; in eval mode.

    Places of layer i: `L{i}.attn.in` (B, T, d), `.attn.pattern` (B, h, T, T), `.attn.heads` (B, T, h k), the
    input of W_O, `.attn.out`, `.ff.in` and `.ff.out` (B, T, d). A sublayer's input is behind its norm when
    the norm stands before it, and its output is what is added to the stream (before a norm behind it).

    Args:
        model: A zoo model or one with an adapter.
        inputs: What the module takes.
        patterns: Globs such as "L*.attn.pattern".
        grad: Keep the graph, to differentiate.
    """
    if not isinstance(model.module, Transformer) and not model.places:
        raise UsageError(
            f"expected a model whose layers are known, got {model.name!r}, whose blocks are only parameters",
            hint="zoo models and the families with attention have places",
        )
    found: dict[str, Tensor] = {}
    with evaluating(model.module), torch.set_grad_enabled(grad), ExitStack() as hooks:
        if isinstance(model.module, Transformer):
            with exchanged(model.gathered()):
                model.module(inputs, record=found.__setitem__)
        else:
            for place, at in model.places.items():
                read = _reader(place, at, found, _num_sequences(inputs))
                hooks.enter_context(model.module.get_submodule(at.module).register_forward_hook(read))
            model.forward({}, inputs)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(place, pattern) for place in found):
            raise UsageError(f"no place matches {pattern!r}", hint=near_misses(pattern, list(found)))
    return {
        place: tensor
        for place, tensor in found.items()
        if not patterns or any(fnmatch.fnmatchcase(place, pattern) for pattern in patterns)
    }


def _num_sequences(inputs: Tensor | Mapping[str, Tensor]) -> int:
    return next(iter(inputs.values())).shape[0] if isinstance(inputs, Mapping) else inputs.shape[0]


def _reader(place: str, at: Place, found: dict[str, Tensor], num_sequences: int) -> Callable[..., None]:
    """A forward hook that keeps the tensor of one place."""

    def read(_: Any, arguments: tuple[Any, ...], output: Any) -> None:
        tensor = arguments[0] if at.kind == "input" else output
        if at.kind == "second":
            tensor = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(tensor, Tensor):
            raise CurvescopeError(f"expected a tensor at {place}, {at.module} gave a {type(tensor).__name__}")
        if tensor.dim() == 4 and place.endswith("attn.heads"):
            tensor = tensor.flatten(2)  # TransformerLens keeps heads apart
        if tensor.dim() == 2:
            tensor = tensor.unflatten(0, (num_sequences, -1))  # OPT flattens tokens
        found[place] = tensor

    return read

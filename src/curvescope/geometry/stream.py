"""The residual stream of every token: at the input, after each attention, and after each block.

Hooks on the blocks read it, so the points are the model's own for every architecture (a norm after attention,
a scale on the skip connection, parallel sublayers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.models.capture.activation_points import block_paths, norm_module
from curvescope.models.model import Model
from curvescope.models.running.patching import evaluating
from curvescope.models.zoo.transformer import Transformer

Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Stream:
    """Points of the residual stream in the order of the forward pass.

    `points` is (B, T, N, d) with N = 2 n_layers + 1; `names` are `in, L0.mid, L0.out, L1.mid, …`, where `mid`
    is the point after the attention of a block. `outputs` are the model's outputs, such as logits (B, T, V).
    """

    points: Tensor
    names: tuple[str, ...]
    outputs: Tensor

    @property
    def blocks(self) -> Tensor:
        """Points between blocks, without the middle points: (B, T, n_layers + 1, d)."""
        return self.points[:, :, ::2]


def stream(model: Model, inputs: Inputs) -> Stream:
    """Run the model once in eval mode and return its residual stream.

    In a pre-norm block the middle is the input of the second norm, x + attn(ln(x)). In a post-norm block it
    is the output of the first norm. In a parallel block it is x + attn(x), which no module reads.
    """
    paths = block_paths(model)
    tensors: dict[str, Tensor] = {}
    with evaluating(model.module), torch.no_grad(), ExitStack() as hooks:
        for i, path in enumerate(paths):
            block = model.module.get_submodule(path)
            hooks.enter_context(block.register_forward_hook(_reader(f"L{i}", tensors), with_kwargs=True))
            for place, module, kind in _middle(model, i):
                hooks.enter_context(
                    module.register_forward_hook(_reader(place, tensors, kind), with_kwargs=True)
                )
        outputs = model.forward({}, inputs)
    num_sequences = outputs.shape[0]
    for name, x in tensors.items():
        if x.dim() == 2:  # OPT flattens tokens inside its feed-forward
            tensors[name] = x.unflatten(0, (num_sequences, -1))
    points, names = [tensors["L0.in"]], ["in"]
    for i in range(len(paths)):
        points += [_mid_point(model, tensors, i), tensors[f"L{i}.out"]]
        names += [f"L{i}.mid", f"L{i}.out"]
    return Stream(torch.stack(points, dim=2), tuple(names), outputs)


def _middle(model: Model, i: int) -> list[tuple[str, nn.Module, str]]:
    """Return the hook for the middle of block i: (place, module, input or output)."""
    second = norm_module(model, f"L{i}.ln2")
    sequential = not model.facts.get("parallel", False)
    if second is not None and sequential and model.facts.get("norm") == "pre":
        return [(f"L{i}.mid", second, "input")]
    first = norm_module(model, f"L{i}.ln1")
    if first is not None and model.facts.get("norm") == "post":
        return [(f"L{i}.mid", first, "output")]
    if isinstance(model.module, Transformer):
        return []
    at = model.places[f"L{i}.attn.out"]
    return [(f"L{i}.attn", model.module.get_submodule(at.module), at.kind)]


def _mid_point(model: Model, tensors: dict[str, Tensor], i: int) -> Tensor:
    if f"L{i}.mid" in tensors:
        return tensors[f"L{i}.mid"]
    x, out = tensors[f"L{i}.in"], tensors[f"L{i}.out"]
    if f"L{i}.attn" in tensors:
        return x + tensors[f"L{i}.attn"]
    layer: Any = model.module.get_submodule(f"L{i}")  # a zoo layer without a second norm
    if not layer.cfg.ff_size:
        return out
    with torch.no_grad():
        pre = layer.cfg.norm == "pre"
        attended = layer.attend(layer.ln1(x) if pre else x, lambda place, tensor: None)
        return layer.cfg.residual_scale * x + attended if layer.cfg.residual else attended


def _reader(place: str, tensors: dict[str, Tensor], kind: str = "both") -> Callable[..., None]:
    """Return a forward hook that stores a module's first input, its (first) output, or both."""

    def read(_: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        first = arguments[0] if arguments else next(iter(options.values()))
        result = output[0] if isinstance(output, tuple) else output
        if kind == "both":
            tensors[f"{place}.in"], tensors[f"{place}.out"] = first, result
        else:
            tensors[place] = first if kind == "input" else result

    return read

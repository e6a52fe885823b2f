"""Named points of a model, at which activations are read or added during a pass.

    embed                    the stream before the first layer; also called `in` and `L0.in`
    L3.in, L3.mid, L3.out    the stream before a layer, after its attention, after the layer
    L3.attn.out, L3.ff.out   the output of a sublayer, before a norm that follows it
    L3.attn.heads            the outputs of all heads, the input of W_O; `L3.h1.out` is head 1's part
    final                    after the last norm: the input of the unembedding
    encoder.layers.2         the (first) output of any submodule; `encoder.layers.2.in` is its first input

A point x is changed by adding δ. If the stream is a sum, as it is after attention, δ is added to the
sublayer's output, so that it reaches the skip connection, too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError, UsageError, near_misses
from curvescope.models.adapters.table import ActivationPlace
from curvescope.models.capture.hook_sites import HookSite, Point, Side
from curvescope.models.model import Model
from curvescope.models.running.patching import evaluating, patched
from curvescope.models.zoo.transformer import Transformer

LAYER = re.compile(r"L(\d+)\.(.+)")
HEAD = re.compile(r"h(\d+)\.out")


def find_point(model: Model, at: str) -> Point:
    """Return the named point: of the stream, of a sublayer or head, or of a submodule's output or input."""
    known = point_names(model)
    if at in ("in", "embed") and "L0.in" in known:
        return replace(find_point(model, "L0.in"), name=at)
    if at in known:
        return _final(model) if at == "final" else _of_layer(model, at)
    owners = dict(model.module.named_modules())
    sides: list[tuple[str, Side]] = [(at, "output"), (at.removesuffix(".in"), "input")]
    for path, side in sides:
        if path and path in owners:
            site = HookSite(owners[path], side)
            return Point(at, site, ((1.0, site),))
    raise UsageError(
        f"expected a point of {model.name!r}, got {at!r}",
        hint=near_misses(at, ["embed", *known] if "L0.in" in known else [name for name in owners if name]),
    )


def point_names(model: Model) -> list[str]:
    """Return the names of a model's points; names of submodules are points, too."""
    try:
        num_layers = len(block_paths(model))
    except UsageError:
        return []
    parts = ["in", "mid", "out", "attn.out", "attn.heads"]
    parts += [f"h{j}.out" for j in range(model.facts.get("n_heads", 0))]
    names = []
    for i in range(num_layers):
        has_ff = _zoo(model).cfg.ff_size > 0 if is_zoo(model) else f"L{i}.ff.out" in model.places
        names += [f"L{i}.{part}" for part in [*parts, *(["ff.out"] if has_ff else [])]]
    return [*names, "final"]


def stream_points(model: Model) -> list[str]:
    """Return the points of the stream, `embed, L0.mid, L0.out, …`, in order."""
    layers = range(len(block_paths(model)))
    return ["embed", *(f"L{i}.{part}" for i in layers for part in ("mid", "out"))]


def _of_layer(model: Model, at: str) -> Point:
    match = LAYER.fullmatch(at)
    assert match is not None, "one of point_names"
    i, part = int(match[1]), match[2]
    block = model.module.get_submodule(block_paths(model)[i])
    if part in ("in", "out"):
        site = HookSite(block, "input" if part == "in" else "output")
        return Point(at, site, ((1.0, site),))
    if part == "mid":
        return _middle(model, i, block)
    head = HEAD.fullmatch(part)
    site = _sublayer(model, i, "attn.heads" if head else part)
    k = model.facts["d_head"]
    columns = slice(k * int(head[1]), k * int(head[1]) + k) if head else None
    return Point(at, site, ((1.0, site),), columns, by_head=head is not None or part == "attn.heads")


def _sublayer(model: Model, i: int, part: str) -> HookSite:
    """Return the hook site of `attn.heads`, `attn.out` or `ff.out` of a layer."""
    if is_zoo(model):
        layer = model.module.get_submodule(f"L{i}")
        if part == "ff.out":
            return HookSite(layer, "output", "feed_forward")
        return HookSite(layer, "input" if part == "attn.heads" else "output", "project")
    place = model.places[f"L{i}.{part}"]
    return HookSite(model.module.get_submodule(place.module), "input" if place.kind == "input" else "output")


def _middle(model: Model, i: int, block: nn.Module) -> Point:
    """Return the point between attention and feed-forward: after the post-norm, or the sum of both paths."""
    name, first = f"L{i}.mid", norm_module(model, f"L{i}.ln1")
    if model.facts.get("norm") == "post" and first is not None:
        site = HookSite(first, "output")
        return Point(name, site, ((1.0, site),))
    norm_after = norm_module(model, f"L{i}.ln1_post")
    added = _sublayer(model, i, "attn.out")
    # in TransformerLens attn.out is already the output of this norm
    if norm_after is not None and model.facts.get("kind") != "hooked_transformer":
        added = HookSite(norm_after, "output")
    read = ((skip_scale(model), HookSite(block, "input")), (1.0, added))
    return Point(name, added, read if skip_scale(model) else read[1:])


def skip_scale(model: Model) -> float:
    """Factor of the skip connection around attention; 0 if there is no skip connection."""
    if not is_zoo(model):
        return 1.0
    cfg = _zoo(model).cfg
    return cfg.residual_scale if cfg.residual else 0.0


def _final(model: Model) -> Point:
    """Return the point after the norm before the unembedding, or after the last layer if there is no norm."""
    norm = norm_module(model, "ln_f")
    if norm is None and model.facts.get("kind") == "hooked_transformer":  # folded, without parameters
        norm = dict(model.module.named_children()).get("ln_final")
    last = model.module.get_submodule(block_paths(model)[-1])
    site = HookSite(last if norm is None else norm, "output")
    return Point("final", site, ((1.0, site),))


def is_zoo(model: Model) -> bool:
    """Return True if the module is the zoo's own Transformer, whose sublayers are methods."""
    return isinstance(model.module, Transformer)


def _zoo(model: Model) -> Transformer:
    assert isinstance(model.module, Transformer)
    return model.module


# ---------------------------------------------------------------------------------------- paths of layers


def block_paths(model: Model) -> list[str]:
    """Return the path of every layer's module: the common prefix of the names of its places."""
    num_layers = model.facts.get("n_layers", 0)
    if isinstance(model.module, Transformer):
        paths = [f"L{i}" for i in range(num_layers)]
    else:
        paths = []
        for i in range(num_layers):
            inside = [
                at.module.split(".") for place, at in model.places.items() if place.startswith(f"L{i}.")
            ]
            if len(inside) > 1:
                paths.append(".".join(_common(inside)))
    if not paths or len(paths) != num_layers:
        raise UsageError(
            f"expected a model with known layers, but {model.name!r} only has parameters as blocks",
            hint="zoo models and the families with attention have layers",
        )
    return paths


def _common(names: list[list[str]]) -> list[str]:
    """Return the leading parts that all names share."""
    common = []
    for parts in zip(*names, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common


def norm_module(model: Model, role: str) -> nn.Module | None:
    """Return the module of a norm such as `L0.ln2` or `ln_f`; None if the norm has no parameters."""
    if is_zoo(model):
        return dict(model.module.named_modules()).get(role)
    block = model.blocks.get(f"{role}.g")
    if block is None:
        return None
    return model.module.get_submodule(block.parameter.rpartition(".")[0])


def capture(
    model: Model, inputs: Tensor | Mapping[str, Tensor], *patterns: str, grad: bool = False
) -> dict[str, Tensor]:
    """Return the tensors at the places that match the globs (all places without a glob), in eval mode.

    Places of layer i: `L{i}.attn.in` (B, T, d), `.attn.pattern` (B, h, T, T), `.attn.heads` (B, T, h k), the
    input of W_O, `.attn.out`, `.ff.in` and `.ff.out` (B, T, d). With pre-norm, a sublayer's input is the
    output of its norm. Its output is added to the stream (before a norm that follows it).

    Args:
        model: A zoo model or one with an adapter.
        inputs: Inputs of the module.
        patterns: Globs such as "L*.attn.pattern".
        grad: Keep the graph, to differentiate.
    """
    if not isinstance(model.module, Transformer) and not model.places:
        raise UsageError(
            f"expected a model with known layers, but {model.name!r} only has parameters as blocks",
            hint="zoo models and the families with attention have places",
        )
    tensors: dict[str, Tensor] = {}
    with evaluating(model.module), torch.set_grad_enabled(grad), ExitStack() as hooks:
        if isinstance(model.module, Transformer):
            with patched(model.gathered()):
                model.module(inputs, record=tensors.__setitem__)
        else:
            for place, at in model.places.items():
                read = _reader(place, at, tensors, _num_sequences(inputs))
                hooks.enter_context(model.module.get_submodule(at.module).register_forward_hook(read))
            model.forward({}, inputs)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(place, pattern) for place in tensors):
            raise UsageError(f"no place matches {pattern!r}", hint=near_misses(pattern, list(tensors)))
    return {
        place: tensor
        for place, tensor in tensors.items()
        if not patterns or any(fnmatch.fnmatchcase(place, pattern) for pattern in patterns)
    }


def _num_sequences(inputs: Tensor | Mapping[str, Tensor]) -> int:
    return next(iter(inputs.values())).shape[0] if isinstance(inputs, Mapping) else inputs.shape[0]


def _reader(
    place: str, at: ActivationPlace, tensors: dict[str, Tensor], num_sequences: int
) -> Callable[..., None]:
    """Return a forward hook that stores the tensor of one place."""

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
        tensors[place] = tensor

    return read

"""Temporary changes of a model's attention, to strengthen or weaken attention sinks.

The scores S of every head are changed before the softmax, and the weights P after it, for the first key 0:

    S_i0 → key · S_i0 + bias,    P_ij = gate · exp(S_ij) / (extra + Σ_k exp(S_ik)),

with a `bias` at the first key, its `key` scaled (if scores are products of queries and keys without added
terms), an `extra` term in the denominator (1 is softmax₁), and a `gate` on the outputs of all heads. `first`
scales the stream at the first position before the first layer. The user's module itself is changed, so
products, values and gradients of any engine include the change; it is undone when the context ends, also
after errors. Fused attention is replaced by a plain form, with memory quadratic in the length. A layer with
no visible softmax, or with two, raises an error when it is called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvescope.core.errors import UsageError
from curvescope.models.curvature_sources import MethodCall, find_sources, repeated_layers
from curvescope.models.model import Model
from curvescope.models.running.patching import Change, evaluating, patched
from curvescope.models.zoo.transformer import Layer, Transformer

Record = Callable[[Tensor], None]
SOURCE = re.compile(r"L\d+\.attention")


@dataclass(frozen=True)
class AttentionChange:
    """Changes of attention for all heads; none by default."""

    bias: float = 0.0  # added to the scores of the first key
    key: float = 1.0  # times the first key
    extra: float = 0.0  # added to the denominator of the softmax
    gate: float = 1.0  # times the outputs of the heads
    first: float = 1.0  # times the stream at the first position, before the first layer

    def __post_init__(self) -> None:
        numbers = (self.bias, self.key, self.extra, self.gate, self.first)
        if not all(math.isfinite(x) for x in numbers) or self.key <= 0 or self.extra < 0:
            raise UsageError(f"expected finite numbers, key > 0 and extra >= 0, got {self}")

    @property
    def heads_are_changed(self) -> bool:
        """Return True if anything inside attention is changed."""
        return (self.bias, self.key, self.extra, self.gate) != (0.0, 1.0, 0.0, 1.0)

    def weights(self, S: Tensor, softmax: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the weights P (…, Tq, Tk) from scores S (…, Tq, Tk), without the gate."""
        if self.bias or self.key != 1.0:
            S = torch.cat([self.key * S[..., :1] + self.bias, S[..., 1:]], dim=-1)
        if not self.extra:
            return softmax(S)
        extra_score = S.new_full((*S.shape[:-1], 1), math.log(self.extra))
        return softmax(torch.cat([S, extra_score], dim=-1))[..., :-1]


UNCHANGED_ATTENTION = AttentionChange()


@contextmanager
def changed_attention(model: Model, intervention: AttentionChange) -> Iterator[None]:
    """Change the attention of the model's module inside; `UNCHANGED_ATTENTION` changes nothing."""
    with patched(_changes(model, intervention)):
        yield


def patterns(
    model: Model, inputs: Tensor | Mapping[str, Tensor], intervention: AttentionChange = UNCHANGED_ATTENTION
) -> list[Tensor]:
    """Return the weights P of every layer, (B, h, T, T) before a gate, in eval mode and without derivatives.

    Raises:
        UsageError: The attention of a layer cannot be changed.
    """
    weights: list[Tensor] = []
    with evaluating(model.module), torch.no_grad(), patched(_changes(model, intervention, weights.append)):
        model.forward({}, inputs)
    return weights


def attentions(model: Model) -> list[MethodCall]:
    """Return the attention of each layer: the modules named by its roles, else the full layer."""
    sources = [calls for name, calls in find_sources(model).items() if SOURCE.fullmatch(name)]
    if sources and all(len(calls) == 1 for calls in sources):
        return [calls[0] for calls in sources]
    layers = repeated_layers(model.module)
    if not layers:
        raise _unsupported(model.name, "no part of it is known to be a layer")
    return [MethodCall(layer) for layer in layers]


def _unsupported(name: str, why: str) -> UsageError:
    return UsageError(f"the attention of {name} cannot be changed: {why}")


def _changes(model: Model, intervention: AttentionChange, record: Record | None = None) -> list[Change]:
    changes = []
    if intervention.heads_are_changed or record is not None:
        _check(model, intervention)
        for owner, method in attentions(model):
            inside = intervention
            if isinstance(owner, Layer):  # the zoo adds its score bias after this method
                changes.append(Change(vars(owner), "scores", _scaled_scores(owner.scores, intervention.key)))
                inside = replace(intervention, key=1.0)
            call = _attending_call(model.name, getattr(owner, method), inside, record)
            changes.append(Change(vars(owner), method, call))
    if intervention.first != 1.0:
        layer = _first_layer(model)
        attributes = vars(layer)
        inner = [c.value for c in changes if c.holder is attributes and c.name == "forward"] or [
            layer.forward
        ]
        changes.append(Change(attributes, "forward", _scaled_start(inner[0], intervention.first)))
    return changes


def _check(model: Model, intervention: AttentionChange) -> None:
    """Raise if there is no softmax, or if the scores are not only products of queries and keys."""
    if model.facts.get("attention", "softmax") != "softmax":
        raise _unsupported(model.name, "it is linear, without a softmax")
    config = getattr(model.module, "config", None)
    has_other_terms = getattr(config, "attn_logit_softcapping", None) is not None or getattr(
        config, "alibi", False
    )
    if intervention.key != 1.0 and has_other_terms:
        raise _unsupported(model.name, "its scores are not products of queries and keys alone")


def _first_layer(model: Model) -> nn.Module:
    if isinstance(model.module, Transformer):
        return model.module.get_submodule("L0")
    layers = _listed_layers(model.module) or repeated_layers(model.module)
    if not layers:
        raise UsageError(
            f"no layers were found in {model.name}: it has no list of modules and no repeated modules"
        )
    return layers[0]


def _listed_layers(module: nn.Module) -> list[nn.Module]:
    """Return the list of modules of one class with the most parameters, or an empty list."""
    lists = [list(m.children()) for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    alike = [modules for modules in lists if len({type(layer) for layer in modules}) == 1]
    return max(alike, key=lambda modules: sum(p.numel() for m in modules for p in m.parameters()), default=[])


# -------------------------------------------------------------------------------------- patched methods


def _attending_call(name: str, original: Any, intervention: AttentionChange, record: Record | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _AttentionMode(intervention, record) as mode:
            output = original(*args, **kwargs)
        if mode.count != 1:
            raise _unsupported(name, f"a layer has {mode.count} softmaxes over the scores of heads, not one")
        return output

    return call


def _scaled_scores(original: Any, key: float) -> Any:
    def scores(x: Tensor) -> Tensor:
        S = original(x)
        return S if key == 1.0 else torch.cat([key * S[..., :1], S[..., 1:]], dim=-1)

    return scores


def _scaled_start(original: Any, scale: float) -> Any:
    def scaled(x: Tensor) -> Tensor:
        return torch.cat([scale * x[:, :1], x[:, 1:]], dim=1)

    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            return original(scaled(args[0]), *args[1:], **kwargs)
        name = next(iter(kwargs))
        return original(**{**kwargs, name: scaled(kwargs[name])})

    return call


class _AttentionMode(TorchFunctionMode):
    """Mode that replaces softmaxes over scores, and PyTorch's attention."""

    def __init__(self, intervention: AttentionChange, record: Record | None):
        super().__init__()
        self.count, self._intervention, self._record = 0, intervention, record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            return self._softmax(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _softmax(
        self, func: Any, input: Tensor, dim: int | None = None, *more: Any, **options: Any
    ) -> Tensor:
        if input.dim() != 4 or dim not in (-1, 3):
            return func(input, dim, *more, **options)
        return self._gated_weights(self._intervention.weights(input, lambda S: func(S, -1, *more, **options)))

    def _gated_weights(self, P: Tensor) -> Tensor:
        self.count += 1
        if self._record is not None:
            self._record(P.detach())
        return P if self._intervention.gate == 1.0 else self._intervention.gate * P

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(scale · QKᵀ + mask) V in plain operations; arguments have PyTorch's names."""
        if dropout_p:
            raise UsageError("expected attention in eval mode, got one that drops weights")
        group = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        key, value = (x.repeat_interleave(group, -3) if group > 1 else x for x in (key, value))
        S = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            allowed = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).tril()
            S = S.masked_fill(~allowed, -torch.inf)
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            S = S.masked_fill(~attn_mask, -torch.inf) if hidden else S + attn_mask
        return self._gated_weights(self._intervention.weights(S, lambda x: x.softmax(-1))) @ value

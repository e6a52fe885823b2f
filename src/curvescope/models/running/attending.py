"""Attention that is told to attend otherwise, for as long as a block lasts: how attention sinks are grown.

The scores S of every head are changed before their softmax, and its weights P behind it, for the first key 0:

    S_i0 → key · S_i0 + bias,    P_ij = gate · exp(S_ij) / (extra + Σ_k exp(S_ik)),

so a `bias` at the first key, its `key` scaled (where scores are products of queries and keys and nothing is
added to them), an `extra` term in the denominator (softmax₁ for 1), and a `gate` on what all heads give. At
`first` the stream of the first position is scaled where the layers begin. The user's own module does this:
products, values and gradients of any engine see it, and it is put back in any order of leaving, after errors
too. Attention that is fused gives way to a plain form, in memory quadratic in the length; a layer whose
softmax is not seen, or that has two, is an error when it is called.
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
from curvescope.models.model import Model
from curvescope.models.running.exchange import Change, evaluating, exchanged
from curvescope.models.sources import Called, find_sources, repeated_layers
from curvescope.models.zoo.transformer import Layer, Transformer

Record = Callable[[Tensor], None]
SOURCE = re.compile(r"L\d+\.attention")


@dataclass(frozen=True)
class Attending:
    """How heads attend; by default as they do."""

    bias: float = 0.0  # added to the scores of the first key
    key: float = 1.0  # times the first key
    extra: float = 0.0  # added to the denominator of the softmax
    gate: float = 1.0  # times the outputs of the heads
    first: float = 1.0  # times the stream at the first position, where the layers begin

    def __post_init__(self) -> None:
        numbers = (self.bias, self.key, self.extra, self.gate, self.first)
        if not all(math.isfinite(x) for x in numbers) or self.key <= 0 or self.extra < 0:
            raise UsageError(f"expected finite numbers, a key above 0 and no extra below 0, got {self}")

    @property
    def heads_are_changed(self) -> bool:
        """Whether anything inside attention is."""
        return (self.bias, self.key, self.extra, self.gate) != (0.0, 1.0, 0.0, 1.0)

    def weights(self, S: Tensor, softmax: Callable[[Tensor], Tensor]) -> Tensor:
        """The weights P (…, Tq, Tk) from scores S (…, Tq, Tk), without the gate."""
        if self.bias or self.key != 1.0:
            S = torch.cat([self.key * S[..., :1] + self.bias, S[..., 1:]], dim=-1)
        if not self.extra:
            return softmax(S)
        one_more = S.new_full((*S.shape[:-1], 1), math.log(self.extra))
        return softmax(torch.cat([S, one_more], dim=-1))[..., :-1]


AS_IT_IS = Attending()


@contextmanager
def attending(model: Model, how: Attending) -> Iterator[None]:
    """Inside, the model's module attends so; `AS_IT_IS` changes nothing at all."""
    with exchanged(_changes(model, how)):
        yield


def patterns(model: Model, inputs: Tensor | Mapping[str, Tensor], how: Attending = AS_IT_IS) -> list[Tensor]:
    """The weights P of every layer, (B, h, T, T) before a gate, in eval mode and without derivatives.

    Raises:
        UsageError: where the attention of a layer cannot be reached.
    """
    found: list[Tensor] = []
    with evaluating(model.module), torch.no_grad(), exchanged(_changes(model, how, found.append)):
        model.forward({}, inputs)
    return found


def attentions(model: Model) -> list[Called]:
    """What is called for the attention of each layer: what its roles name, else the whole layer."""
    sources = [calls for name, calls in find_sources(model).items() if SOURCE.fullmatch(name)]
    if sources and all(len(calls) == 1 for calls in sources):
        return [calls[0] for calls in sources]
    layers = repeated_layers(model.module)
    if not layers:
        raise _not_reached(model.name, "no part of it is known to be a layer")
    return [Called(layer) for layer in layers]


def _not_reached(name: str, why: str) -> UsageError:
    return UsageError(f"the attention of {name} cannot be reached: {why}")


def _changes(model: Model, how: Attending, record: Record | None = None) -> list[Change]:
    found = []
    if how.heads_are_changed or record is not None:
        _check(model, how)
        for owner, method in attentions(model):
            inside = how
            if isinstance(owner, Layer):  # its scores are products, and what is added to them comes later
                found.append(Change(vars(owner), "scores", _scaled_scores(owner.scores, how.key)))
                inside = replace(how, key=1.0)
            call = _attending_call(model.name, getattr(owner, method), inside, record)
            found.append(Change(vars(owner), method, call))
    if how.first != 1.0:
        layer = _first_layer(model)
        own = vars(layer)
        inner = [c.value for c in found if c.holder is own and c.name == "forward"] or [layer.forward]
        found.append(Change(own, "forward", _scaled_start(inner[0], how.first)))
    return found


def _check(model: Model, how: Attending) -> None:
    """Raise where there is no softmax, or scores are known to be more than products of queries and keys."""
    if model.facts.get("attention", "softmax") != "softmax":
        raise _not_reached(model.name, "it is linear, without a softmax")
    config = getattr(model.module, "config", None)
    added = getattr(config, "attn_logit_softcapping", None) is not None or getattr(config, "alibi", False)
    if how.key != 1.0 and added:
        raise _not_reached(model.name, "its scores are not products of queries and keys alone")


def _first_layer(model: Model) -> nn.Module:
    if isinstance(model.module, Transformer):
        return model.module.get_submodule("L0")
    layers = _listed_layers(model.module) or repeated_layers(model.module)
    if not layers:
        raise UsageError(f"the layers of {model.name} are not known: nothing in it is a list, or repeated")
    return layers[0]


def _listed_layers(module: nn.Module) -> list[nn.Module]:
    """The list of modules of one class, one or more, that holds the most parameters; empty without any."""
    lists = [list(m.children()) for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    alike = [some for some in lists if len({type(layer) for layer in some}) == 1]
    return max(alike, key=lambda some: sum(p.numel() for m in some for p in m.parameters()), default=[])


# ---------------------------------------------------------------------------------------- what is called


def _attending_call(name: str, original: Any, how: Attending, record: Record | None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Attention(how, record) as mode:
            found = original(*args, **kwargs)
        if mode.count != 1:
            raise _not_reached(name, f"a layer has {mode.count} softmaxes over the scores of heads, not one")
        return found

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


class _Attention(TorchFunctionMode):
    """Softmaxes over scores, and PyTorch's attention, are ours inside."""

    def __init__(self, how: Attending, record: Record | None):
        super().__init__()
        self.count, self._how, self._record = 0, how, record

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
        return self._seen(self._how.weights(input, lambda S: func(S, -1, *more, **options)))

    def _seen(self, P: Tensor) -> Tensor:
        self.count += 1
        if self._record is not None:
            self._record(P.detach())
        return P if self._how.gate == 1.0 else self._how.gate * P

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
            seen = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).tril()
            S = S.masked_fill(~seen, -torch.inf)
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            S = S.masked_fill(~attn_mask, -torch.inf) if hidden else S + attn_mask
        return self._seen(self._how.weights(S, lambda x: x.softmax(-1))) @ value

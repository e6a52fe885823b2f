"""Weights, norms and embeddings of a model by role, in float64 on the CPU."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from curvescope.core.errors import UsageError, near_misses
from curvescope.geometry.sphere import NormKind, StreamNorm
from curvescope.models.forward_errors import check_vocabulary
from curvescope.models.model import Model

Which = Literal["input", "output"]
_GAIN_PLUS_ONE = ("gemma", "gemma2", "gemma3_text")  # their norms multiply by 1 + g


def weight(model: Model, name: str) -> Tensor | None:
    """Return a block (or a head's block) as a detached matrix, inputs × outputs, or None."""
    block = model.blocks.get(name) or model.heads.get(name)
    if block is None:
        return None
    W = model.inputs_first(block).take(model.module.get_parameter(block.parameter).detach()).cpu()
    return W if model.widening is None else W.to(model.dtype)


def norm_kind(model: Model) -> NormKind:
    """Return the kind of the model's norms; `none` if it has no norms."""
    return "none" if model.facts.get("norm", "none") == "none" else model.facts["norm_kind"]


def norm_of(model: Model, role: str) -> StreamNorm:
    """Return the norm with a role (`L3.ln1`, `ln_f`, `ln_e`, …): kind, γ, β, ε; without weights γ=1, β=0."""
    gain, shift = weight(model, f"{role}.g"), weight(model, f"{role}.b")
    if gain is None and not _exists(model, role):
        known = [name.removesuffix(".g") for name in model.blocks if name.endswith(".g") and "ln" in name]
        raise UsageError(
            f"expected the role of a norm of {model.name!r}, got {role!r}", hint=near_misses(role, known)
        )
    gain = None if gain is None else gain.double()
    if gain is not None and model.facts.get("kind") in _GAIN_PLUS_ONE:
        gain = 1 + gain
    return StreamNorm(
        norm_kind(model), gain, None if shift is None else shift.double(), _eps(model, role), role
    )


def _exists(model: Model, role: str) -> bool:
    """Return True if a norm without weights exists (some zoo models, folded TransformerLens models)."""
    if model.facts.get("kind") not in ("transformer", "hooked_transformer") or norm_kind(model) == "none":
        return False
    num_layers, pre = model.facts["n_layers"], model.facts["norm"] == "pre"
    roles = [f"L{i}.ln{j}" for i in range(num_layers) for j in (1, 2)]
    return role in roles or (pre and role == "ln_f")


def _eps(model: Model, role: str) -> float:
    """Return ε of a norm, from the module that holds its weights, else from the configuration."""
    block = model.blocks.get(f"{role}.g")
    module: Any = model.module
    places: list[Any] = [getattr(module, "cfg", None), getattr(module, "config", None)]
    if block is not None:
        places.insert(0, module.get_submodule(block.parameter.rpartition(".")[0]))
    for place in places:
        for name in (
            "eps",
            "variance_epsilon",
            "norm_eps",
            "layer_norm_epsilon",
            "layer_norm_eps",
            "rms_norm_eps",
        ):
            if isinstance(getattr(place, name, None), float):
                return getattr(place, name)
    return 1e-5


def has_lens(model: Model) -> bool:
    """Return True if a norm precedes the unembedding, as in pre-norm language models."""
    return model.facts.get("norm") == "pre" and ("ln_f.g" in model.blocks or _exists(model, "ln_f"))


def read_norm(model: Model, layer: int) -> tuple[StreamNorm, str]:
    """Return the norm whose output attention reads, and the reason if it cannot be folded into weights."""
    position = model.facts.get("norm", "none")
    if norm_kind(model) == "none":
        return StreamNorm("none"), "not foldable: the model has no norm, attention reads the stream itself"
    if position == "pre":
        return norm_of(model, f"L{layer}.ln1"), ""
    previous = f"L{layer - 1}.ln2" if layer else "ln_e"
    if f"{previous}.g" in model.blocks:
        norm = norm_of(model, previous)
        description = f"attention reads the stream after {previous}, which is also the skip connection"
    else:
        norm, description = StreamNorm("none"), "attention reads the stream itself"
    return norm, f"not foldable: post-norm, {description}"


def embedding(model: Model, which: Which = "input") -> Tensor:
    """Return one row per token (V, d), in the model's dtype: e_t at the start of the stream, or u_t.

    The rows include the projection between an embedding of another width and the stream, and Gemma's √d.
    If the unembedding is tied or missing, the output rows are the input rows without these factors.
    """
    check_vocabulary(model)
    E, U = weight(model, "E"), weight(model, "U")
    assert E is not None
    if which == "output":
        rows = U.T if U is not None and model.facts.get("outputs", "tokens") == "tokens" else E
        W_out = weight(model, "W_out")
        return rows if W_out is None else rows @ W_out.T
    W_in = weight(model, "W_in")
    E = E if W_in is None else E @ W_in
    return E * model.facts["d_model"] ** 0.5 if model.facts.get("kind") in _GAIN_PLUS_ONE else E


def check_layer(model: Model, layer: int) -> None:
    """Raise unless the model has attention in a layer of this number."""
    num_layers = model.facts.get("n_layers", 0)
    has = any(name.startswith("L0.h") for name in model.heads)
    if not has:
        raise UsageError(
            f"expected a model with attention heads, got {model.name!r} without known heads",
            hint="zoo models, TransformerLens and the families with attention have heads",
        )
    if not isinstance(layer, int) or not 0 <= layer < num_layers:
        raise UsageError(f"layer: expected 0 to {num_layers - 1}, got {layer!r}")

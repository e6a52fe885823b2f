"""Rotary positions as matrices on a head: R(Δ), and which pairs of coordinates a model rotates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotation of the first 2 f coordinates of a query or key, f = len(frequencies), by position × frequency.

    Coordinate j is paired with j + f (`half`, Llama and NeoX) or 2j with 2j + 1 (`adjacent`, GPT-J). `factor`
    multiplies the rotated coordinates (scaled RoPE).
    """

    frequencies: Tensor  # (f,) radians per position
    pairs: Literal["half", "adjacent"] = "half"
    factor: float = 1.0

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (…, T, h) turned by the angles of positions (T,)."""
        angle = positions.to(self.frequencies)[:, None] * self.frequencies
        cos, sin, f = angle.cos() * self.factor, angle.sin() * self.factor, len(self.frequencies)
        turned, rest = x[..., : 2 * f], x[..., 2 * f :]
        if self.pairs == "half":
            a, b = turned[..., :f], turned[..., f:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1)

    def matrix(self, offset: float, size: int) -> Tensor:
        """R(Δ) (h, h) with q_i · k_j after rotation = q R(Δ) kᵀ, where Δ = i − j and q, k are rows.

        R(Δ) turns the query by Δ positions; what is not rotated stays; `factor` enters squared.
        """
        plain = Rotary(self.frequencies, self.pairs)
        eye = torch.eye(size, dtype=self.frequencies.dtype, device=self.frequencies.device)
        R = plain.apply(eye, torch.full((size,), float(offset)).to(eye))
        turned = 2 * len(self.frequencies)
        R[:turned, :turned] *= self.factor**2
        return R


def rotary_of(model: Model, layer: int) -> Rotary | None:
    """The rotation that a layer applies to queries and keys; None where positions are otherwise."""
    if model.facts.get("positions") != "rope":
        return None
    k = model.facts["d_head"]
    if isinstance(model.module, Transformer):
        exponent = -torch.arange(0, k, 2, dtype=torch.float64) / k
        return Rotary(model.module.cfg.rope_base**exponent)
    if model.facts.get("kind") == "hooked_transformer":
        return _hooked(model, layer)
    return _hugging_face(model, layer)


def _hooked(model: Model, layer: int) -> Rotary:
    """TransformerLens keeps sines and cosines; those of position 1 are the frequencies."""
    attention: Any = model.module.get_submodule(f"blocks.{layer}.attn")
    adjacent, size = bool(attention.cfg.rotary_adjacent_pairs), attention.cfg.rotary_dim
    if attention.rotary_cos.shape[0] < 2:
        return Rotary(torch.zeros(size // 2, dtype=torch.float64), "adjacent" if adjacent else "half")
    angle = torch.atan2(attention.rotary_sin[1].double(), attention.rotary_cos[1].double()).cpu()
    return Rotary(angle[0::2], "adjacent") if adjacent else Rotary(angle[: size // 2])


def _hugging_face(model: Model, layer: int) -> Rotary:
    """The buffer of frequencies of a transformers module; Gemma 3 has one per kind of layer."""
    kinds = getattr(getattr(model.module, "config", None), "layer_types", None)
    front = "" if not kinds else f"{kinds[layer]}_"
    for prefix in (front, ""):
        for module in model.module.modules():
            found = getattr(module, f"{prefix}inv_freq", None)
            if isinstance(found, Tensor):
                factor = float(getattr(module, f"{prefix}attention_scaling", 1.0))
                return Rotary(found.detach().double().cpu(), "half", factor)
    raise UsageError(
        f"expected the frequencies of rotary positions in {model.name!r}, found none",
        hint="give the matrices to curvescope.geometry.attention.circuits yourself",
    )

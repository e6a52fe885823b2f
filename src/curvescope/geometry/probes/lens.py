"""The logit lens: what a state of the stream would be read as, if the model ended there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvescope.geometry.roles import has_lens, norm_kind, norm_of, weight
from curvescope.geometry.sphere import Norm
from curvescope.geometry.vocabulary.references import Reference, reference
from curvescope.models.model import Model


@dataclass(frozen=True, eq=False)
class LogitLens:
    """A norm and the rows of tokens: the logit of t at a state x is `read(x)` · row t + bias t."""

    norm: Norm
    sphere: bool  # whether rows have γ in them, and states only go to the sphere
    tokens: Reference
    notes: tuple[str, ...] = ()

    def read(self, x: Tensor) -> Tensor:
        """States (…, d) as the rows meet them."""
        return self.norm.sphere(x) if self.sphere else self.norm(x)


def logit_lens(model: Model, layer: int, *, tokenizer: Any = None) -> LogitLens:
    """The lens of a model at the middle of a block.

    Pre-norm: the final norm, and P(γ_f ∘ u_t) with the biases. Post-norm: the norm behind the block's
    attention, and u_t itself. A head with a hidden layer of its own (masked language models) is left out.
    """
    tokens = reference(model, "logit", bias=True, tokenizer=tokenizer)
    notes = []
    if weight(model, "U") is None and model.facts.get("task", "causal-lm") == "features":
        notes.append("no unembedding: states are compared with the input embedding")
    if "W_mlm" in model.blocks:
        notes.append("the lens leaves the hidden layer of the head out")
    if has_lens(model):
        return LogitLens(norm_of(model, "ln_f"), True, tokens, tuple(notes))
    if norm_kind(model) != "none" and model.facts.get("norm") == "post":
        notes.append(f"post-norm: states are read behind L{layer}.ln1")
        return LogitLens(norm_of(model, f"L{layer}.ln1"), False, tokens, tuple(notes))
    return LogitLens(Norm("none"), False, tokens, tuple(notes))


def behind_attention(model: Model, layer: int, updates: Tensor) -> Tensor:
    """Updates (c, H + 1, d), the last being the sum, as they are added to the stream.

    Where the sum is normed once more (Gemma 2 and 3), every head is scaled as the sum is, so that they still
    add up; elsewhere nothing happens, but for models that scale or lack the skip connection, which see this
    as it is.
    """
    if f"L{layer}.ln1_post.g" not in model.blocks:
        return updates
    norm = norm_of(model, f"L{layer}.ln1_post")
    total = updates[:, -1:]
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + norm.eps)
    return updates * scale * (1.0 if norm.gamma is None else norm.gamma)

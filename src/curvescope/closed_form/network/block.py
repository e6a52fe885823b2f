"""One Transformer block as primitives: attention and feed-forward, each with its norm and skip connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvescope.closed_form.attention.core import AttentionKind
from curvescope.closed_form.ffn.activations import ActivationName
from curvescope.closed_form.network.attention import Attention
from curvescope.closed_form.network.primitives import Recorder, Tape, Tree
from curvescope.closed_form.network.tokens import FeedForward, Norm
from curvescope.closed_form.norms.derivatives import NormKind
from curvescope.core.errors import UsageError


@dataclass(frozen=True)
class Architecture:
    """What the parameters do not say about a network.

    Biases, γ and β, the unembedding, the number of blocks and whether a block has attention or a feed-forward
    layer follow from the names that are there.
    """

    num_heads: int
    norm: Literal["none", "pre", "post"] = "pre"
    norm_kind: NormKind = "layernorm"
    norm_eps: float = 1e-5
    activation: ActivationName = "gelu"
    attention: AttentionKind = "softmax"
    causal: bool = True
    scale: float | None = None  # of the scores; None is 1/√(head size)
    residual: bool = True
    residual_scale: float = 1.0  # multiplies the skip around attention
    tied: bool = False  # the unembedding is the transposed embedding
    pooled: bool = False  # the mean over tokens goes to the unembedding

    def __post_init__(self) -> None:
        if self.norm not in ("none", "pre", "post"):
            raise UsageError(f"expected norm of none, pre, post, got {self.norm!r}")
        if self.num_heads < 1:
            raise UsageError(f"expected at least one head, got {self.num_heads}")


def record_block(recorder: Recorder, params: Tree, arch: Architecture, *, prefix: str = "") -> None:
    """Append the primitives of the block whose parameters begin with `prefix`.

    Pre-norm: x + attention(norm₁ x), then x + ffn(norm₂ x). Post-norm: norm₁(x + attention(x)), then
    norm₂(x + ffn(x)).
    """
    if f"{prefix}W_Q" in params:
        mask = _causal_mask(recorder.x) if arch.causal else None

        def attend(x: Tensor) -> Attention:
            return Attention(
                x,
                params,
                prefix=prefix,
                num_heads=arch.num_heads,
                kind=arch.attention,
                mask=mask,
                scale=arch.scale,
            )

        _record_sublayer(recorder, attend, params, arch, norm=f"{prefix}ln1.", scale=arch.residual_scale)
    if f"{prefix}W_2" in params:

        def feed(x: Tensor) -> FeedForward:
            return FeedForward(x, params, prefix=prefix, activation_name=arch.activation)

        _record_sublayer(recorder, feed, params, arch, norm=f"{prefix}ln2.", scale=1.0)


def record_norm(recorder: Recorder, params: Tree, arch: Architecture, *, prefix: str) -> None:
    """Append a norm with γ and β under `prefix`, such as `ln_f.`."""
    recorder.apply(lambda x: Norm(x, params, prefix=prefix, kind=arch.norm_kind, eps=arch.norm_eps))


def block_tape(x: Tensor, params: Tree, arch: Architecture) -> Tape:
    """A block alone at inputs x (B, T, d), with parameters `W_Q, …, ln2.b`."""
    recorder = Recorder(x)
    record_block(recorder, {name: p.detach() for name, p in params.items()}, arch)
    return recorder.tape()


def _record_sublayer(recorder, make, params: Tree, arch: Architecture, *, norm: str, scale: float) -> None:
    start = recorder.now
    if arch.norm == "pre":
        record_norm(recorder, params, arch, prefix=norm)
    recorder.apply(make, skip=start if arch.residual else None, scale=scale)
    if arch.norm == "post":
        record_norm(recorder, params, arch, prefix=norm)


def _causal_mask(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()

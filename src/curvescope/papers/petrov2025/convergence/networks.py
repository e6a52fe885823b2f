"""The networks of the published curves: a ViT, one with changes of low rank, fully connected ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from curvescope.core.errors import CurvescopeError, MissingExtra
from curvescope.core.requirements import how_to_install
from curvescope.core.seeds import generator
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig

VIT_BASE, SIDE = "google/vit-base-patch16-224", 224
ADAPTED = ("query", "value", "q_proj", "v_proj")  # layers of the hub's models, by their versions
HEADS = ("U", "b_U", "classifier")  # names that a classifier's head has


def vit(
    shape: Sequence[int], num_classes: int, *, width: int, layers: int, patch: int, seed: int
) -> nn.Module:
    """A post-norm ViT with a mean-pooled head, d_ff = 4 d: images (B, channels, size, size) to logits."""
    channels, size = shape[1], shape[2]
    cfg = TransformerConfig(
        n_layers=layers, d_model=width, n_heads=max(1, width // 16), d_ff=4 * width,
        n_ctx=(size // patch) ** 2, inputs="patches", outputs="class", n_out=num_classes, image_size=size,
        patch_size=patch, channels=channels, norm="post", causal=False, bias_u=True, init="xavier", seed=seed,
    )  # fmt: skip
    return Transformer(cfg)


def fully_connected(
    shape: Sequence[int], num_classes: int, *, width: int, hidden: int, seed: int
) -> nn.Module:
    """ReLU layers of one width, `hidden` + 2 matrices as in the precursor's code, with biases."""
    cfg = MLPConfig(
        d_in=math.prod(shape[1:]), d_hidden=width, d_out=num_classes, depth=hidden + 2, bias=True, seed=seed
    )
    return nn.Sequential(nn.Flatten(), MLP(cfg))


class LowRank(nn.Module):
    """W ↦ W + A B with A (rows, r) normal of variance 1/r and B (r, columns) zero at first; α = r."""

    def __init__(self, rows: int, columns: int, rank: int, source: torch.Generator):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rows, rank, generator=source) / math.sqrt(rank))
        self.B = nn.Parameter(torch.zeros(rank, columns))

    def forward(self, W: Tensor) -> Tensor:
        return W + self.A @ self.B


def adapt(module: nn.Module, rank: int, *, seed: int) -> nn.Module:
    """Freeze all but the head, and let queries and values move by a matrix of low rank (LoRA), in place."""
    source = generator(seed, rank)
    module.requires_grad_(False)
    for name, part in list(module.named_modules()):
        names = ("W_Q", "W_V") if hasattr(part, "W_Q") else ("weight",)
        if names == ("weight",) and name.rpartition(".")[2] not in ADAPTED:
            continue
        for own in names:
            rows, columns = getattr(part, own).shape
            parametrize.register_parametrization(part, own, LowRank(rows, columns, rank, source))
    for name, parameter in module.named_parameters():
        if any(part in HEADS for part in name.split(".")) or name.rpartition(".")[2] in ("A", "B"):
            parameter.requires_grad_(True)
    return module


class Resized(nn.Module):
    """A vision model of the hub on images in [0, 1]: made larger, in three channels, in [−1, 1]."""

    def __init__(self, body: nn.Module, side: int = SIDE):
        super().__init__()
        self.body, self.side = body, side

    def forward(self, images: Tensor) -> Tensor:
        size = (self.side, self.side)
        x = nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
        return self.body(pixel_values=2 * x.expand(-1, 3, -1, -1) - 1).logits


def vit_base(num_classes: int) -> nn.Module:
    """ViT-B/16 of the hub, or of its cache, with a fresh head; what hinders it is an error of ours."""
    try:
        from transformers import ViTForImageClassification
    except ImportError:
        raise MissingExtra(f"{VIT_BASE} needs transformers", hint=how_to_install("transformers")) from None
    try:
        body = ViTForImageClassification.from_pretrained(
            VIT_BASE, num_labels=num_classes, ignore_mismatched_sizes=True
        )
    except Exception as problem:  # whatever the network and the hub raise
        reason = str(problem).split("\n", 1)[0][:200]
        raise CurvescopeError(f"could not read {VIT_BASE}: {reason}") from problem
    return Resized(body)

"""The networks of the published curves and their training: a ViT, low-rank changes, fully connected ones.

Every experiment has two sizes: the published one (full), and small networks of the same kinds (quick).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from curvescope.core.errors import CurvescopeError, MissingExtra
from curvescope.core.progress import track
from curvescope.core.requirements import how_to_install
from curvescope.core.seeds import generator
from curvescope.data.tasks.pictures import Pictures
from curvescope.models.zoo.mlp import MLP, MLPConfig
from curvescope.models.zoo.transformer import Transformer, TransformerConfig

VIT_BASE, SIDE = "google/vit-base-patch16-224", 224
# Names of layers in the hub's models, which depend on their version.
ADAPTED = ("query", "value", "q_proj", "v_proj")
HEADS = ("U", "b_U", "classifier")  # names of a classifier's head
SLOW_START = 50  # steps over which the learning rate rises
CHUNK = 256  # images evaluated at once
RANKS = (8, 16)
WIDTHS = {"quick": (4, 16, 64), "full": (4, 8, 16, 32, 64)}
HIDDEN = {"quick": (1, 3), "full": (1, 3, 5, 7, 10)}
SMALL = {"width": 32, "layers": 2, "patch": 2}
PUBLISHED = {"width": 128, "layers": 8, "patch": 4}

Make = Callable[[Pictures, int], tuple[nn.Module, str]]
"""Makes a network for given images and a seed, and a note if it is not the published one."""


def vit(
    shape: Sequence[int], num_classes: int, *, width: int, layers: int, patch: int, seed: int
) -> nn.Module:
    """Return a post-norm ViT with mean pooling and d_ff = 4 d: images (B, channels, size, size) to logits."""
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
    """Return ReLU layers of one width, `hidden` + 2 matrices as in the precursor's code, with biases."""
    cfg = MLPConfig(
        d_in=math.prod(shape[1:]), d_hidden=width, d_out=num_classes, depth=hidden + 2, bias=True, seed=seed
    )
    return nn.Sequential(nn.Flatten(), MLP(cfg))


class LowRankChange(nn.Module):
    """Low-rank change W ↦ W + A B: A (rows, r) of variance 1/r, B (r, columns) initially zero; α = r."""

    def __init__(self, rows: int, columns: int, rank: int, source: torch.Generator):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rows, rank, generator=source) / math.sqrt(rank))
        self.B = nn.Parameter(torch.zeros(rank, columns))

    def forward(self, W: Tensor) -> Tensor:
        return W + self.A @ self.B


def adapt(module: nn.Module, rank: int, *, seed: int) -> nn.Module:
    """Freeze all but the head, and add trainable low-rank changes to queries and values (LoRA), in place."""
    source = generator(seed, rank)
    module.requires_grad_(False)
    for name, part in list(module.named_modules()):
        names = ("W_Q", "W_V") if hasattr(part, "W_Q") else ("weight",)
        if names == ("weight",) and name.rpartition(".")[2] not in ADAPTED:
            continue
        for own in names:
            rows, columns = getattr(part, own).shape
            parametrize.register_parametrization(part, own, LowRankChange(rows, columns, rank, source))
    for name, parameter in module.named_parameters():
        if any(part in HEADS for part in name.split(".")) or name.rpartition(".")[2] in ("A", "B"):
            parameter.requires_grad_(True)
    return module


class Resized(nn.Module):
    """Adapter for a vision model of the hub: resizes images in [0, 1] to three channels in [−1, 1]."""

    def __init__(self, body: nn.Module, side: int = SIDE):
        super().__init__()
        self.body, self.side = body, side

    def forward(self, images: Tensor) -> Tensor:
        size = (self.side, self.side)
        x = nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
        return self.body(pixel_values=2 * x.expand(-1, 3, -1, -1) - 1).logits


def vit_base(num_classes: int) -> nn.Module:
    """Load ViT-B/16 from the hub or its cache, with a new head; failures raise CurvescopeError."""
    try:
        from transformers import ViTForImageClassification
    except ImportError:
        raise MissingExtra(f"{VIT_BASE} needs transformers", hint=how_to_install("transformers")) from None
    try:
        body = ViTForImageClassification.from_pretrained(
            VIT_BASE, num_labels=num_classes, ignore_mismatched_sizes=True
        )
    except Exception as problem:  # the network and the hub raise many types of errors
        reason = str(problem).split("\n", 1)[0][:200]
        raise CurvescopeError(f"could not read {VIT_BASE}: {reason}") from problem
    return Resized(body)


class TrainingSettings(NamedTuple):
    """Length and learning rate of training; AdamW without weight decay is Adam."""

    epochs: int
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.0


def fit(module: nn.Module, images: Tensor, classes: Tensor, how: TrainingSettings, *, seed: int) -> None:
    """Train parameters that require a gradient, in place; the order of an epoch comes from (seed, epoch)."""
    moving = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(moving, lr=how.lr, weight_decay=how.weight_decay)
    step, device = 0, next(module.parameters()).device
    module.train()
    for epoch in track(range(how.epochs), "training"):
        order = torch.randperm(len(classes), generator=generator(seed, epoch))
        for chosen in order.split(how.batch_size):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = how.lr * min(1.0, step / SLOW_START)
            logits = module(images[chosen].to(device))
            loss = nn.functional.cross_entropy(logits, classes[chosen].to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    module.eval()


@torch.no_grad()
def evaluate(module: nn.Module, images: Tensor, classes: Tensor) -> tuple[np.ndarray, float]:
    """Return the loss of every image (n,), and the accuracy."""
    device, losses, right = next(module.parameters()).device, [], 0
    for X, y in zip(images.split(CHUNK), classes.split(CHUNK), strict=True):
        logits = module(X.to(device)).double().cpu()
        losses.append(nn.functional.cross_entropy(logits, y, reduction="none"))
        right += int((logits.argmax(-1) == y).sum())
    return torch.cat(losses).numpy(), right / len(classes)


class NetworkExperiment(NamedTuple):
    """One curve: its network and images, its training, and the group size of its numbers."""

    family: str  # E4, E7 or E8
    words: str  # description of the network
    pictures: str  # name of the published images
    num_pictures: int | None  # number of images, a fifth of which for validation
    make: Make
    how: TrainingSettings
    group: int = 1  # images whose mean loss is one number of the running mean
    width: int = 0
    hidden: int = 0


def experiments(profile: str) -> dict[str, NetworkExperiment]:
    """Return all experiments of a profile by name."""
    quick = profile == "quick"
    found = {"E4": _vit(SMALL, 16, 12, 3e-3) if quick else _vit(PUBLISHED, 128, 60, 1e-3)}
    for rank in RANKS:
        make = partial(_low_rank, rank=rank, small=quick)
        words = f"{'a ViT of width 32' if quick else 'ViT-B/16'} with changes of rank {rank}"
        found[f"E7.rank{rank}"] = NetworkExperiment("E7", words, "mnist", 4166, make, TrainingSettings(3))
    for hidden in HIDDEN[profile]:
        for width in WIDTHS[profile]:
            make = partial(_fully_connected, width=width, hidden=hidden)
            words = f"fully connected, {hidden + 2} matrices, width {width}"
            found[f"E8.h{width}.n{hidden}"] = NetworkExperiment(
                "E8", words, "mnist", 12_500, make, TrainingSettings(10), width=width, hidden=hidden
            )
    return found


def _vit(size: dict[str, int], group: int, epochs: int, lr: float) -> NetworkExperiment:
    words = f"ViT of {size['layers']} blocks, width {size['width']}, patches {size['patch']}"
    how = TrainingSettings(epochs, 64 if group < 64 else group, lr, 0.01)
    return NetworkExperiment("E4", words, "cifar100", None, partial(_plain_vit, size=size), how, group)


def _plain_vit(data: Pictures, seed: int, *, size: dict[str, int]) -> tuple[nn.Module, str]:
    side = data.images.shape[-1]
    patch = size["patch"] if side % size["patch"] == 0 and side > 8 else 2
    cut = {**size, "patch": patch}
    return vit(data.images.shape, data.num_classes, seed=seed, **cut), ""


def _fully_connected(data: Pictures, seed: int, *, width: int, hidden: int) -> tuple[nn.Module, str]:
    made = fully_connected(data.images.shape, data.num_classes, width=width, hidden=hidden, seed=seed)
    return made, ""


def _low_rank(data: Pictures, seed: int, *, rank: int, small: bool) -> tuple[nn.Module, str]:
    """Return ViT-B/16 if it can be loaded, else a small ViT trained on the same images rotated by 90°."""
    note = "instead of ViT-B/16, a small ViT trained on the images rotated by 90°"
    if not small:
        try:
            return adapt(vit_base(data.num_classes), rank, seed=seed), ""
        except CurvescopeError as error:
            note = f"{note} ({error})"
    body, _ = _plain_vit(data, seed, size=SMALL)
    fit(body, torch.rot90(data.images, 1, (2, 3)), data.classes, TrainingSettings(10, lr=3e-3), seed=seed)
    return adapt(body, rank, seed=seed), note

"""The published experiments in two sizes: as published (full), and small ones of the same kinds (quick)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from curvescope.core.errors import CurvescopeError
from curvescope.data.tasks.pictures import Pictures
from curvescope.papers.petrov2025.convergence import networks
from curvescope.papers.petrov2025.convergence.training import Fit, fit

RANKS = (8, 16)
WIDTHS = {"quick": (4, 16, 64), "full": (4, 8, 16, 32, 64)}
HIDDEN = {"quick": (1, 3), "full": (1, 3, 5, 7, 10)}
SMALL = {"width": 32, "layers": 2, "patch": 2}
PUBLISHED = {"width": 128, "layers": 8, "patch": 4}

Make = Callable[[Pictures, int], tuple[nn.Module, str]]
"""A fresh network for these pictures and this seed, and a note on it where it is not the published one."""


class Experiment(NamedTuple):
    """One curve: which network on which pictures, how it is trained, and what one of its numbers is."""

    family: str  # E4, E7 or E8
    words: str  # the network
    pictures: str  # the published ones
    num_pictures: int | None  # of them, a fifth to validate
    make: Make
    how: Fit
    group: int = 1  # pictures whose mean loss is one number of the running mean
    width: int = 0
    hidden: int = 0


def experiments(profile: str) -> dict[str, Experiment]:
    """All of a profile by name."""
    quick = profile == "quick"
    found = {"E4": _vit(SMALL, 16, 12, 3e-3) if quick else _vit(PUBLISHED, 128, 60, 1e-3)}
    for rank in RANKS:
        make = partial(_low_rank, rank=rank, small=quick)
        words = f"{'a ViT of width 32' if quick else 'ViT-B/16'} with changes of rank {rank}"
        found[f"E7.rank{rank}"] = Experiment("E7", words, "mnist", 4166, make, Fit(3))
    for hidden in HIDDEN[profile]:
        for width in WIDTHS[profile]:
            make = partial(_fully_connected, width=width, hidden=hidden)
            words = f"fully connected, {hidden + 2} matrices, width {width}"
            found[f"E8.h{width}.n{hidden}"] = Experiment(
                "E8", words, "mnist", 12_500, make, Fit(10), width=width, hidden=hidden
            )
    return found


def _vit(size: dict[str, int], group: int, epochs: int, lr: float) -> Experiment:
    words = f"ViT of {size['layers']} blocks, width {size['width']}, patches {size['patch']}"
    how = Fit(epochs, 64 if group < 64 else group, lr, 0.01)
    return Experiment("E4", words, "cifar100", None, partial(_plain_vit, size=size), how, group)


def _plain_vit(data: Pictures, seed: int, *, size: dict[str, int]) -> tuple[nn.Module, str]:
    side = data.images.shape[-1]
    patch = size["patch"] if side % size["patch"] == 0 and side > 8 else 2
    cut = {**size, "patch": patch}
    return networks.vit(data.images.shape, data.num_classes, seed=seed, **cut), ""


def _fully_connected(data: Pictures, seed: int, *, width: int, hidden: int) -> tuple[nn.Module, str]:
    made = networks.fully_connected(
        data.images.shape, data.num_classes, width=width, hidden=hidden, seed=seed
    )
    return made, ""


def _low_rank(data: Pictures, seed: int, *, rank: int, small: bool) -> tuple[nn.Module, str]:
    """ViT-B/16 where it can be had; else a small ViT that was trained on the same pictures, turned by 90°."""
    note = "in place of ViT-B/16, a small ViT that was trained on the pictures turned by 90°"
    if not small:
        try:
            return networks.adapt(networks.vit_base(data.num_classes), rank, seed=seed), ""
        except CurvescopeError as error:
            note = f"{note} ({error})"
    body, _ = _plain_vit(data, seed, size=SMALL)
    fit(body, torch.rot90(data.images, 1, (2, 3)), data.classes, Fit(10, lr=3e-3), seed=seed)
    return networks.adapt(body, rank, seed=seed), note

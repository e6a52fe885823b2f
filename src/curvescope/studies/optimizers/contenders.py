"""The optimizers that are compared, each with one setting that is tuned: its learning rate.

No one has weight decay or a schedule. What else they have is theirs by default, or said here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from curvescope import optim

Make = Callable[[Iterable[Tensor], float], torch.optim.Optimizer]


class Contender(NamedTuple):
    """An optimizer as a function of parameters and learning rate, and words on it."""

    make: Make
    words: str


def _sgd(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def _adamw(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.0)


def _newton(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.NewtonCG(params, lr, max_products=10)


def _sharpness(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.SharpnessGD(params, lr, every=5, num_products=2, first_products=5)


def _block(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.BlockSGD(
        params, lr, momentum=0.9, every=10, num_products=2, first_products=3, measure="together"
    )


def _hutchinson(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.HutchinsonAdam(params, lr)


def _clipped(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.ClippedNewton(params, lr, estimate="bartlett", scale=0.05)


def _kfac(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.KFACDescent(params, lr, momentum=0.9, every=20)


CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(_sgd, "torch.optim.SGD, momentum 0.9"),
    "adamw": Contender(_adamw, "torch.optim.AdamW without weight decay"),
    "newton_cg": Contender(_newton, "trust region, at most 10 products of the Hessian a step"),
    "sharpness_gd": Contender(_sharpness, "η = lr/λ_max, λ_max by 2 products at every 5th step"),
    "block_sgd": Contender(
        _block, "η = lr/λ of each tensor, momentum 0.9, all λ by two products at every 10th step"
    ),
    "hutchinson_adam": Contender(_hutchinson, "after AdaHessian: one product a step"),
    "clipped_newton": Contender(_clipped, "after Sophia-G: drawn targets at every 10th step"),
    "kfac_descent": Contender(_kfac, "K-FAC, factors at every 20th step, momentum 0.9"),
}
FIRST_ORDER = ("sgd", "adamw")

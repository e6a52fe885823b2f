"""BackPACK's extensions as its tests call them, by curvescope: `pytest -p plugin_backpack`."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
from harness import Harness, ours
from torch import Tensor, nn

import curvescope as cs


def stand_in(name: str, **members: Any) -> None:
    """A package that modules of tests import and that is not here; tests that use it are left out."""
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(members)


class Nothing(nn.Identity):
    """In place of a module of torchvision, so that a name can be made for the test."""

    expansion = 1


if importlib.util.find_spec("pytorch_memlab") is None:
    stand_in("pytorch_memlab", MemReporter=object)
TORCHVISION = importlib.util.find_spec("torchvision") is not None
if not TORCHVISION:
    for name in ("torchvision", "torchvision.models", "torchvision.models.resnet"):
        stand_in(name, BasicBlock=Nothing, conv1x1=Nothing, resnet18=Nothing, wide_resnet50_2=Nothing)

from test.extensions.implementation.backpack import BackpackExtensions  # noqa: E402
from test.extensions.implementation.base import ExtensionsImplementation  # noqa: E402

NOT_OURS = [
    *([] if TORCHVISION else [(r"ResNet2|resnet18|Nothing", "needs torchvision")]),
    (r"hbp/", "factors of K-FAC, KFLR and KFRA layer by layer (K-FAC is compared in tests/cross_library)"),
    (r"test_(diag_|sqrt_)?ggn_mc", "cost: thousands of Monte-Carlo draws for every test"),
    (r"_hook|test_hooks|test_backprop_extension|graph_clear", "its own hooks in the backward pass"),
]


class Case:
    """A test case of theirs as a problem, with parameters in their order."""

    def __init__(self, case: Any, samples: list[int] | None = None):
        self.case, whole = case, samples is None
        self.params = list(case.trainable_parameters())
        x, y = (case.input, case.target) if whole else (case.input[samples], case.target[samples])
        self.problem = cs.Problem(case.model, (x, y), case.loss_function)
        mean = case.loss_function.reduction == "mean"
        self.share = len(x) / len(case.input) if mean else 1.0
        own = {id(p): name for name, p in self.problem.model.module.named_parameters()}
        self.names = [own[id(p)] for p in self.params]
        blocks = self.problem.model.blocks.items()
        self.blocks = [name for name, block in blocks if block.parameter in self.names]

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Rows (k, n) over our space as a list with (k, *shape) for each parameter."""
        tree = self.problem.space(*self.blocks).scatter_columns(rows.T)
        return [tree[name] for name in self.names]

    def diagonal(self, make: Any) -> list[Tensor]:
        """Of the part that these samples have in the whole."""
        found = torch.as_tensor(cs.exact_diagonal(make(self.problem, *self.blocks)).values)
        return [part[0] for part in self.parts(ours(self.share * found)[None].to(self.problem.dtype))]

    def gradients(self) -> list[Tensor]:
        samples = cs.per_sample(self.problem, *self.blocks)
        shares = torch.as_tensor(samples.shares)[:, None].to(self.problem.dtype)
        return self.parts(ours(samples.gradients() * shares))  # L = Σ share · mean over a sample's terms


def diagonal(make: Any) -> Any:
    return lambda implementation: Case(implementation.problem).diagonal(make)


def batch_diagonal(make: Any) -> Any:
    def of_samples(implementation: Any) -> list[Tensor]:
        case = implementation.problem
        each = [Case(case, [i]).diagonal(make) for i in range(len(case.input))]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]

    return of_samples


def ggn(implementation: Any, subsampling: list[int] | None = None) -> Tensor:
    """The whole matrix, in their order of parameters."""
    case = Case(implementation.problem, subsampling)
    G = ours(case.share * cs.GGN(case.problem, *case.blocks).to_dense())
    rows = torch.cat([part.flatten(1) for part in case.parts(G)], dim=1)  # columns in their order
    return torch.cat([part.flatten(1) for part in case.parts(rows.T)], dim=1)


def batch_grad(implementation: Any, subsampling: list[int] | None) -> list[Tensor]:
    found = Case(implementation.problem).gradients()
    return found if subsampling is None else [g[subsampling] for g in found]


def batch_l2_grad(implementation: Any) -> list[Tensor]:
    return [g.flatten(1).square().sum(1) for g in Case(implementation.problem).gradients()]


def sum_of_squares(implementation: Any) -> list[Tensor]:
    return [g.square().sum(0) for g in Case(implementation.problem).gradients()]


def variance(implementation: Any) -> list[Tensor]:
    return [g.var(0, correction=0) for g in Case(implementation.problem).gradients()]


BackpackExtensions.__init__ = ExtensionsImplementation.__init__  # nothing of BackPACK in the module
BackpackExtensions.diag_ggn = diagonal(cs.GGN)
BackpackExtensions.diag_h = diagonal(cs.Hessian)
BackpackExtensions.diag_ggn_exact_batch = batch_diagonal(cs.GGN)
BackpackExtensions.diag_h_batch = batch_diagonal(cs.Hessian)
BackpackExtensions.ggn = ggn
BackpackExtensions.batch_grad = batch_grad
BackpackExtensions.batch_l2_grad = batch_l2_grad
BackpackExtensions.sgs = sum_of_squares
BackpackExtensions.variance = variance


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Harness(NOT_OURS))

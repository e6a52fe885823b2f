"""Whose products are measured: our engines, other libraries where they are installed, plain PyTorch.

A contender is made for a module and one batch (x, y) of tokens and targets, and gives a `Product`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvescope.core.operator import LinearOperator
from curvescope.data.batches import Batch, Batches
from curvescope.models.load import load
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Problem
from curvescope.studies.hvp.models import logits, plain_attention

Tree = Sequence[Tensor]
"""Tensors in the order of `module.parameters()`."""


@dataclass(frozen=True)
class Product:
    """A product as its maker wants it: `enter` a tree once, `times` is what is timed, `leave` to a tree."""

    enter: Callable[[Tree], Any]
    times: Callable[[Any], Any]
    leave: Callable[[Any], Tree]
    operator: LinearOperator | None = None  # of this package: products in a row, and with several columns


Maker = Callable[[nn.Module, Tensor, Tensor], Product]


def ours(kind: str, engine: str, *, checkpoint: bool = False) -> Maker:
    """An operator of this package."""
    operator = OPERATORS[kind]

    def make(module: nn.Module, x: Tensor, y: Tensor) -> Product:
        found = operator(_problem(module, x, y), engine=engine, checkpoint=checkpoint)  # pyright: ignore[reportArgumentType]
        names = [name for name, _ in module.named_parameters()]

        def leave(Hv: Tensor) -> Tree:
            tree = found.space.scatter(Hv)
            return [tree[name] for name in names]

        def enter(tree: Tree) -> Tensor:
            return found.space.gather(dict(zip(names, tree, strict=True)))

        return Product(enter, found.__matmul__, leave, found)

    return make


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Product:
    """The unit of all others: one gradient, with PyTorch's fused attention."""
    return Product(lambda tree: tree, lambda tree: _gradient(module, x, y), lambda tree: tree)


def own_gradient(module: nn.Module, x: Tensor, y: Tensor) -> Product:
    """The unit where an eager gradient does not fit: `Problem.gradient`, in float32 whatever the weights."""
    problem = _problem(module, x, y)
    return Product(lambda tree: tree, lambda tree: problem.gradient(), lambda tree: tree)


def double_backward(module: nn.Module, x: Tensor, y: Tensor) -> Product:
    """Plain double backward, everything anew for every product."""

    def times(v: Tree) -> Tree:
        with plain_attention(module):
            first = _gradient(module, x, y, create_graph=True)
            return torch.autograd.grad(first, list(module.parameters()), list(v))

    return Product(lambda tree: tree, times, lambda tree: tree)


def compiled_jvp(module: nn.Module, x: Tensor, y: Tensor) -> Product:
    """torch.compile of jvp(grad(loss)): forward over reverse."""
    names = [name for name, _ in module.named_parameters()]
    primals = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        z = torch.func.functional_call(module, parameters, (x,))
        return F.cross_entropy(getattr(z, "logits", z).flatten(0, 1), y.flatten())

    torch.compiler.reset()

    @torch.compile(dynamic=False)
    def product(tangents: dict[str, Tensor]) -> dict[str, Tensor]:
        return torch.func.jvp(torch.func.grad(loss), (primals,), (tangents,))[1]  # pyright: ignore[reportReturnType]

    def times(tangents: dict[str, Tensor]) -> dict[str, Tensor]:
        with plain_attention(module):
            return product(tangents)

    return Product(
        lambda tree: dict(zip(names, tree, strict=True)), times, lambda found: [found[n] for n in names]
    )


class _Flat(nn.Module):
    """Logits (terms, classes), as torch's own losses want them; attention can be differentiated twice."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with plain_attention(self.module):
            return logits(self.module, x).flatten(0, 1)


def eigenthings(kind: str) -> Maker:
    """hessian-eigenthings."""

    def make(module: nn.Module, x: Tensor, y: Tensor) -> Product:
        peer, loss, data = import_module("hessian_eigenthings"), nn.CrossEntropyLoss(), [(x, y.flatten())]
        if kind == "hessian":
            found = peer.HessianOperator(_Flat(module), data, peer.supervised_loss(loss))
        else:
            parts = peer.supervised_forward, peer.supervised_loss_of_output(loss)
            found = peer.GGNOperator(_Flat(module), data, *parts)
        return _flat_product(module, found.matvec)

    return make


def curvlinops(kind: str) -> Maker:
    """curvlinops."""

    def make(module: nn.Module, x: Tensor, y: Tensor) -> Product:
        peer, model = import_module("curvlinops"), _Flat(module)
        operator = getattr(peer, {"hessian": "HessianLinearOperator", "ggn": "GGNLinearOperator"}[kind])
        data, params = [(x, y.flatten())], list(model.parameters())
        found = operator(model, nn.CrossEntropyLoss(), params, data, check_deterministic=False)
        return _flat_product(module, found.__matmul__)

    return make


def compiled(maker: Maker) -> Maker:
    """A contender whose product goes through torch.compile."""

    def make(module: nn.Module, x: Tensor, y: Tensor) -> Product:
        product = maker(module, x, y)
        product.times(product.enter([torch.zeros_like(p) for p in module.parameters()]))  # what is done once
        torch.compiler.reset()  # shapes of earlier contenders would make these dynamic
        return replace(product, times=torch.compile(product.times, dynamic=False))

    return make


def pyhessian(module: nn.Module, x: Tensor, y: Tensor) -> Product:
    """PyHessian."""
    peer = import_module("pyhessian")
    model = _Flat(copy.deepcopy(module))  # it leaves gradients with graphs behind
    found = peer.hessian(
        model, nn.CrossEntropyLoss(), dataloader=[(x, y.flatten())], cuda=x.device.type == "cuda"
    )

    def times(v: Tree) -> Tree:
        with warnings.catch_warnings(action="ignore"):  # about those gradients
            return found.dataloader_hv_product(list(v))[1]

    return Product(lambda tree: tree, times, lambda tree: tree)


CONTENDERS: dict[str, Maker] = {
    "gradient": gradient,
    "hessian": ours("hessian", "fast"),
    "ggn": ours("ggn", "fast"),
    "functional": ours("functional", "fast"),
    "hessian checkpoint": ours("hessian", "fast", checkpoint=True),
    "ggn checkpoint": ours("ggn", "fast", checkpoint=True),
    "hessian autograd": ours("hessian", "autograd"),
    "ggn autograd": ours("ggn", "autograd"),
    "double backward": double_backward,
    "compiled jvp(grad)": compiled_jvp,
    "eigenthings": eigenthings("hessian"),
    "eigenthings ggn": eigenthings("ggn"),
    "curvlinops": curvlinops("hessian"),
    "curvlinops ggn": curvlinops("ggn"),
    "curvlinops compiled": compiled(curvlinops("hessian")),
    "curvlinops ggn compiled": compiled(curvlinops("ggn")),
    "PyHessian": pyhessian,
}
CHECKPOINTED = ("hessian checkpoint", "ggn checkpoint")
PACKAGES = {
    "eigenthings": "hessian_eigenthings",
    "eigenthings ggn": "hessian_eigenthings",
    "curvlinops": "curvlinops",
    "curvlinops ggn": "curvlinops",
    "curvlinops compiled": "curvlinops",
    "curvlinops ggn compiled": "curvlinops",
    "PyHessian": "pyhessian",
}
"""What a contender needs beside this package."""


def _problem(module: nn.Module, x: Tensor, y: Tensor) -> Problem:
    return Problem(load(module), Batches([Batch(x, y)]))


def _gradient(module: nn.Module, x: Tensor, y: Tensor, *, create_graph: bool = False) -> Tree:
    loss = F.cross_entropy(logits(module, x).flatten(0, 1), y.flatten())
    return torch.autograd.grad(loss, list(module.parameters()), create_graph=create_graph)


def _flat_product(module: nn.Module, times: Callable[[Tensor], Tensor]) -> Product:
    shapes = [p.shape for p in module.parameters()]

    def leave(Hv: Tensor) -> Tree:
        parts = Hv.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return Product(lambda tree: torch.cat([t.flatten() for t in tree]), times, leave)

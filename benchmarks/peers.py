"""Products of our operators and of three other libraries: time, agreement, and what cutting the data does.

The bundled model in float32 on one batch of 8 × 64 tokens. Time is that of the processor, in units of
one gradient, agreement is with a float64 reference written in plain torch, and the last columns cut sequences
of uneven length, whose rest is ignored (target −100), into batches differently: the loss is the same, so the
product should be. The other libraries are optional: `make peers` installs them.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from _timing import Ratio, Timing, arguments, interleave, short, state, table, write
from torch import Tensor, nn

import curvescope as cs

COLUMNS = 16
CUTS = {"one batch": [8], "two": [2, 6], "three": [1, 3, 4]}
Pairs = Sequence[tuple[Tensor, Tensor]]
Multiply = Callable[[Tensor], Tensor]


class Flat(nn.Module):
    """A module whose outputs are (terms, classes), as torch's own losses want them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).flatten(0, -2)


@dataclass(frozen=True)
class Library:
    """Operators of one library: `make(module, pairs)` is a function of vectors, or of columns if it can.

    Vectors are in the order of `module.parameters()`.
    """

    name: str
    hessian: Callable[[nn.Module, Pairs], Multiply]
    ggn: Callable[[nn.Module, Pairs], Multiply] | None = None
    columns: bool = False

    def times(self, multiply: Multiply, V: Tensor) -> Tensor:
        """A product with columns, one after the other where the library takes vectors only."""
        return multiply(V) if self.columns else torch.stack([multiply(v) for v in V.unbind(1)], dim=1)


def curvescope(module: nn.Module) -> Library:
    def problem(module: nn.Module, pairs: Pairs) -> cs.Problem:
        return cs.Problem(module, cs.Batches([cs.Batch(x, y) for x, y in pairs]))

    return Library(
        f"curvescope {cs.__version__}",
        lambda module, pairs: cs.Hessian(problem(module, pairs)).__matmul__,
        lambda module, pairs: cs.GGN(problem(module, pairs)).__matmul__,
        columns=True,
    )


def eigenthings(module: nn.Module) -> Library:
    peer, loss = import_module("hessian_eigenthings"), nn.CrossEntropyLoss()

    def hessian(module: nn.Module, pairs: Pairs) -> Multiply:
        return peer.HessianOperator(Flat(module), flat(pairs), peer.supervised_loss(loss)).matvec

    def ggn(module: nn.Module, pairs: Pairs) -> Multiply:
        parts = peer.supervised_forward, peer.supervised_loss_of_output(loss)
        return peer.GGNOperator(Flat(module), flat(pairs), *parts).matvec

    return Library(f"hessian-eigenthings {version('hessian-eigenthings')}", hessian, ggn)


def curvlinops(module: nn.Module) -> Library:
    peer = import_module("curvlinops")

    def operator(kind: str) -> Callable[[nn.Module, Pairs], Multiply]:
        def make(module: nn.Module, pairs: Pairs) -> Multiply:
            model = Flat(module)
            params, loss = list(model.parameters()), nn.CrossEntropyLoss()
            found = getattr(peer, kind)(model, loss, params, flat(pairs), check_deterministic=False)
            return found.__matmul__

        return make

    name = f"curvlinops {version('curvlinops-for-pytorch')}"
    return Library(name, operator("HessianLinearOperator"), operator("GGNLinearOperator"), columns=True)


def pyhessian(module: nn.Module) -> Library:
    peer = import_module("pyhessian")

    def hessian(module: nn.Module, pairs: Pairs) -> Multiply:
        model = Flat(copy.deepcopy(module))  # it leaves gradients with graphs behind
        found = peer.hessian(model, nn.CrossEntropyLoss(), dataloader=flat(pairs), cuda=False)

        def multiply(v: Tensor) -> Tensor:
            parts = v.split([p.numel() for p in model.parameters()])
            tree = [part.view(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]
            with warnings.catch_warnings(action="ignore"):  # about those gradients
                return torch.cat([Hv.flatten() for Hv in found.dataloader_hv_product(tree)[1]])

        return multiply

    return Library(f"PyHessian {version('pyhessian')}", hessian)


LIBRARIES = {
    "curvescope": curvescope,
    "hessian-eigenthings": eigenthings,
    "curvlinops": curvlinops,
    "PyHessian": pyhessian,
}


def available(module: nn.Module) -> tuple[list[Library], list[str]]:
    """The libraries that are there, and the names of those that are not."""
    found, missing = [], []
    for name, make in LIBRARIES.items():
        try:
            found.append(make(module))
        except ImportError:
            missing.append(name)
    return found, missing


def flat(pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    return [(x, y.flatten()) for x, y in pairs]


def mean_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x).flatten(0, -2), y.flatten())


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = torch.autograd.grad(mean_loss(module, x, y), list(module.parameters()))
    return torch.cat([g.flatten() for g in found])


def reference(module: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> dict[str, Tensor]:
    """H v and GGN v in float64: double backward, and Jᵀ (∂²ℓ/∂z²) J v with J v from two reverse passes."""
    module = copy.deepcopy(module).double()
    params = list(module.parameters())
    parts = v.double().split([p.numel() for p in params])
    tree = [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
    first = torch.autograd.grad(mean_loss(module, x, y), params, create_graph=True)
    Hv = torch.autograd.grad(first, params, tree)
    z = module(x)
    u = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, params, u, create_graph=True)
    (Jv,) = torch.autograd.grad(pulled, u, tree)
    leaf = z.detach().requires_grad_()
    loss = nn.functional.cross_entropy(leaf.flatten(0, -2), y.flatten())
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (BJv,) = torch.autograd.grad(slope, leaf, Jv)
    GGNv = torch.autograd.grad(module(x), params, BJv)
    return {k: torch.cat([t.flatten() for t in found]) for k, found in (("hessian", Hv), ("ggn", GGNv))}


def distance(found: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.detach().double() - want.double()).norm() / want.double().norm())


def ragged(y: Tensor) -> Tensor:
    """Targets of sequences of which fewer and fewer tokens count."""
    y, kept = y.clone(), torch.linspace(1, y.shape[1], len(y)).round().long()
    y[torch.arange(y.shape[1]) >= kept[:, None]] = -100
    return y


@dataclass
class Measured:
    """What is known about one library."""

    name: str
    seconds: dict[str, Ratio] = field(default_factory=dict)  # in gradients
    error: dict[str, float] = field(default_factory=dict)
    change: dict[str, dict[str, float]] = field(default_factory=dict)  # by cut


def measure_numbers(library: Library, module: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Measured:
    """Agreement with the reference, and how the product changes with the cut."""
    found, uneven = Measured(library.name), ragged(y)
    want = reference(module, x, y, v)
    for kind in want:
        make = getattr(library, kind)
        if make is None:
            continue
        found.error[kind] = distance(make(module, [(x, y)])(v), want[kind])
        products = {}
        for name, cut in CUTS.items():
            pairs = list(zip(x.split(cut), uneven.split(cut), strict=True))
            products[name] = make(module, pairs)(v).detach()
        whole = products.pop("one batch")
        found.change[kind] = {name: distance(product, whole) for name, product in products.items()}
    return found


def time_products(
    libraries: list[Library], module: nn.Module, x: Tensor, y: Tensor, **options: Any
) -> Timing:
    """One gradient, and one product of each kind and library."""
    source = torch.Generator().manual_seed(1)
    V = torch.randn(sum(p.numel() for p in module.parameters()), COLUMNS, generator=source)
    calls: dict[str, Callable[[], Any]] = {"gradient": lambda: gradient(module, x, y)}
    for library in libraries:
        for kind in ("hessian", "ggn"):
            if (make := getattr(library, kind)) is not None:
                multiply = make(module, [(x, y)])
                calls[f"{library.name} {kind}"] = lambda multiply=multiply, v=V[:, 0]: multiply(v)
                if kind == "hessian":
                    calls[f"{library.name} columns"] = lambda multiply=multiply, library=library: (
                        library.times(multiply, V)
                    )
    return interleave(calls, clock=time.process_time, **options)


def show(found: list[Measured]) -> None:
    head = ["", "H v", "GGN v", f"H V, {COLUMNS} columns", "error H", "error GGN"]
    head += ["H v, other batches", "GGN v, other batches"]
    rows = []
    for one in found:
        times = [one.seconds.get(kind, "–") for kind in ("hessian", "ggn", "columns")]
        errors = [_power(one.error.get(kind)) for kind in ("hessian", "ggn")]
        changes = [
            _power(max(one.change.get(kind, {}).values(), default=None)) for kind in ("hessian", "ggn")
        ]
        rows.append([one.name, *times, *errors, *changes])
    print(table(head, rows))


def _power(x: float | None) -> str:
    return "–" if x is None else f"{x:.0e}" if x < 0.01 else short(x)


def draw(found: list[Measured]) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    names = [one.name for one in found]
    for shift, kind, title in ((-0.2, "hessian", "H v"), (0.2, "ggn", "GGN v")):
        there = [(i, one) for i, one in enumerate(found) if kind in one.seconds]
        places = [i + shift for i, _ in there]
        left.barh(places, [one.seconds[kind].median for _, one in there], height=0.36, label=title)
        right.barh(places, [max(one.change[kind].values()) for _, one in there], height=0.36, label=title)
    left.set(xlabel="gradients", title="time of one product")
    right.set(xlabel="relative change", title="the same data in other batches", xscale="log")
    left.set_yticks(range(len(names)), names)
    right.set_yticks([])
    for ax in (left, right):
        ax.invert_yaxis()
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def main() -> None:
    args = arguments(__doc__ or "", "peers")
    model = cs.load("tiny-gpt")
    module, (batch,) = model.module, cs.text_data("sample", model, tokens=512, seq_len=64, batch_size=8)
    libraries, missing = available(module)
    if missing:
        print(f"not installed: {', '.join(missing)}; `make peers` installs them\n")
    v = torch.randn(sum(p.numel() for p in module.parameters()), generator=torch.Generator().manual_seed(0))
    x, y, before = batch.inputs, batch.targets, state()
    found = [measure_numbers(library, module, x, y, v) for library in libraries]
    timing = time_products(libraries, module, x, y, rounds=2 if args.quick else 7, budget=200.0)
    for one in found:
        for kind in ("hessian", "ggn", "columns"):
            if f"{one.name} {kind}" in timing.seconds:
                one.seconds[kind] = timing.ratio(f"{one.name} {kind}", "gradient")
    print(f"{before}; time in gradients, median over rounds (range)\n")
    show(found)
    write(args.out, "peers", {"libraries": found, "seconds": timing.seconds}, draw(found))


if __name__ == "__main__":
    main()

"""Compare our operator products with three other libraries: time, agreement, dependence on batching.

The model is the bundled one in float32, on one batch of 8 × 64 tokens. Time is processor time, in units of
one gradient. Agreement is with a float64 reference in plain torch. The last columns split sequences of
different lengths (padded with target −100) into other batches: the loss is the same, so the product should be
the same. The other libraries are optional: `make peers` installs them.
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
    """A module whose outputs are (terms, classes), as torch's own losses expect them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).flatten(0, -2)


@dataclass(frozen=True)
class Library:
    """Operators of one library: `make(module, pairs)` returns a function of vectors, or of columns.

    Vectors are in the order of `module.parameters()`.
    """

    name: str
    hessian: Callable[[nn.Module, Pairs], Multiply]
    ggn: Callable[[nn.Module, Pairs], Multiply] | None = None
    columns: bool = False

    def times(self, multiply: Multiply, V: Tensor) -> Tensor:
        """Return a product with columns, one after the other if the library takes vectors only."""
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
            operator_ = getattr(peer, kind)(model, loss, params, flat(pairs), check_deterministic=False)
            return operator_.__matmul__

        return make

    name = f"curvlinops {version('curvlinops-for-pytorch')}"
    return Library(name, operator("HessianLinearOperator"), operator("GGNLinearOperator"), columns=True)


def pyhessian(module: nn.Module) -> Library:
    peer = import_module("pyhessian")

    def hessian(module: nn.Module, pairs: Pairs) -> Multiply:
        model = Flat(copy.deepcopy(module))  # it leaves gradients with graphs in the module
        operator = peer.hessian(model, nn.CrossEntropyLoss(), dataloader=flat(pairs), cuda=False)

        def multiply(v: Tensor) -> Tensor:
            parts = v.split([p.numel() for p in model.parameters()])
            tree = [part.view(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]
            with warnings.catch_warnings(action="ignore"):  # about those gradients
                return torch.cat([Hv.flatten() for Hv in operator.dataloader_hv_product(tree)[1]])

        return multiply

    return Library(f"PyHessian {version('pyhessian')}", hessian)


LIBRARIES = {
    "curvescope": curvescope,
    "hessian-eigenthings": eigenthings,
    "curvlinops": curvlinops,
    "PyHessian": pyhessian,
}


def available(module: nn.Module) -> tuple[list[Library], list[str]]:
    """Return the installed libraries, and the names of missing ones."""
    libraries, missing = [], []
    for name, make in LIBRARIES.items():
        try:
            libraries.append(make(module))
        except ImportError:
            missing.append(name)
    return libraries, missing


def flat(pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    return [(x, y.flatten()) for x, y in pairs]


def mean_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x).flatten(0, -2), y.flatten())


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    gradients = torch.autograd.grad(mean_loss(module, x, y), list(module.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def reference(module: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Return H v and GGN v in float64: double backward, and Jᵀ (∂²ℓ/∂z²) J v by two reverse passes."""
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
    return {k: torch.cat([t.flatten() for t in columns]) for k, columns in (("hessian", Hv), ("ggn", GGNv))}


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm."""
    return float((actual.detach().double() - expected.double()).norm() / expected.double().norm())


def ragged(y: Tensor) -> Tensor:
    """Return targets with fewer and fewer counted tokens per sequence."""
    y, lengths = y.clone(), torch.linspace(1, y.shape[1], len(y)).round().long()
    y[torch.arange(y.shape[1]) >= lengths[:, None]] = -100
    return y


@dataclass
class Measured:
    """Measurements of one library."""

    name: str
    seconds: dict[str, Ratio] = field(default_factory=dict)  # in gradients
    error: dict[str, float] = field(default_factory=dict)
    change: dict[str, dict[str, float]] = field(default_factory=dict)  # by cut


def measure_numbers(library: Library, module: nn.Module, x: Tensor, y: Tensor, v: Tensor) -> Measured:
    """Measure the agreement with the reference, and the change of the product with the batching."""
    result, uneven = Measured(library.name), ragged(y)
    want = reference(module, x, y, v)
    for kind in want:
        make = getattr(library, kind)
        if make is None:
            continue
        result.error[kind] = distance(make(module, [(x, y)])(v), want[kind])
        products = {}
        for name, cut in CUTS.items():
            pairs = list(zip(x.split(cut), uneven.split(cut), strict=True))
            products[name] = make(module, pairs)(v).detach()
        whole = products.pop("one batch")
        result.change[kind] = {name: distance(product, whole) for name, product in products.items()}
    return result


def time_products(
    libraries: list[Library], module: nn.Module, x: Tensor, y: Tensor, **options: Any
) -> Timing:
    """Return one gradient, and one product of each kind and library, as calls."""
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


def show(results: list[Measured]) -> None:
    head = ["", "H v", "GGN v", f"H V, {COLUMNS} columns", "error H", "error GGN"]
    head += ["H v, other batches", "GGN v, other batches"]
    rows = []
    for result in results:
        times = [result.seconds.get(kind, "–") for kind in ("hessian", "ggn", "columns")]
        errors = [_power(result.error.get(kind)) for kind in ("hessian", "ggn")]
        changes = [
            _power(max(result.change.get(kind, {}).values(), default=None)) for kind in ("hessian", "ggn")
        ]
        rows.append([result.name, *times, *errors, *changes])
    print(table(head, rows))


def _power(x: float | None) -> str:
    return "–" if x is None else f"{x:.0e}" if x < 0.01 else short(x)


def draw(results: list[Measured]) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    names = [result.name for result in results]
    for shift, kind, title in ((-0.2, "hessian", "H v"), (0.2, "ggn", "GGN v")):
        measured = [(i, result) for i, result in enumerate(results) if kind in result.seconds]
        places = [i + shift for i, _ in measured]
        left.barh(places, [result.seconds[kind].median for _, result in measured], height=0.36, label=title)
        right.barh(
            places, [max(result.change[kind].values()) for _, result in measured], height=0.36, label=title
        )
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
    results = [measure_numbers(library, module, x, y, v) for library in libraries]
    timing = time_products(libraries, module, x, y, rounds=2 if args.quick else 7, budget=200.0)
    for result in results:
        for kind in ("hessian", "ggn", "columns"):
            if f"{result.name} {kind}" in timing.seconds:
                result.seconds[kind] = timing.ratio(f"{result.name} {kind}", "gradient")
    print(f"{before}; time in gradients, median over rounds (range)\n")
    show(results)
    write(args.out, "peers", {"libraries": results, "seconds": timing.seconds}, draw(results))


if __name__ == "__main__":
    main()

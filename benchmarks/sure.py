"""Errors of float32 products, relative to float64, for a model that memorizes its data.

    python benchmarks/sure.py --out benchmarks/results/sure

The script trains a zoo Transformer (2 layers of width 32) on 8 × 16 random tokens. At several losses it
compares H v, GGN v and the functional Hessian of our engines in float32 with float64. It does the same for
double backward of `F.cross_entropy`, and for other libraries if they are installed (`make peers`).
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _timing import table
from torch import Tensor, nn

import curvescope as cs
from curvescope.core.seeds import generator
from curvescope.runs.folder import environment
from curvescope.studies.hvp.analysis import CONTENDERS, PACKAGES

STEPS = (200, 500, 1000, 2000, 4000, 6000)
OURS = {"H": cs.Hessian, "GGN": cs.GGN, "functional": cs.FunctionalHessian}
OTHERS = ("double backward", "eigenthings", "curvlinops", "PyHessian")


def errors(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return relative distances to float64 of products with one Gaussian vector."""
    single, double = (cs.Problem(m, (x, y)) for m in (module, copy.deepcopy(module).double()))
    v = torch.randn(cs.GGN(single).shape[0], generator=generator(0, 1))
    products = {
        "loss": double.loss_value(),
        "loss in float32": abs(single.loss_value() / double.loss_value() - 1),
    }
    for name, kind in OURS.items():
        want = kind(double, engine="autograd") @ v.double()
        for engine in ("fast", "autograd"):
            product = kind(single, engine=engine) @ v
            products[f"{name}, {engine}"] = float((product.double() - want).norm() / want.norm())
    space, names = single.space(), [name for name, _ in module.named_parameters()]
    tree, want = space.scatter(v), cs.Hessian(double, engine="autograd") @ v.double()
    for other in OTHERS:
        if other in PACKAGES and find_spec(PACKAGES[other]) is None:
            continue
        contender = CONTENDERS[other](_Plain(module), x, y)
        product = contender.leave(contender.times(contender.enter([tree[name] for name in names])))
        whole = space.gather(dict(zip(names, product, strict=True))).double()
        products[f"H, {other}"] = float((whole - want).norm() / want.norm())
    return products


class _Plain(nn.Module):
    """A module without the keywords that models of transformers take; its parameters are the module's."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor, use_cache: bool = False) -> Tensor:
        return self.module(tokens)


def trained(tell: Callable[[int, nn.Module, Tensor, Tensor], Any]) -> None:
    """Train, and yield the module at some steps."""
    torch.manual_seed(0)
    shape = cs.TransformerConfig(n_layers=2, d_model=32, n_heads=2, n_ctx=16, vocab_size=16)
    module, (x, y) = cs.Transformer(shape), torch.randint(16, (2, 8, 16))
    x[:, 0] = torch.arange(8)  # all sequences begin differently, so that the model can memorize them
    steps = torch.optim.Adam(module.parameters(), lr=3e-3)
    for step in range(1, STEPS[-1] + 1):
        steps.zero_grad()
        F.cross_entropy(module(x).flatten(0, 1), y.flatten()).backward()
        steps.step()
        if step in STEPS:
            tell(step, module, x, y)


def main() -> None:
    """Train, compare, print, and write sure.json and sure.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/sure"), help="folder of the results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[int, dict[str, float]] = {}

    def tell(step: int, module: nn.Module, x: Tensor, y: Tensor) -> None:
        rows[step] = errors(module, x, y)
        print(step, {name: f"{value:.1e}" for name, value in rows[step].items()}, flush=True)

    trained(tell)
    lines = [[name, *(f"{row[name]:.1e}" for row in rows.values())] for name in rows[STEPS[0]]]
    shown = table(["after steps", *map(str, rows)], lines)
    given.out.mkdir(parents=True, exist_ok=True)
    written = {"environment": environment(), "rows": rows}
    (given.out / "sure.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
    (given.out / "sure.md").write_text(shown + "\n", encoding="utf-8")
    print(f"\n{shown}")


if __name__ == "__main__":
    sys.exit(main())

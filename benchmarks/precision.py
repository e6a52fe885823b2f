"""Simulate the errors of curvature with matrix products in bfloat16, float16 or TF32, on any machine.

    python benchmarks/precision.py --out benchmarks/results/precision
    python benchmarks/precision.py --models tiny-gpt path/to/stories15M SmolLM2-135M-Instruct.Q4_1.gguf

Hardware for such a format rounds the operands and adds in float32. The script rounds every operand of every
dispatched matrix product (forward, backward, second backward, attention, head) to the format and multiplies
in float32, which gives the same rounding without the speed. Weights, activations, vectors and sums stay in
float32. There are two scopes:

    all       rounds all products: the graph of the gradient, and the products through it
    products  computes that graph in float32, and rounds only the products with directions

A random GPT-2 124M on 2 × 128 tokens is the control: there an H200 in TF32 is 1.5e-3 from float64
(benchmarks/results/scale-h200). The other models use the loss on the bundled text. Errors are relative
distances to float64. Errors of eigenvalues and densities are distances to the same method with the same start
and probes in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from _timing import table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import curvescope as cs
from curvescope.core.seeds import generator
from curvescope.runs.folder import environment
from curvescope.studies.hvp.analysis import SHAPES, build

Format = Literal["float32", "tf32", "fp16", "bf16"]
Scope = Literal["all", "products"]
FORMATS: tuple[Format, ...] = ("float32", "tf32", "fp16", "bf16")
MATRICES = {"hessian": cs.Hessian, "ggn": cs.GGN, "functional": cs.FunctionalHessian}
CONTROL = "gpt2-124M"
STEPS, PROBES, TOP = 30, 4, 2
LARGE = 2_000_000  # for more parameters the script compares products only

_aten: Any = torch.ops.aten
OPERANDS = {  # positions of the operands of each operation
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv, _aten.dot), (0, 1)),
    **dict.fromkeys(
        (_aten.addmm, _aten.addmm_, _aten.baddbmm, _aten.baddbmm_, _aten.addmv, _aten.addmv_), (1, 2)
    ),
}


class Rounded(TorchDispatchMode):
    """Mode that rounds the operands of dispatched matrix products to a format."""

    def __init__(self, to: Format):
        super().__init__()
        self.to, self.count, self.unseen = to, 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        which = OPERANDS.get(func.overloadpacket)
        if which is not None:
            self.count += 1
            args = tuple(rounded(a, self.to) if i in which else a for i, a in enumerate(args))
        elif "scaled_dot_product" in str(func) or "mkldnn" in str(func) or "_flash" in str(func):
            self.unseen.add(str(func))  # multiplies inside a fused kernel
        return func(*args, **(kwargs or {}))


def rounded(x: Tensor, to: Format) -> Tensor:
    """Round to the nearest numbers of a format, stored in float32."""
    if x.dtype != torch.float32 or to == "float32":
        return x
    if to == "tf32":  # 10 mantissa bits instead of 23; ties away from zero, like the hardware conversion
        bits = x.contiguous().view(torch.int32)
        return torch.where(x.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), x)
    return x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[to]).float()


class Low(cs.LinearOperator):
    """An operator with rounded matrix products; the scope `products` excludes those of its graph."""

    def __init__(self, inner: Any, to: Format, scope: Scope):
        self.inner, self.scope, self.mode = inner, scope, Rounded(to)
        self.shape, self.dtype, self.device = inner.shape, inner.dtype, inner.device
        self.symmetric, self.psd = inner.symmetric, False  # the rounded operator may not be psd

    @contextmanager
    def graph(self, v: Tensor) -> Iterator[None]:
        """Use one graph for all products in this block."""
        whole = self.mode if self.scope == "all" else nullcontext()
        with sdpa_kernel(SDPBackend.MATH), whole, self.inner.frozen():
            _ = self.inner @ v
            yield
        assert self.mode.count > 0, "no matrix product was seen"
        assert not self.mode.unseen, f"products that are not rounded: {self.mode.unseen}"

    def _matmat(self, V: Tensor) -> Tensor:
        with nullcontext() if self.scope == "all" else self.mode:
            return self.inner @ V


def problem(name: str, tokens: int) -> tuple[cs.Problem, cs.Problem | None]:
    """Return the problem in float32, and in float64."""
    if name == CONTROL:
        module = build("gpt2", "124M", 128)
        x, y = (torch.randint(SHAPES["124M"][3], (2, 128), generator=generator(0, i)) for i in (0, 1))
        both = [cs.Problem(cs.load(m), [(x, y)]) for m in (module, build("gpt2", "124M", 128).double())]
        return both[0], both[1]
    problems = []
    for dtype in ("float32", "float64"):
        model = cs.load(name, dtype=dtype)
        problems.append(
            cs.Problem(model, cs.text_data("sample", model, tokens=tokens, seq_len=min(64, tokens)))
        )
    return problems[0], problems[1]


def compare(name: str, tokens: int) -> list[dict[str, Any]]:
    """Return the rows of one model: each matrix, format and scope."""
    single, double = problem(name, tokens)
    name, rows = Path(name).name, []
    for matrix, kind in MATRICES.items():
        exact = kind(double, engine="autograd")
        n = exact.shape[0]
        u, v = (torch.randn(n, generator=generator(0, 7, i)) for i in (0, 1))
        want = exact @ v.double()
        del exact
        plain: dict[str, Any] = {}
        for to in FORMATS:
            for scope in ("products", "all") if to != "float32" else ("all",):
                operator = Low(kind(single, engine="autograd"), to, scope)
                start = time.perf_counter()
                row = {"model": name, "n": n, "matrix": matrix, "format": to, "scope": scope}
                try:
                    with operator.graph(v):
                        row |= products(operator, u, v, want)
                        if n < LARGE:
                            spectra_of_operator = spectra(operator)
                            plain = plain or spectra_of_operator
                            row |= compare_spectra(spectra_of_operator, plain)
                except cs.CurvescopeError as error:  # numbers exceed the format's range
                    row["failed"] = str(error)
                row["seconds"] = time.perf_counter() - start
                rows.append(row)
                print({k: round(x, 6) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
    return rows


def products(operator: Low, u: Tensor, v: Tensor, want: Tensor) -> dict[str, Any]:
    """Return the error of the product, in full and in the worst block, and the asymmetry."""
    product = (operator @ v).double()
    gap = product - want
    errors = {}
    space = operator.inner.space
    gaps = space.to_dict(gap)
    for block, part in space.to_dict(want).items():
        if part.norm() > 1e-6 * want.norm():  # a block that is zero up to rounding has no relative error
            errors[block] = float(gaps[block].norm() / part.norm())
    worst = max(errors, key=lambda block: errors[block])
    turned = u.double() @ product - v.double() @ (operator @ u).double()
    return {
        "error": float(gap.norm() / want.norm()),
        "median_block_error": float(np.median(list(errors.values()))),
        "worst_block_error": errors[worst],
        "worst_block": worst,
        "asymmetry": float(abs(turned) / (u.norm() * product.norm())),
    }


def spectra(operator: cs.LinearOperator) -> dict[str, Any]:
    """Return extreme eigenvalues and a density, always from the same starts and probes."""
    density = cs.spectral_density(operator, num_probes=PROBES, num_steps=STEPS, seed=0)
    top = cs.eigsh(operator, k=TOP, seed=0, tol=1e-3)
    return {"density": density, "top": np.sort(np.abs(top.values))[::-1], "converged": top.converged}


def compare_spectra(rounded: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return the effect of rounding: distances to float32, and float32's own error bar."""
    density, plain_density = rounded["density"], plain["density"]
    scale = float(np.abs(plain_density.extremes).max())
    widened = density.with_width(plain_density.width, grid=plain_density.grid)
    return {
        "top_error": float(abs(rounded["top"][0] - plain["top"][0]) / plain["top"][0]),
        "converged": bool(rounded["converged"]),
        "smallest": float(density.extremes[0] / scale),
        "largest": float(density.extremes[1] / scale),
        "density_gap": float(
            np.trapezoid(np.abs(widened.density - plain_density.density), plain_density.grid)
        ),
        "density_stderr": float(np.trapezoid(plain_density.stderr, plain_density.grid)),
        "second_moment_error": float(abs(density.moments[1] / plain_density.moments[1] - 1)),
        "second_moment_stderr": float(plain_density.moments_stderr[1] / plain_density.moments[1]),
    }


def shown(rows: list[dict[str, Any]]) -> str:
    """Return the tables of a page: products, then spectra."""

    def number(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:.1e}" if key in row else "not finite" if "failed" in row else "–"

    first = ["error", "median_block_error", "worst_block_error", "asymmetry"]
    second = ["top_error", "smallest", "largest", "density_gap", "density_stderr"]
    second += ["second_moment_error", "second_moment_stderr"]
    names = ("model", "matrix", "format", "scope")
    text = table(
        [*names, *(k.replace("_", " ") for k in first)],
        [[*(row[k] for k in names), *(number(row, k) for k in first)] for row in rows],
    )
    rich = [row for row in rows if "top_error" in row]
    if rich:
        text += "\n\n" + table(
            [*names, *(k.replace("_", " ") for k in second)],
            [[*(row[k] for k in names), *(number(row, k) for k in second)] for row in rich],
        )
    return text + "\n"


def main() -> None:
    """Compare, print, write precision.json and precision.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny-gpt", CONTROL], help="as `cs.load` takes them")
    parser.add_argument("--tokens", type=int, default=256, help="of text")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/precision"), help="folder of the results"
    )
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.models:
        rows += compare(name, given.tokens)
        written = {"environment": environment(), "tokens": given.tokens, "rows": rows}
        (given.out / "precision.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
        (given.out / "precision.md").write_text(shown(rows), encoding="utf-8")
    print("\n" + shown(rows))


if __name__ == "__main__":
    sys.exit(main())

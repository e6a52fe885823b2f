"""What matrix products in bfloat16, float16 or TF32 do to curvature: errors, without a card that has them.

    python benchmarks/precision.py --out benchmarks/results/precision
    python benchmarks/precision.py --models tiny-gpt path/to/stories15M SmolLM2-135M-Instruct.Q4_1.gguf

Units that multiply in such a format round the operands and add in float32. Here every operand of every
matrix product that is dispatched (forward, backward, second backward, attention, head) is rounded to the
format, and the product is taken in float32: the same rounding without the speed. Weights, activations,
vectors and sums stay in float32. Two scopes:

    all       everything is rounded: the graph of the gradient, and the products through it
    products  that graph is made in float32; rounding begins where a direction enters

A random GPT-2 124M on 2 × 128 tokens is the control: an H200 in TF32 is 1.5e-3 from float64 there
(benchmarks/results/scale-h200). For the others the loss is that of the bundled text. Errors are relative
distances to float64; those of eigenvalues and densities are distances to what the same method, start and
probes give in float32.
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
LARGE = 2_000_000  # parameters from which on only products are compared

_aten: Any = torch.ops.aten
OPERANDS = {  # which arguments of an operation are multiplied
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv, _aten.dot), (0, 1)),
    **dict.fromkeys(
        (_aten.addmm, _aten.addmm_, _aten.baddbmm, _aten.baddbmm_, _aten.addmv, _aten.addmv_), (1, 2)
    ),
}


class Rounded(TorchDispatchMode):
    """Operands of matrix products that are dispatched inside are rounded to a format."""

    def __init__(self, to: Format):
        super().__init__()
        self.to, self.count, self.unseen = to, 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        which = OPERANDS.get(func.overloadpacket)
        if which is not None:
            self.count += 1
            args = tuple(rounded(a, self.to) if i in which else a for i, a in enumerate(args))
        elif "scaled_dot_product" in str(func) or "mkldnn" in str(func) or "_flash" in str(func):
            self.unseen.add(str(func))  # multiplies inside, unseen
        return func(*args, **(kwargs or {}))


def rounded(x: Tensor, to: Format) -> Tensor:
    """The nearest numbers of a format, in float32."""
    if x.dtype != torch.float32 or to == "float32":
        return x
    if to == "tf32":  # 10 bits behind the point instead of 23; ties away from zero, as the card's conversion
        bits = x.contiguous().view(torch.int32)
        return torch.where(x.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), x)
    return x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[to]).float()


class Low(cs.LinearOperator):
    """An operator whose matrix products are rounded; with the scope `products` those of its graph are not."""

    def __init__(self, inner: Any, to: Format, scope: Scope):
        self.inner, self.scope, self.mode = inner, scope, Rounded(to)
        self.shape, self.dtype, self.device = inner.shape, inner.dtype, inner.device
        self.symmetric, self.psd = inner.symmetric, False  # whether it still is psd is a question here

    @contextmanager
    def graph(self, v: Tensor) -> Iterator[None]:
        """Products inside go through one graph."""
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
    """The problem in float32, and in float64."""
    if name == CONTROL:
        module = build("gpt2", "124M", 128)
        x, y = (torch.randint(SHAPES["124M"][3], (2, 128), generator=generator(0, i)) for i in (0, 1))
        both = [cs.Problem(cs.load(m), [(x, y)]) for m in (module, build("gpt2", "124M", 128).double())]
        return both[0], both[1]
    found = []
    for dtype in ("float32", "float64"):
        model = cs.load(name, dtype=dtype)
        found.append(cs.Problem(model, cs.text_data("sample", model, tokens=tokens, seq_len=min(64, tokens))))
    return found[0], found[1]


def compare(name: str, tokens: int) -> list[dict[str, Any]]:
    """Rows for one model: each matrix, format and scope."""
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
                            found = spectra(operator)
                            plain = plain or found
                            row |= beside(found, plain)
                except cs.CurvescopeError as error:  # numbers beyond the format's range
                    row["failed"] = str(error)
                row["seconds"] = time.perf_counter() - start
                rows.append(row)
                print({k: round(x, 6) if isinstance(x, float) else x for k, x in row.items()}, flush=True)
    return rows


def products(operator: Low, u: Tensor, v: Tensor, want: Tensor) -> dict[str, Any]:
    """Distance to the exact product: of the whole vector, of the block where it is largest; and symmetry."""
    found = (operator @ v).double()
    gap = found - want
    errors = {}
    space = operator.inner.space
    gaps = space.to_dict(gap)
    for block, part in space.to_dict(want).items():
        if part.norm() > 1e-6 * want.norm():  # what is zero but for rounding has no relative error
            errors[block] = float(gaps[block].norm() / part.norm())
    worst = max(errors, key=lambda block: errors[block])
    turned = u.double() @ found - v.double() @ (operator @ u).double()
    return {
        "error": float(gap.norm() / want.norm()),
        "median_block_error": float(np.median(list(errors.values()))),
        "worst_block_error": errors[worst],
        "worst_block": worst,
        "asymmetry": float(abs(turned) / (u.norm() * found.norm())),
    }


def spectra(operator: cs.LinearOperator) -> dict[str, Any]:
    """Extreme eigenvalues and a density, from the same starts and probes each time."""
    density = cs.spectral_density(operator, num_probes=PROBES, num_steps=STEPS, seed=0)
    top = cs.eigsh(operator, k=TOP, seed=0, tol=1e-3)
    return {"density": density, "top": np.sort(np.abs(top.values))[::-1], "converged": top.converged}


def beside(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What rounding did to them: distances to float32, and float32's own error bar."""
    one, two = found["density"], plain["density"]
    scale = float(np.abs(two.extremes).max())
    moved = one.with_width(two.width, grid=two.grid)
    return {
        "top_error": float(abs(found["top"][0] - plain["top"][0]) / plain["top"][0]),
        "converged": bool(found["converged"]),
        "smallest": float(one.extremes[0] / scale),
        "largest": float(one.extremes[1] / scale),
        "density_gap": float(np.trapezoid(np.abs(moved.density - two.density), two.grid)),
        "density_stderr": float(np.trapezoid(two.stderr, two.grid)),
        "second_moment_error": float(abs(one.moments[1] / two.moments[1] - 1)),
        "second_moment_stderr": float(two.moments_stderr[1] / two.moments[1]),
    }


def shown(rows: list[dict[str, Any]]) -> str:
    """Tables for a page: products, then spectra."""

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

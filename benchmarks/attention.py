"""Fused attention with two derivatives: time of every kernel, against PyTorch's fused and plain attention.

On a CUDA device. `--tune` tries some tiles for every kernel and prints the fastest, in the words of
`triton_tiles.TILES`. Errors are relative to float64 on a smaller shape; times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _timing import short, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from curvescope.core.errors import UsageError
from curvescope.kernels.attention import attention
from curvescope.kernels.attention import triton_passes as kernels
from curvescope.kernels.attention.mask import Mask
from curvescope.kernels.attention.passes import Saved
from curvescope.kernels.attention.triton_tiles import Tile

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "full": torch.float32}
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4, "ho": 5, "hq": 7, "hkv": 8}  # of tiles, each 2·L²·d operations
ROUNDS = 20
NAMES = ("O", "dQ", "dK", "dV", "hQ", "hK", "hV", "h_dO")
WIDE = [(128, 64), (128, 32), (128, 16), (64, 64), (64, 32), (64, 16), (32, 32)]


class Case(NamedTuple):
    B: int
    H: int
    L: int
    d: int

    def __str__(self) -> str:
        return "×".join(map(str, self))


CASES = [Case(8, 12, 1024, 64), Case(1, 12, 8192, 64)]


def main() -> None:
    options = _options()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": []}
    for kind in options.kinds:
        torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
        found.setdefault("errors", {})[kind] = show_errors(kind)
        for case in options.cases:
            one = {"case": str(case), "kind": kind, **show_times(case, kind)}
            if options.tune:
                one["tune"] = show_tuning(case, kind, options.kernels)
            found["cases"].append(one)
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "attention.json").write_text(json.dumps(found, indent=1) + "\n")
    print(options.out / "attention.json", file=sys.stderr)


def draw(case: Case, dtype: torch.dtype, count: int, seed: int = 0) -> list[Tensor]:
    """Tensors (B, H, L, d), laid out by token as in a model."""
    B, H, L, d = case
    source = torch.Generator("cuda").manual_seed(seed)
    drawn = (torch.randn(B, L, H, d, device="cuda", generator=source) for _ in range(count))
    return [x.to(dtype).transpose(1, 2) for x in drawn]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.full((q.shape[2], q.shape[2]), -torch.inf, device=q.device, dtype=q.dtype).triu(1)
    return (q @ k.mT * q.shape[3] ** -0.5 + hidden).softmax(-1) @ v


def show_errors(kind: str) -> dict[str, float]:
    """‖found − exact‖ / ‖exact‖ of every output, in float64, on 2 × 3 heads of 500 tokens."""
    tensors = draw(Case(2, 3, 500, 64), KINDS[kind], 7, seed=1)

    def outputs(function: Callable, made: Sequence[Tensor]) -> list[Tensor]:
        q, k, v, do = (x.detach().requires_grad_() for x in made[:4])
        o = function(q, k, v)
        first = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
        return [o, *first, *torch.autograd.grad(first, (q, k, v, do), made[4:])]

    found = outputs(lambda *x: attention(*x, causal=True, backend="triton"), tensors)
    exact = outputs(plain, [x.double() for x in tensors])
    errors = {n: float((a - b).norm() / b.norm()) for n, a, b in zip(NAMES, found, exact, strict=True)}
    print(f"\n{kind}: relative errors " + ", ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    return errors


class Passes:
    """Forward, backward and second derivative of one case, called without autograd."""

    def __init__(self, case: Case, kind: str):
        self.x = draw(case, KINDS[kind], 7)
        self.common = {"mask": Mask(causal=True), "scale": case.d**-0.5}
        self.o, self.lse, self.empty = kernels.forward(*self.x[:3], **self.common)

    def run(self, name: str, **tiles: Any) -> Any:
        given = self.common | ({"tiles": tiles} if tiles else {})
        saved = Saved(*self.x[:3], self.o, self.lse, self.empty)
        if name == "forward":
            return kernels.forward(*self.x[:3], **given)
        if name in ("backward", "dq", "dkv"):
            return kernels.backward(saved, self.x[3], **given)
        moves = tuple(g[None] for g in self.x[4:])
        needs = (name != "ho",) * 3 + (True,)
        return kernels.second(saved, self.x[3], self.empty, moves, **given, needs=needs)


def milliseconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median by events, after two calls that are not counted."""
    call(), call()
    marks = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        marks.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks)


def kernel_milliseconds(passes: Passes, name: str, **tiles: Any) -> float:
    """Median of one kernel alone, timed around its launch."""
    launch, marks = kernels._launch, []

    def timed(which: str, *args: Any, **tensors: Any) -> None:
        if which != name:
            launch(which, *args, **tensors)
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(which, *args, **tensors)
        stop.record()
        marks.append((start, stop))

    kernels._launch = timed
    try:
        for _ in range(ROUNDS // 2 + 2):
            passes.run(name, **tiles)
        torch.cuda.synchronize()
    finally:
        kernels._launch = launch
    return statistics.median(a.elapsed_time(b) for a, b in marks[2:])


def show_times(case: Case, kind: str) -> dict[str, Any]:
    passes = Passes(case, kind)
    work = 2 * case.B * case.H * case.L**2 * case.d / 2  # operations of one product, the causal half
    rows, times = [], {}
    for name, count in PRODUCTS.items():
        times[name] = kernel_milliseconds(passes, name)
        rows.append((name, f"{times[name]:.3f}", short(count * work / times[name] / 1e9)))
    for name in ("forward", "backward", "second"):
        times[f"{name} pass"] = milliseconds(lambda n=name: passes.run(n))
        rows.append((f"{name} pass", f"{times[f'{name} pass']:.3f}", ""))
    for name, call in _others(passes.x).items():
        try:
            times[name] = milliseconds(call, 5)
        except torch.cuda.OutOfMemoryError:
            times[name] = float("nan")
        torch.cuda.empty_cache()
        rows.append((name, f"{times[name]:.3f}", ""))
    print(f"\n{case} {kind}, causal\n" + table(["", "ms", "TFLOP/s"], rows))
    return {"milliseconds": times}


def _others(x: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """PyTorch's fused attention, and plain attention with a double backward."""
    q, k, v, do = (t.detach().requires_grad_() for t in x[:4])

    def fused() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def twice(function: Callable[..., Tensor], **options: Any) -> Any:
        first = torch.autograd.grad(function(q, k, v, **options), (q, k, v), do, create_graph=True)
        return torch.autograd.grad(first, (q, k, v, do), x[4:])

    return {
        "PyTorch fused, forward": fused,
        "PyTorch fused, forward + backward": lambda: torch.autograd.grad(fused(), (q, k, v), do.detach()),
        "ours, all three": lambda: twice(attention, causal=True),
        "plain, all three": lambda: twice(plain),
    }


def show_tuning(case: Case, kind: str, names: Sequence[str]) -> dict[str, list]:
    """Milliseconds of every tile that fits, fastest first."""
    passes, found = Passes(case, kind), {}
    for name in names:
        shapes = [(b, a) for a, b in WIDE] if name in ("dkv", "hkv") else WIDE
        tried = []
        for rows, cols in shapes:
            for warps, stages in ((4, 1), (4, 2), (8, 2), (8, 3)):
                tile = Tile(rows, cols, warps, stages)
                if (warps, max(rows, cols)) in ((4, 128), (8, 32)):  # too few warps, or too many
                    continue
                try:
                    tried.append((kernel_milliseconds(passes, name, **{name: tile}), *tile))
                except Exception as error:  # a tile that does not fit is only left out
                    if not isinstance(
                        error, (RuntimeError, ValueError, UsageError)
                    ) and "Resources" not in repr(error):
                        raise
        found[name] = sorted(tried)
        rows_ = [(f"{ms:.3f}", *tile) for ms, *tile in found[name][:8]]
        print(
            f"\n{name}, {case} {kind}\n" + table(["ms", "rows", "cols", "warps", "stages"], rows_), flush=True
        )
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="try tiles for every kernel")
    parser.add_argument("--kernels", nargs="+", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--kinds", nargs="+", default=["tf32", "bf16"], choices=list(KINDS))
    parser.add_argument("--cases", nargs="+", default=CASES, type=_case, metavar="BxHxLxd")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/attention"), help="folder of the JSON")
    found = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    return found


def _case(text: str) -> Case:
    return Case(*map(int, text.split("x")))


if __name__ == "__main__":
    main()

"""Memory of attention's derivatives against the length, ours and PyTorch's plain attention, on a CPU.

    python benchmarks/attention_memory.py --out benchmarks/results/attention-memory

One head of width 32 in float32, causal. Memory is the most that tensors took at one time beyond what there
was before, by PyTorch's own record; plain attention stops where its scores would take more than `--limit`
bytes. The slope is that of log memory against log length over the last three lengths: 1 is linear, 2
quadratic.
"""

from __future__ import annotations

import argparse
import csv
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _timing import table
from torch import Tensor
from torch.func import jvp
from torch.profiler import ProfilerActivity, profile

from curvescope.nn.functional import RelativeBias, scaled_dot_product_attention

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
WIDTH = 32
COLORS = ("C0", "C2", "C1")
Function = Callable[..., Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with ALiBi, whose slope has a gradient."""
    length = q.shape[2]
    slope = torch.full((1, 1), 0.1, requires_grad=True)
    table = slope * torch.arange(1 - length, length)
    return scaled_dot_product_attention(q, k, v, is_causal=True, score_bias=RelativeBias(table))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch._scaled_dot_product_attention_math(q, k, v, None, 0.0, True)[0]  # pyright: ignore


def draw(length: int, seed: int) -> Tensor:
    return torch.randn(1, 1, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def backward(f: Function, x: list[Tensor], g: list[Tensor]) -> Any:
    x = [t.requires_grad_() for t in x]
    return torch.autograd.grad(f(*x), x, g[0])


def double_backward(f: Function, x: list[Tensor], g: list[Tensor]) -> Any:
    x = [t.requires_grad_() for t in x]
    return torch.autograd.grad(torch.autograd.grad(f(*x), x, g[0], create_graph=True), x, g)


def forward_mode(f: Function, x: list[Tensor], g: list[Tensor]) -> Any:
    return jvp(f, tuple(x), tuple(g))


def twice_forward(f: Function, x: list[Tensor], g: list[Tensor]) -> Any:
    return jvp(lambda *x: jvp(f, x, tuple(g))[1], tuple(x), tuple(g))


def reverse_of_forward(f: Function, x: list[Tensor], g: list[Tensor]) -> Any:
    x = [t.requires_grad_() for t in x]
    return torch.autograd.grad(jvp(f, tuple(x), tuple(g))[1], x, g[0])


DERIVATIVES = {
    "backward": backward,
    "double backward": double_backward,
    "jvp": forward_mode,
    "jvp of jvp": twice_forward,
    "backward of jvp": reverse_of_forward,
}
BIASED = "ours, ALiBi"
FUNCTIONS = {"ours": ours, BIASED: biased, "plain": plain}


def peak_bytes(call: Callable[..., Any], *args: Any) -> int:
    """The most that tensors took at one time, made during the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call(*args)
    recorder: Any = recorded.profiler
    held = peak = 0
    events = recorder.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def slope(rows: list[dict[str, Any]]) -> float:
    """Slope of log memory against log length, by least squares over the last three lengths."""
    points = [(math.log(row["length"]), math.log(row["bytes"])) for row in rows[-3:]]
    x, y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def figure(rows: list[dict[str, Any]], to: Path) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(DERIVATIVES), figsize=(3 * len(DERIVATIVES), 3), sharey=True)
    for ax, derivative in zip(axes, DERIVATIVES, strict=True):
        for (name, mark), color in zip({"ours": "o", BIASED: "s", "plain": "^"}.items(), COLORS, strict=True):
            some = [row for row in rows if row["derivative"] == derivative and row["function"] == name]
            if not some:
                continue
            label = f"{name} (slope {slope(some):.2f})"
            lengths, mebibytes = zip(*((r["length"], r["bytes"] / 2**20) for r in some), strict=True)
            look: dict[str, Any] = {"ls": "--", "mfc": "none", "ms": 11} if name == BIASED else {}
            ax.loglog(lengths, mebibytes, marker=mark, color=color, label=label, **look)
        ax.set(title=derivative, xlabel="length (tokens)")
        ax.legend(fontsize=7)
    axes[0].set_ylabel("peak memory (MiB)")
    fig.tight_layout()
    fig.savefig(to, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/attention-memory"))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--limit", type=int, default=1 << 27, help="bytes of the plain scores at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for derivative, call in DERIVATIVES.items():
        for name, function in FUNCTIONS.items():
            if name == BIASED and derivative != "double backward":
                continue
            for length in options.lengths:
                if name == "plain" and 4 * length * length > options.limit:
                    break
                x, g = ([draw(length, seed + 3 * i) for seed in range(3)] for i in (0, 1))
                peak = peak_bytes(call, function, x, g)
                rows.append({"derivative": derivative, "function": name, "length": length, "bytes": peak})
                print(*rows[-1].values(), flush=True)
                with (options.out / "memory.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0])
                    writer.writeheader()
                    writer.writerows(rows)
    figure(rows, options.out / "memory.png")
    print(table(["derivative", "function", "slope"], _slopes(rows)))
    print(f"torch {torch.__version__}, one thread of {platform.processor() or platform.machine()}")


def _slopes(rows: list[dict[str, Any]]) -> list[list[str]]:
    pairs = dict.fromkeys((row["derivative"], row["function"]) for row in rows)
    some = {pair: [r for r in rows if (r["derivative"], r["function"]) == pair] for pair in pairs}
    return [[d, f, f"{slope(some[d, f]):.2f}"] for d, f in pairs]


if __name__ == "__main__":
    main()

"""Compare closed forms with automatic differentiation: time, memory and agreement of exact Hessians.

One softmax head with the mean squared error, all blocks of W_Q, W_K, W_V, against `torch.func.hessian`,
`jacfwd(grad)` and the double backward of one gradient entry after the other; then whole networks against
`jacfwd(grad)`. Every number is a ratio within one run: the time of the other method divided by that of the
closed form.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from _timing import Ratio, arguments, interleave, peak_memory, relative_error, short, state, table, write
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd

import curvescope as cs
from curvescope.closed_form import attention
from curvescope.closed_form.network.from_model import stack_curvature
from curvescope.closed_form.objectives import squared_error

OURS, MATRIX = "blocks", "matrix"
OTHERS = {"hessian": "torch.func.hessian", "jacfwd": "jacfwd(grad)", "rows": "row by row"}
ASKED = {500: 10, 2000: 40}  # parameters, and how many times faster than torch.func.hessian


@dataclass(frozen=True)
class Case:
    """One head on L tokens of width d, with queries and keys of width k and values of width v."""

    L: int
    d: int
    k: int
    v: int
    dtype: str = "float64"

    @property
    def P(self) -> int:
        return self.d * (2 * self.k + self.v)


SMALL = [Case(L, 16, 8, 16) for L in (32, 64, 128)]
LARGE = [*(Case(L, 32, 16, 32) for L in (32, 64, 128)), Case(64, 64, 8, 16)]
SINGLE = [Case(64, 16, 8, 16, "float32"), Case(64, 32, 16, 32, "float32")]
NETWORKS = [
    {"n_layers": 1, "d_model": 8, "d_ff": 16, "n_ctx": 8, "vocab_size": 12},
    {"n_layers": 2, "d_model": 8, "d_ff": 16, "n_ctx": 16, "vocab_size": 12},
    {"n_layers": 1, "d_model": 16, "d_ff": 32, "n_ctx": 16, "vocab_size": 16},
]


class Head:
    """Return the head of a case at random weights, in the form that each method expects."""

    def __init__(self, case: Case, dtype: torch.dtype):
        self.case, source = case, torch.Generator().manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = scale * torch.randn(*shape, generator=source, dtype=torch.float64)
            return drawn.to(getattr(torch, case.dtype)).to(dtype)  # the same numbers in every dtype

        L, d, k, v = case.L, case.d, case.k, case.v
        self.X, self.Y = draw(L, d), draw(L, v)
        self.weights = [draw(d, n, scale=d**-0.5) for n in (k, k, v)]
        self.flat = torch.cat([W.flatten() for W in self.weights])

    def output(self, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
        A = torch.softmax((self.X @ W_Q) @ (self.X @ W_K).T / self.case.k**0.5, dim=-1)
        return A @ (self.X @ W_V)

    def loss(self, flat: Tensor) -> Tensor:
        parts = flat.split([W.numel() for W in self.weights])
        weights = [part.view(W.shape) for part, W in zip(parts, self.weights, strict=True)]
        return (self.output(*weights) - self.Y).square().mean()

    def curvature(self) -> attention.AttentionCurvature:
        return attention.curvature(self.X, *self.weights, *squared_error(self.output(*self.weights), self.Y))

    def row_by_row(self) -> Tensor:
        """Return the Hessian by double backward, one gradient entry after the other."""
        flat = self.flat.clone().requires_grad_()
        (first,) = torch.autograd.grad(self.loss(flat), flat, create_graph=True)
        units = torch.eye(len(flat), dtype=flat.dtype)
        return torch.stack([torch.autograd.grad(first, flat, unit, retain_graph=True)[0] for unit in units])

    def ways(self) -> dict[str, Any]:
        return {
            "rows": self.row_by_row,
            OURS: lambda: self.curvature().blocks(),
            MATRIX: lambda: self.curvature().hessian().matrix,
            "hessian": lambda: hessian(self.loss)(self.flat),
            "jacfwd": lambda: jacfwd(grad(self.loss))(self.flat),
        }


def joined(blocks: Any) -> Tensor:
    """Return blocks by pairs as one matrix."""
    rows = [[blocks[a, b].total.flatten(2).flatten(0, 1) for b in "QKV"] for a in "QKV"]
    return torch.cat([torch.cat(row, dim=1) for row in rows])


def measure_head(case: Case, *, rounds: int) -> dict[str, Any]:
    head = Head(case, getattr(torch, case.dtype))
    ways, memory, error, want = head.ways(), {}, {}, None
    if case.dtype != "float64":
        want = Head(case, torch.float64).row_by_row()
    for name, call in ways.items():
        result, memory[name] = peak_memory(call)
        want = result if want is None else want
        error[name] = relative_error(joined(result) if name == OURS else result, want)
        del result
    timing = interleave(ways, rounds=rounds, budget=6.0)
    faster = {name: timing.ratio(name, OURS) for name in OTHERS}
    matrix = timing.ratio("hessian", MATRIX)
    return asdict(case) | {
        "P": case.P, "faster": faster, "hessian_over_matrix": matrix, "memory_MB": memory, "error": error,
        "seconds": timing.seconds,
    }  # fmt: skip


def measure_network(sizes: dict[str, int], *, rounds: int) -> dict[str, Any]:
    module = cs.Transformer(cs.TransformerConfig(**sizes, n_heads=2, init="scaled")).double()
    source = torch.Generator().manual_seed(0)
    x, y = torch.randint(sizes["vocab_size"], (2, 1, sizes["n_ctx"]), generator=source)
    named = {name: p.detach() for name, p in module.named_parameters()}
    flat, lengths = torch.cat([p.flatten() for p in named.values()]), [p.numel() for p in named.values()]

    def loss(vector: Tensor) -> Tensor:
        parts = zip(named.items(), vector.split(lengths), strict=True)
        z = functional_call(module, {name: part.view(p.shape) for (name, p), part in parts}, (x,))
        return torch.nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())

    ways = {
        "assembly": lambda: stack_curvature(module, (x, y)).hessian(),
        "jacfwd": lambda: jacfwd(grad(loss))(flat),
    }
    ours, ours_MB = peak_memory(ways["assembly"])
    want, other_MB = peak_memory(ways["jacfwd"])
    timing = interleave(ways, rounds=rounds, budget=6.0)
    return sizes | {
        "P": len(flat), "faster": timing.ratio("jacfwd", "assembly"),
        "memory_MB": {"assembly": ours_MB, "jacfwd": other_MB},
        "error": relative_error(ours.to_dense(list(named)), want), "seconds": timing.seconds,
    }  # fmt: skip


def show_heads(results: list[dict[str, Any]]) -> None:
    head = ["P", "L", "d", "type", *(f"{title} ÷ blocks" for title in OTHERS.values())]
    head += ["torch.func.hessian ÷ matrix", "MB: blocks, " + ", ".join(OTHERS), "error"]
    rows = []
    for case in results:
        faster, memory = (case["faster"][name] for name in OTHERS), case["memory_MB"]
        needed = ", ".join(short(memory[name]) for name in (OURS, *OTHERS))
        error = f"{max(case['error'][name] for name in (OURS, MATRIX)):.0e}"
        sizes = (case[key] for key in ("P", "L", "d", "dtype"))
        rows.append([*sizes, *faster, case["hessian_over_matrix"], needed, error])
    print(table(head, rows))


def show_networks(results: list[dict[str, Any]]) -> None:
    head = ["P", "layers", "tokens", "d", "jacfwd(grad) ÷ assembly", "MB: assembly, jacfwd", "error"]
    rows = []
    for net in results:
        sizes = (net[key] for key in ("P", "n_layers", "n_ctx", "d_model"))
        needed = ", ".join(map(short, net["memory_MB"].values()))
        rows.append([*sizes, net["faster"], needed, f"{net['error']:.0e}"])
    print(table(head, rows))


def verdict(results: list[dict[str, Any]]) -> str:
    """Compare the measured factors with the required ones."""
    lines = []
    for size, factor in ASKED.items():
        cases = [c for c in results if abs(c["P"] - size) < 0.1 * size and c["dtype"] == "float64"]
        each = ", ".join(f"L={c['L']} d={c['d']}: {short(c['faster']['hessian'].median)}" for c in cases)
        lines.append(f"P≈{size}, at least {factor} times faster than torch.func.hessian: {each}")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]]) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
    for ax, factor, d in zip(axes, ASKED.values(), (16, 32), strict=True):
        cases = [c for c in results if c["d"] == d and c["dtype"] == "float64"]
        for name, title in OTHERS.items():
            ratios: list[Ratio] = [c["faster"][name] for c in cases]
            middle = [r.median for r in ratios]
            spread = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
            ax.errorbar([c["L"] for c in cases], middle, yerr=spread, marker="o", capsize=3, label=title)
        ax.axhline(factor, color="gray", lw=0.8, ls=":")
        ax.set(title=f"{cases[0]['P']} parameters, d = {d}", xlabel="tokens L", yscale="log", xscale="log")
        ax.set_xticks([c["L"] for c in cases], [str(c["L"]) for c in cases], minor=False)
        ax.minorticks_off()
    axes[0].set_ylabel("times longer than the closed form")
    axes[0].legend(frameon=False)
    return figure


def main() -> None:
    args = arguments(__doc__ or "", "closed_form")
    rounds = 3 if args.quick else 7
    cases = [SMALL[0], LARGE[0]] if args.quick else [*SMALL, *LARGE, *SINGLE]
    before = state()
    for call in Head(Case(4, 4, 2, 4), torch.float64).ways().values():
        call()  # torch loads modules at its first use, which no method should pay for
    heads = [measure_head(case, rounds=rounds) for case in cases]
    networks = [measure_network(s, rounds=rounds) for s in NETWORKS[: 1 if args.quick else None]]
    print(f"{before}; ratios: median over rounds (range)\n")
    show_heads(heads)
    print()
    show_networks(networks)
    print("\n" + verdict(heads))
    write(args.out, "closed_form", {"heads": heads, "networks": networks}, draw(heads))


if __name__ == "__main__":
    main()

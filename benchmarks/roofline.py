"""Lower bound of the cost of a product: the time of its matrix products, on operands of the same layout.

The script records sizes and strides of all matrix products that an eager gradient, one Hessian product and
one GGN product dispatch (`mm`, `addmm`, `bmm`, `baddbmm`, `mv`, `addmv`, also in place; PyTorch's fused
attention counts as one). It then runs only these products into existing memory, in turn with the full
gradient and the full products: once with separate operands (`apart`, which come from memory), once with
operands that products of one shape share (`near`, which are in the cache more often than in a real product).
No implementation with this library of matrix products can be faster than their time, in gradients of the same
rounds:

    bound = Σ_products t(product) / t(gradient)

`torch.profiler` shows the operations that take the remaining time of a product.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from _timing import interleave, machine, table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import curvescope as cs
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.engines.replay.cpu import WARM
from curvescope.studies.hvp.analysis import SHAPES, build, gradient

_aten: Any = torch.ops.aten
MATRICES = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.mv, _aten.addmv}
IN_PLACE = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm, _aten.addmv_: _aten.addmv}
TOKENS = {"small": (8, 128), "124M": (8, 1024)}
TOP = 12  # number of operations of a profile in the table


@dataclass(frozen=True)
class Multiplied:
    """One matrix product: the operation, its operands, and its number of floating-point operations."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flop: int

    def __str__(self) -> str:
        sizes = [f"{tuple(a.shape)}{_turned(a)}" for a in self.args if isinstance(a, Tensor)]
        return f"{self.op.overloadpacket.__name__} {' '.join(sizes)}"

    def again(self) -> Callable[[], Any]:
        """Return the isolated product: fresh operands of the same layout, and a preallocated result."""
        args = tuple(_fresh(a) if isinstance(a, Tensor) else a for a in self.args)
        if self.op.overloadpacket not in MATRICES:
            return partial(self.op, *args, **self.kwargs)
        into = self.op.overloadpacket.out
        return partial(into, *args, **self.kwargs, out=self.op(*args, **self.kwargs))


class ProductRecorder(TorchDispatchMode):
    """Mode that records the matrix products that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Multiplied] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = IN_PLACE.get(func.overloadpacket, func.overloadpacket)
        if packet in MATRICES or "scaled_dot_product" in str(func):
            arguments = tuple(_fresh(a) if isinstance(a, Tensor) else a for a in args)
            flop = _flop(packet, args, kwargs, result)
            self.found.append(
                Multiplied(func, arguments, {k: v for k, v in kwargs.items() if k != "out"}, flop)
            )
        return result


def written(call: Callable[[], Any]) -> list[Multiplied]:
    """Return the matrix products of a call."""
    with ProductRecorder() as writer:
        call()
    return writer.found


def alone(products: Sequence[Multiplied], *, shared: bool) -> Callable[[], None]:
    """Return calls of all products; with `shared`, products of one shape and layout share operands."""
    isolated_calls: dict[str, Callable[[], Any]] = {}
    calls = []
    for product in products:
        call = isolated_calls.get(str(product)) if shared else None
        call = product.again() if call is None else call
        isolated_calls[str(product)] = call
        calls.append(call)

    def work() -> None:
        with torch.no_grad():
            for call in calls:
                call()

    return work


def _fresh(t: Tensor) -> Tensor:
    """Return a copy with the same numbers, sizes and strides."""
    if not t.numel():
        return t.detach().clone()
    length = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.detach().as_strided((length,), (1,)).clone().as_strided(t.shape, t.stride(), 0)


def _turned(t: Tensor) -> str:
    """Return True if the last axis is not contiguous."""
    return "ᵀ" if t.ndim > 1 and t.stride(-1) != 1 and t.stride(-2) == 1 else ""


def _flop(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the number of additions and multiplications."""
    if packet in (_aten.mv, _aten.addmv):
        A = args[0] if packet is _aten.mv else args[1]
        return 2 * A.numel()
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    q, k = (args[1], args[2]) if "backward" in str(packet) else (args[0], args[1])
    product_flop = 2 * q.numel() * k.shape[-2]  # Q Kᵀ, and the same for P V; backward has five of them
    return (5 if "backward" in str(packet) else 2) * product_flop


def _waited(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return a call that waits for the device."""
    if device.type != "cuda":
        return call

    def work() -> None:
        call()
        torch.cuda.synchronize(device)

    return work


def _rate(device: torch.device, n: int = 2048) -> float:
    """Return the GFLOP/s of one large product of square matrices, the best of several."""
    A, B, C = (torch.randn(n, n, device=device) for _ in range(3))
    timing = interleave({"mm": _waited(partial(torch.mm, A, B, out=C), device)}, rounds=9, budget=5)
    return 2 * n**3 / min(timing.seconds["mm"]) / 1e9


def shares(call: Callable[[], Any]) -> list[tuple[str, float, int]]:
    """Return the operations of a call by their own time: name, share, number."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            call()
    rows = [(e.key, e.self_cpu_time_total, e.count // 5) for e in profiler.key_averages()]
    total = sum(t for _, t, _ in rows)
    return [(name, t / total, n) for name, t, n in sorted(rows, key=lambda row: -row[1])]


def _ratio(times: Sequence[float], references: Sequence[float]) -> str:
    """Format the ratio per round: the median, and the quartiles."""
    low, middle, high = quantiles([a / b for a, b in zip(times, references, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def main() -> None:
    """Record the products, time them in turn, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="small", choices=list(TOKENS), help="of the GPT-2")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument("--rounds", type=int, default=15, help="how often each is timed, in turn")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    torch.manual_seed(0)
    with device:
        module = build("gpt2", given.size, 1024).eval()
    x, y = (
        torch.randint(SHAPES[given.size][3], TOKENS[given.size], generator=generator(0, i)).to(device)
        for i in (0, 1)
    )
    problem = cs.Problem(cs.load(module), Batches([Batch(x, y)]))
    operators = {
        "Hessian": cs.Hessian(problem, engine="fast"),
        "GGN": cs.GGN(problem, engine="fast"),
    }
    v = torch.randn(operators["GGN"].shape[0], generator=generator(0, 2)).to(device)
    wholes: dict[str, Callable[[], Any]] = {"gradient": partial(gradient(module, x, y).times, ())}
    wholes |= {name: partial(op.__matmul__, v) for name, op in operators.items()}
    with ExitStack() as opened:
        for op in operators.values():
            opened.enter_context(op.frozen())
        lists = {}
        for name, call in wholes.items():
            call()  # graphs are built
            lists[name] = written(call)
            for _ in range(WARM + 2):  # the engine records its replay in these calls
                call()
        bare = {
            f"{name}, {how}": alone(products_of_list, shared=how == "near")
            for name, products_of_list in lists.items()
            for how in ("apart", "near")
        }
        both = {name: _waited(call, device) for name, call in (wholes | bare).items()}
        for call in both.values():
            call()
        quiet = (
            device.type == "cpu" and given.threads == 1
        )  # excludes the time of other processes on the core
        clock = time.process_time if quiet else time.perf_counter
        timing = interleave(both, rounds=given.rounds, budget=600, clock=clock)
        profiles = {name: shares(call) for name, call in wholes.items()} if device.type == "cpu" else {}
    _show(lists, timing.seconds, _rate(device), profiles)


def _largest(products: Sequence[Multiplied]) -> list[list[Any]]:
    """Group the products by shape and layout: number, arithmetic, and rate when repeated."""
    kinds = Counter(str(p) for p in products)
    by_name = {str(p): p for p in products}
    most = sorted(kinds, key=lambda kind: -kinds[kind] * by_name[kind].flop)[:TOP]
    device = next(a.device for a in products[0].args if isinstance(a, Tensor))
    timing = interleave({kind: _waited(by_name[kind].again(), device) for kind in most}, rounds=9)
    rates = {kind: by_name[kind].flop / min(timing.seconds[kind]) / 1e9 for kind in most}
    return [[k, kinds[k], f"{kinds[k] * by_name[k].flop / 1e9:.3f}", f"{rates[k]:.0f}"] for k in most]


def _show(
    lists: dict[str, list[Multiplied]],
    seconds: dict[str, list[float]],
    rate: float,
    profiles: dict[str, list[tuple[str, float, int]]],
) -> None:
    """Return the tables of a page."""
    info = machine()
    print(
        f"torch {info['torch']}, Python {info['python']}, {info['threads']} threads, load {info['load'][0]}"
    )
    unit = seconds["gradient"]
    print(f"one large product of square matrices: {rate:.0f} GFLOP/s")
    print(f"gradient: {median(unit) * 1e3:.1f} ms, {min(unit) * 1e3:.1f} at best\n")
    rows = []
    for name, products in lists.items():
        whole, apart, near = (seconds[key] for key in (name, f"{name}, apart", f"{name}, near"))
        flop = sum(p.flop for p in products)
        fastest = [f"{min(some) / min(unit):.2f}" for some in (near, apart, whole)]
        rows.append(
            [
                name,
                len(products),
                f"{flop / 1e9:.2f}",
                f"{flop / median(near) / 1e9:.0f}, {flop / median(apart) / 1e9:.0f}",
                _ratio(near, unit),
                _ratio(apart, unit),
                _ratio(whole, unit),
                ", ".join(fastest),
                _ratio(apart, whole),
            ]
        )
    head = ["", "matrix products", "GFLOP", "GFLOP/s near, apart", "near, gradients", "apart, gradients"]
    head += ["whole, gradients", "all three, fastest rounds", "apart / whole"]
    print(table(head, rows))
    for name, products in lists.items():
        print(f"\n{name}: the largest by arithmetic\n")
        print(table(["product", "times", "GFLOP in all", "GFLOP/s alone"], _largest(products)))
    for name, found in profiles.items():
        print(f"\n{name}: operations by their own time\n")
        rows = [[op, f"{100 * share:.1f} %", times] for op, share, times in found[:TOP]]
        print(table(["operation", "share", "times"], rows))


if __name__ == "__main__":
    sys.exit(main())

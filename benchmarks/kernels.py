"""Compare norms, activations and the head with its loss with PyTorch's own, through two derivatives.

The script times four stages of each function: forward; the graph of its gradients, made once per batch (a
forward and a backward with create_graph); and what a Hessian-vector product repeats for every direction, the
second backward and a plain backward through the retained graph (which the head with its loss does not need).
On CUDA the shapes are those of a GPT-2 with 124 M parameters at 8 × 1024 tokens, on a CPU 1024 tokens of
width 128. Errors are relative to PyTorch's own in float64. A call through autograd takes about a tenth of a
millisecond to issue, which short kernels on CUDA do not hide.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _timing import arguments, interleave, machine, short, state, table
from torch import Tensor

from curvescope.kernels.activations import gelu
from curvescope.kernels.activations.gated import gated
from curvescope.kernels.cross_entropy import cross_entropy_head
from curvescope.kernels.norms import layer_norm, rms_norm

STAGES = ("forward", "graph", "backward", "second")


class Sizes(NamedTuple):
    T: int
    d: int
    d_ff: int
    V: int


class Case(NamedTuple):
    """A function in two versions, and the shapes of its inputs."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]


def cases(s: Sizes, device: str) -> dict[str, Case]:
    y = torch.randint(s.V, (s.T,), generator=torch.Generator().manual_seed(1)).to(device)
    wide = (s.T, s.d_ff)

    def plain_head(h: Tensor, W: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, W), y, reduction="sum")

    return {
        "layer_norm": Case(
            layer_norm, lambda x, w, b: F.layer_norm(x, (s.d,), w, b), ((s.T, s.d), (s.d,), (s.d,))
        ),
        "rms_norm": Case(
            lambda x, w: rms_norm(x, w, 1e-6),
            lambda x, w: F.rms_norm(x, (s.d,), w, 1e-6),
            ((s.T, s.d), (s.d,)),
        ),
        "gelu": Case(gelu, F.gelu, (wide,)),
        "gelu_tanh": Case(lambda x: gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), (wide,)),
        "swiglu": Case(lambda a, b: gated(a, b, "silu"), lambda a, b: F.silu(a) * b, (wide, wide)),
        "head": Case(lambda h, W: cross_entropy_head(h, W, None, y), plain_head, ((s.T, s.d), (s.V, s.d))),
    }


class Graph:
    """One version of a case with its inputs, its gradients and a direction; a stage is a method."""

    def __init__(self, f: Callable[..., Tensor], shapes: Any, device: str, dtype: torch.dtype):
        source = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source).to(device, dtype)

        self.f, self.inputs = f, [draw(*shape).requires_grad_() for shape in shapes]
        self.y = f(*self.inputs)
        self.g = draw(*self.y.shape).requires_grad_() if self.y.ndim else self.y.new_ones(())
        self.first = torch.autograd.grad(self.y, self.inputs, self.g, create_graph=True)
        self.directions = [draw(*shape) for shape in shapes]
        self.leaves = [self.g, *self.inputs] if self.y.ndim else self.inputs

    def forward(self) -> Any:
        return self.f(*self.inputs)

    def graph(self) -> Any:
        return torch.autograd.grad(self.f(*self.inputs), self.inputs, self.g, create_graph=True)

    def backward(self) -> Any:
        return torch.autograd.grad(self.y, self.inputs, self.g, retain_graph=True)

    def second(self) -> Any:
        return torch.autograd.grad(
            self.first, self.leaves, self.directions, retain_graph=True, allow_unused=True
        )

    def everything(self) -> list[Tensor | None]:
        return [None if t is None else t.detach() for t in (self.y, *self.first, *self.second())]


def relative_errors(actual: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """Return the largest ‖a − b‖/‖b‖ of the pairs; a missing tensor counts as zero."""
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if a is not None and b is not None]
    return max(
        float((a.detach().double() - b.detach()).norm() / (b.detach().norm() + 1e-300)) for a, b in pairs
    )


def timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds per call; on CUDA by events around ten calls."""
    for call in calls.values():
        call()
    if device == "cpu":
        samples = interleave(calls, rounds=rounds).seconds
        return {name: 1e3 * statistics.median(seconds) for name, seconds in samples.items()}
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                call()
            end.record()
            torch.cuda.synchronize()
            samples[name].append(start.elapsed_time(end) / 10)
    return {name: statistics.median(ms) for name, ms in samples.items()}


def run(case: Case, device: str, rounds: int) -> dict[str, Any]:
    ours, torchs = (Graph(f, case.shapes, device, torch.float32) for f in (case.ours, case.torchs))
    exact = Graph(case.torchs, case.shapes, device, torch.float64).everything()
    result: dict[str, Any] = {
        "error": relative_errors(ours.everything(), exact),
        "torch_error": relative_errors(torchs.everything(), exact),
    }
    del exact
    for stage in STAGES if ours.y.ndim else ("forward", "graph", "second"):
        calls = {"ours": getattr(ours, stage), "torch": getattr(torchs, stage)}
        with torch.set_grad_enabled(stage != "forward"):
            result[stage] = timed(calls, device, rounds)
        result[stage]["times_faster"] = result[stage]["torch"] / result[stage]["ours"]
    return result


def _cell(result: dict[str, float] | None) -> str:
    if result is None:
        return "–"
    return f"{result['ours']:.3f} / {result['torch']:.3f} = {short(result['times_faster'])}×"


def main() -> None:
    args = arguments(__doc__ or "", "kernels")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = Sizes(8192, 768, 3072, 50257) if device == "cuda" else Sizes(1024, 128, 512, 1024)
    rounds = 3 if args.quick else 15
    results = {name: run(case, device, rounds) for name, case in cases(sizes, device).items()}
    rows = [
        [name, *(_cell(r.get(stage)) for stage in STAGES), f"{r['error']:.0e} / {r['torch_error']:.0e}"]
        for name, r in results.items()
    ]
    print(f"{device}, {state()}, {sizes}; milliseconds, ours / torch = times faster\n")
    print(table(["", *STAGES, "error"], rows))
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), "device": device, "sizes": sizes._asdict(), **results}, indent=1)
    (args.out / "kernels.json").write_text(text + "\n")
    print(f"{args.out}/kernels.json", file=sys.stderr)


if __name__ == "__main__":
    main()

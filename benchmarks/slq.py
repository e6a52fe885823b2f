"""Spectral densities of language models on a GPU: time of the products and of the Lanczos basis.

    python benchmarks/slq.py 124M 1.5B projection --out benchmarks/results/slq-h200
    python benchmarks/slq.py --device cpu --small

`124M`: GPT-2, 8 × 1024 tokens, 10 probes × 100 steps. `1.5B`: GPT-2 XL, 1 × 1024 tokens, 1 probe × 40 steps,
whose basis exceeds GPU memory, so part of it is in host memory. Weights are random, products in TF32.
`projection`: one pass of Gram–Schmidt alone, in bytes of the basis for each second, in Triton and in PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _timing import table
from torch import Tensor

import curvescope as cs
from curvescope.algorithms import spectral_density, vectors
from curvescope.algorithms.checks import GIB
from curvescope.algorithms.spectra.krylov import Recurrence
from curvescope.kernels import projection
from curvescope.runs.folder import environment
from curvescope.studies.hvp.analysis import GPT2


@dataclass(frozen=True)
class Case:
    """A model and the settings of its density."""

    shape: tuple[int, int, int, int]  # layers, width, heads, vocabulary
    batch_size: int
    seq_len: int
    num_probes: int
    num_steps: int


CASES = {
    "124M": Case((12, 768, 12, 50257), 8, 1024, 10, 100),
    "1.5B": Case((48, 1600, 25, 50257), 1, 1024, 1, 40),
}
SMALL = {  # tiny models that use the same code paths in seconds
    "124M": Case((2, 64, 2, 512), 2, 32, 2, 12),
    "1.5B": Case((2, 64, 2, 512), 1, 32, 1, 12),
}
ROWS = (1, 8, 25, 50, 100)  # of a basis, in `projection`
HEAD = ["case", "n", "probes × steps", "s", "s in products", "ms a step beside them", "passes a step"]
HEAD += ["overlap", "extremes", "device GiB", "host GiB"]


class Meter:
    """Seconds outside the products, passes over the bases, and their host memory."""

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.steps, self.passes, self.host = device, 0.0, 0, 0, 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Measure every step of a Lanczos recurrence in this block."""
        original = Recurrence.advance

        def advance(recurrence: Recurrence, product: Tensor) -> None:
            wait(self.device)
            start, before = time.perf_counter(), recurrence.num_passes
            original(recurrence, product)
            wait(self.device)
            self.seconds += time.perf_counter() - start
            self.steps += product.shape[1]
            self.passes += recurrence.num_passes - before
            self.host = max(self.host, sum(far.num_bytes for far in recurrence.far))

        with mock.patch.object(Recurrence, "advance", advance):
            yield


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def density(case: Case, given: argparse.Namespace, *, host: bool) -> dict[str, Any]:
    """Measure one density, from the first product to the result, after a product that compiles."""
    device = torch.device(given.device)
    torch.manual_seed(0)
    with device:
        module = GPT2(*case.shape, case.seq_len).eval()
        x, y = torch.randint(case.shape[3], (2, case.batch_size, case.seq_len))
    H = cs.Hessian(cs.Problem(cs.load(module), [(x, y)]), checkpoint=given.checkpoint and host)
    probe = torch.ones(H.shape[0], device=device)
    _ = H @ probe
    del _, probe
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    meter = Meter(device)
    options: dict[str, Any] = {"max_gib": given.max_gib}
    if host and (given.small or given.basis):
        options["basis"] = given.basis or "host"
    wait(device)
    start = time.perf_counter()
    with meter.looking():
        result = spectral_density(H, num_probes=case.num_probes, num_steps=case.num_steps, **options)
    wait(device)
    seconds = time.perf_counter() - start
    return {
        "n": H.shape[0],
        "num_probes": case.num_probes,
        "num_steps": case.num_steps,
        "seconds": seconds,
        "seconds_in_products": seconds - meter.seconds,
        "ms_beside_products_per_step": 1e3 * meter.seconds / meter.steps,
        "passes_per_step": meter.passes / meter.steps,
        "orthogonality": result.orthogonality,
        "extremes": result.extremes.tolist(),
        "device_gib": torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None,
        "host_gib": meter.host / GIB,
        "checkpoint": bool(given.checkpoint and host),
    }


def passes(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the bytes of a basis per second of one pass over it."""
    device, n = torch.device(given.device), 2**16 + 48 if given.small else 124_439_808
    rows = torch.randn(max(ROWS), n, device=device).div_(n**0.5)
    w, out, times = torch.randn(n, device=device), torch.empty(n, device=device), []
    for m in ROWS:
        c = torch.zeros(m, dtype=torch.float64, device=device)

        def one(m: int = m, c: Tensor = c) -> None:
            vectors._subtract(rows[:m], c, w, out, exact=False)

        line = {"rows": m, "gb_per_s": m * n * 4e-9 / best(one, device)}
        with mock.patch.object(projection, "in_triton", return_value=False):
            line["gb_per_s_in_torch"] = m * n * 4e-9 / best(one, device)
        times.append(line)
    return times


def best(call: Callable[[], None], device: torch.device, rounds: int = 7) -> float:
    """Return the seconds of the fastest call, after two warm-up calls."""
    seconds = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[2:])


def line(name: str, result: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    low, high = result["extremes"]
    device = "–" if result["device_gib"] is None else f"{result['device_gib']:.1f}"
    return [
        name,
        f"{result['n']:,}",
        f"{result['num_probes']} × {result['num_steps']}",
        f"{result['seconds']:.1f}",
        f"{result['seconds_in_products']:.1f}",
        f"{result['ms_beside_products_per_step']:.1f}",
        f"{result['passes_per_step']:.2f}",
        f"{result['orthogonality']:.1g}",
        f"{low:.4g} to {high:.4g}",
        device,
        f"{result['host_gib']:.1f}",
    ]


def main() -> None:
    """Run the chosen cases, and write slq.json and slq.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help="of 124M, 1.5B, projection; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--checkpoint", action="store_true", help="for 1.5B: less memory, longer products")
    parser.add_argument("--basis", choices=["auto", "device", "host"], help="for 1.5B; default: auto")
    parser.add_argument("--max-gib", type=float, help="memory of the device for bases")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/slq"), help="folder of the results")
    given = parser.parse_args()
    names = given.cases or [*CASES, "projection"]
    if unknown := set(names) - {*CASES, "projection"}:
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known: {', '.join(CASES)}, projection")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"environment": environment(), "small": given.small}
    rows, text = [], ""
    for name in names:
        if name == "projection":
            results[name] = passes(given)
            speeds = [[f"{x:.0f}" for x in speed.values()] for speed in results[name]]
            text = "\n\n" + table(["rows", "GB/s", "GB/s in PyTorch"], speeds)
        else:
            results[name] = density((SMALL if given.small else CASES)[name], given, host=name == "1.5B")
            rows.append(line(name, results[name]))
        shown = (table(HEAD, rows) if rows else "") + text + "\n"
        (given.out / "slq.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        (given.out / "slq.md").write_text(shown.lstrip(), encoding="utf-8")
        print(f"\n{name}\n{shown}", flush=True)
    print(given.out, flush=True)


if __name__ == "__main__":
    sys.exit(main())

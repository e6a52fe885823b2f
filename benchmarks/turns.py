"""Compare the time of the same work in two source trees of curvescope, in turns, on a CPU.

    python benchmarks/turns.py OLD_TREE NEW_TREE [--rounds 9]

Each tree has a process of its own, which loads everything once. The processes take turns with one piece of
work after the other. The script prints the median of the ratios new/old with the range of its quarters. It
measures processor time, so that other processes disturb it little; run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WARM = 32  # products before timing, so that they are recorded
FROZEN = 8  # products in one frozen block


def works() -> dict[str, Callable[[], object]]:
    """Return products and algorithms on a GPT-2 of a million parameters."""
    sys.path.remove(str(Path(__file__).parent))  # transformers must not import `kernels.py` of this folder
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import curvescope as cs

    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1024, n_positions=128))
    tokens = torch.randint(0, 1024, (2, 8, 128))
    problem = cs.Problem(cs.load(module), (tokens[0], tokens[1]))
    table: dict[str, Callable[[], object]] = {}
    for name, make in {
        "Hessian": cs.Hessian,
        "GGN": cs.GGN,
        "functional Hessian": _named(cs, "FunctionalHessian", "Functional"),
    }.items():
        op = make(problem)
        v = torch.randn(op.shape[0])
        table[f"{name} @ v"] = lambda op=op, v=v: op @ v
        table[f"{name} @ v, {FROZEN} times frozen"] = lambda op=op, v=v: _frozen_products(op, v)
    small = cs.Problem(cs.load(module), (tokens[0][:2, :32], tokens[1][:2, :32]))
    H = cs.Hessian(small)
    table["eigsh, two values"] = lambda: cs.eigsh(H, k=2, tol=1e-2)
    table["density, 2 × 20 steps"] = lambda: cs.spectral_density(H, num_probes=2, num_steps=20)
    table["trace, 20 probes"] = lambda: cs.trace(H, num_probes=20)
    return table


def _named(owner: Any, *names: str) -> Any:
    """Return the first of these attributes that exists, because older trees have other names."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


def _frozen_products(op: Any, v: Any) -> None:
    """Compute several products of a model that is declared constant."""
    with _named(op, "frozen", "steady")():
        for _ in range(FROZEN):
            op @ v


def serve() -> None:
    """Read names of works from standard input, and print the processor seconds of each."""
    table = works()
    for name, work in table.items():
        for _ in range(WARM if "@" in name else 2):
            work()
    print("\t".join(table), flush=True)
    for line in sys.stdin:
        work = table[line.rstrip("\n")]
        start = time.process_time()
        work()
        print(time.process_time() - start, flush=True)


class Tree:
    """A process with one source tree, and the names of its works."""

    def __init__(self, path: Path):
        where = {"PYTHONPATH": f"{path.resolve() / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], env=os.environ | where, **pipes
        )
        self.names = self._line().split("\t")

    def seconds(self, name: str) -> float:
        """Return the processor seconds of one piece of work."""
        print(name, file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


def main() -> None:
    """Start both processes, run them in turns, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs=2, type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    old, new = map(Tree, args.trees)
    print("| work | new / old | quarters |\n|---|---|---|")
    for name in old.names:
        ratios = []
        for turn in range(args.rounds):
            seconds = {tree: tree.seconds(name) for tree in ((old, new) if turn % 2 else (new, old))}
            ratios.append(seconds[new] / seconds[old])
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        print(f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)
    for tree in (old, new):
        tree.process.kill()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()

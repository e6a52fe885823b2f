"""What an exact product costs, against other libraries: the study `hvp` in the settings that we publish.

On a CPU: a GPT-2 of about a million parameters, 8 × 128 tokens. On CUDA: GPT-2 124M, Llama and NeoX of the
same size, 8 × 1024 tokens in TF32; the same without TF32; contexts of 8,192 and 32,768 tokens. Times are in
gradients of the same run. On a CPU, whose clock wanders, some contenders also take turns with our Hessian
product, and their ratios are printed. The other libraries are optional: `make peers` installs them.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from curvescope.runs.folder import environment
from curvescope.runs.writing import write_figures, write_tables
from curvescope.studies import hvp
from curvescope.studies.hvp.contenders import CONTENDERS, PACKAGES
from curvescope.studies.hvp.models import SHAPES, build

OURS = ("hessian", "ggn", "functional")
PEERS = ("eigenthings", "eigenthings ggn", "curvlinops", "curvlinops ggn", "PyHessian")
COMPILED = ("curvlinops compiled", "curvlinops ggn compiled", "compiled jvp(grad)")
CPU: dict[str, dict[str, Any]] = {
    "cpu-small": {"contenders": (*OURS, "hessian autograd", *PEERS, *COMPILED)},
}
BIG: dict[str, Any] = {"size": "124M", "seq_len": 1024, "device": "cuda", "tf32": True}
CUDA: dict[str, dict[str, Any]] = {
    "gpt2": {**BIG, "contenders": (*OURS, *PEERS), "slq": True},
    "gpt2-float32": {**BIG, "batch_size": 4, "tf32": False, "contenders": (*OURS, "eigenthings")},
    "gpt2-8192": {**BIG, "batch_size": 1, "seq_len": 8192, "contenders": (*OURS, "eigenthings"), "rounds": 3},
    "gpt2-32768": {**BIG, "batch_size": 1, "seq_len": 32768, "contenders": ("hessian", "ggn"), "rounds": 2},
    "llama": {**BIG, "model": "llama", "contenders": (*OURS, "eigenthings")},
    "neox": {**BIG, "model": "neox", "contenders": (*OURS, "eigenthings")},
    "gpt2-compiled": {**BIG, "contenders": ("hessian", *COMPILED)},
}


TURNS = ("hessian", "ggn", "double backward", "eigenthings", "compiled jvp(grad)")
ROUNDS = 15


def take_turns(cfg: hvp.Config) -> list[dict[str, Any]]:
    """How many times faster our Hessian product is, round by round: median and range without the extremes."""
    torch.manual_seed(cfg.seed)
    module = build(cfg.model, cfg.size, cfg.seq_len).eval()
    x, y = torch.randint(SHAPES[cfg.size][3], (2, cfg.batch_size, cfg.seq_len))
    there = [name for name in TURNS if name not in PACKAGES or find_spec(PACKAGES[name])]
    products = {name: CONTENDERS[name](module, x, y) for name in there}
    tree = [torch.randn(p.shape) for p in module.parameters()]
    given = {name: product.enter(tree) for name, product in products.items()}
    seconds: dict[str, list[float]] = {name: [] for name in there}
    for number in range(-4, ROUNDS):  # the first ones compile and record
        for name in there:
            start = time.perf_counter()
            products[name].times(given[name])
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    rows = []
    for name in there:
        ratios = sorted(a / b for a, b in zip(seconds[name], seconds["hessian"], strict=True))
        rows.append({"contender": name, "ratio": median(ratios), "low": ratios[1], "high": ratios[-2]})
    return rows


def main() -> None:
    """Run the cases that are asked for and write a folder for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join([*CPU, *CUDA])}; default: the device's")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/hvp"), help="folder of the results")
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    all_cases = CPU | CUDA
    for name in given.cases or (CUDA if torch.cuda.is_available() else CPU):
        if name not in all_cases:
            parser.error(f"unknown case {name!r}; known: {', '.join(all_cases)}")
        found = hvp.run(hvp.Config.from_dict(all_cases[name]))
        folder = given.out / name
        found.save(folder)
        write_tables(found, folder)
        write_figures(found, folder)
        print(f"\n{name}: {environment()['torch']}, {folder}", flush=True)
        for label, value, words in found.summary():
            print(f"  {label:22s} {value:>8s}  {words}", flush=True)
        if name in CPU:
            turns = pd.DataFrame(take_turns(hvp.Config.from_dict(all_cases[name])))
            turns.to_csv(folder / "turns.csv", index=False)
            print("\nTaking turns, in our Hessian products:\n" + turns.to_string(index=False), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Cost of exact products compared with other libraries: the study `hvp` with the published settings.

On a CPU: a GPT-2 of about a million parameters, 8 × 128 tokens. On CUDA: GPT-2 124M, Llama and NeoX of the
same size, 8 × 1024 tokens in TF32, the first with 2, 4 and 8 columns too; the same without TF32; contexts
of 8,192 and 32,768 tokens; GPT-2 of 350 M and 1.5 B parameters; the shape of Llama 3 8B with weights in
bfloat16. Times are in gradients of the same run. On a CPU, whose clock rate varies, some contenders also take
turns with our Hessian product, and the script prints their ratios. The other libraries are optional:
`make peers` installs them.

A case prints one line per contender as soon as it is measured or has failed. `--record` writes the figures of
all cases into the package (`src/curvescope/studies/hvp/figures.json`). Later runs on a device of the same
name compare with them.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from curvescope.core.result import Result
from curvescope.runs.disk.atomic_files import write_figures, write_tables
from curvescope.runs.folder import environment
from curvescope.runs.resumable_loop import PieceStore
from curvescope.runs.verification.checks import Verification
from curvescope.studies import hvp
from curvescope.studies.hvp import study
from curvescope.studies.hvp.analysis import CONTENDERS, PACKAGES, SHAPES, build

OURS = ("hessian", "ggn", "functional")
PEERS = ("eigenthings", "eigenthings ggn", "curvlinops", "curvlinops ggn", "PyHessian")
CHECKPOINT = ("hessian checkpoint", "ggn checkpoint")
COMPILED = ("curvlinops compiled", "curvlinops ggn compiled", "compiled jvp(grad)")
CPU: dict[str, dict[str, Any]] = {
    "cpu-small": {"contenders": (*OURS, "hessian autograd", *PEERS, *COMPILED)},
}
BIG: dict[str, Any] = {"size": "124M", "seq_len": 1024, "device": "cuda", "tf32": True}
ONE: dict[str, Any] = {**BIG, "batch_size": 1}
XL: dict[str, Any] = {"size": "1.5B", "contenders": ("hessian", "ggn", *CHECKPOINT), "rounds": 4}
CUDA: dict[str, dict[str, Any]] = {
    "gpt2": {**BIG, "contenders": (*OURS, *CHECKPOINT, *PEERS), "columns": (1, 2, 4, 8)},
    "gpt2-float32": {**BIG, "batch_size": 4, "tf32": False, "contenders": (*OURS, "eigenthings")},
    "gpt2-8192": {**ONE, "seq_len": 8192, "contenders": (*OURS, "eigenthings"), "rounds": 3},
    "gpt2-32768": {**ONE, "seq_len": 32768, "contenders": ("hessian", "ggn", *CHECKPOINT), "rounds": 2},
    "llama": {**BIG, "model": "llama", "contenders": (*OURS, "eigenthings")},
    "neox": {**BIG, "model": "neox", "contenders": (*OURS, "eigenthings")},
    "gpt2-350M": {**ONE, "size": "350M", "contenders": ("hessian", "ggn", *CHECKPOINT, "eigenthings")},
    "gpt2-xl": {**ONE, **XL},
    "gpt2-xl-4": {**BIG, **XL, "batch_size": 4},
    "llama-8b": {
        **ONE,
        "model": "llama",
        "size": "8B",
        "seq_len": 512,
        "contenders": CHECKPOINT,
        "rounds": 3,
    },
    "gpt2-compiled": {**BIG, "contenders": ("hessian", *COMPILED)},
}


class PrintedState(PieceStore):
    """State of a study that prints messages immediately and stores nothing."""

    def at(self, contents: str, names: Sequence[str] = ()) -> MutableMapping[str, Result]:
        return {}

    def tell(self, line: str) -> None:
        print(f"  {line}", flush=True)

    def warn(self, line: str) -> None:
        print(f"  WARNING: {line}", flush=True)

    def verified(self, verification: Verification) -> None:
        """Skip the verification."""


TURNS = ("hessian", "ggn", "double backward", "eigenthings", "compiled jvp(grad)")
ROUNDS = 15


def take_turns(cfg: hvp.Config) -> list[dict[str, Any]]:
    """Return the speedup of our Hessian product per round: median and range without the extremes."""
    torch.manual_seed(cfg.seed)
    module = build(cfg.model, cfg.size, cfg.seq_len).eval()
    x, y = torch.randint(SHAPES[cfg.size][3], (2, cfg.batch_size, cfg.seq_len))
    installed = [name for name in TURNS if name not in PACKAGES or find_spec(PACKAGES[name])]
    products = {name: CONTENDERS[name](module, x, y) for name in installed}
    tree = [torch.randn(p.shape) for p in module.parameters()]
    given = {name: product.enter(tree) for name, product in products.items()}
    seconds: dict[str, list[float]] = {name: [] for name in installed}
    for number in range(-4, ROUNDS):  # the first ones compile and record
        for name in installed:
            start = time.perf_counter()
            products[name].times(given[name])
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    rows = []
    for name in installed:
        ratios = sorted(a / b for a, b in zip(seconds[name], seconds["hessian"], strict=True))
        rows.append({"contender": name, "ratio": median(ratios), "low": ratios[1], "high": ratios[-2]})
    return rows


def measure(name: str, folder: Path, *, record: bool) -> None:
    """Run one case, write its folder and print its summary; with --record store its figures."""
    cfg = hvp.Config.from_dict((CPU | CUDA)[name])
    print(f"\n{name}: torch {environment()['torch']}, {folder}", flush=True)
    result = hvp.run(cfg, state=PrintedState())
    result.save(folder)
    write_tables(result, folder)
    print("in short:", flush=True)
    for label, value, words in result.summary():
        print(f"  {label:22s} {value:>8s}  {words}", flush=True)
    for note in result.notes:
        print(f"  note: {note}", flush=True)
    if record:
        count = study.record(result, torch.__version__)
        print(f"  {count} figures are in {study.FILE.name} now", flush=True)
    write_figures(result, folder)
    if name in CPU:
        turns = pd.DataFrame(take_turns(cfg))
        turns.to_csv(folder / "turns.csv", index=False)
        print("\nTaking turns, in our Hessian products:\n" + turns.to_string(index=False), flush=True)


def main() -> int:
    """Run the chosen cases; a failing case does not stop the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join([*CPU, *CUDA])}; default: the device's")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/hvp"), help="folder of the results")
    parser.add_argument("--threads", type=int, default=2, help="of torch on the CPU")
    parser.add_argument("--record", action="store_true", help="write the figures into the package's file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    names = given.cases or list(CUDA if torch.cuda.is_available() else CPU)
    for name in names:
        if name not in CPU | CUDA:
            parser.error(f"unknown case {name!r}; known: {', '.join([*CPU, *CUDA])}")
    failed = 0
    for name in names:
        try:
            measure(name, given.out / name, record=given.record)
        except Exception:
            traceback.print_exc()
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())

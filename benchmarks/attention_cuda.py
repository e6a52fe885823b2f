"""Time and memory of attention on a card, in one run: ours beside PyTorch's and jvp-flash-attention.

    python benchmarks/attention_cuda.py --out FOLDER --minutes 3.2

Sixteen processes compile every kernel. Then one process measures the cells of the study `attention`, the most
important first, and is started again behind a cell that ends it. FOLDER gets cells.jsonl, a line for each
measurement, and report.md. `--read FOLDER` makes tables and figures from that file, on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from curvescope.studies.attention.contenders import (
    COMPILED,
    CONTENDERS,
    DERIVATIVES,
    MATH,
    absent,
    computation,
    draw,
)
from curvescope.studies.attention.cost import Cost, Timed
from curvescope.studies.attention.study import DTYPES, MASKS, AttentionBench, CellShape, Clock, Config

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPILED_LENGTHS = (512, 4096)
WIDTHS = (64, 32, 128)
TOKENS, MOST_HEADS = 65536, 256
SERVE_ALL = (512, 8192)  # Triton compiles anew only where 16 divides the number of heads, or does not
JOBS, JOB_SECONDS = 16, 75
WRITING = 5  # seconds for the report


def place(length: int, width: int, mask: str) -> CellShape:
    return CellShape(length, width, mask, 1, max(1, min(MOST_HEADS, TOKENS // length)))


def cells() -> list[tuple[str, CellShape, bool]]:
    """Dtype, place, and whether only torch.compile is measured there; the most important first."""
    ordered: dict[tuple[str, CellShape, bool], None] = {}
    for masks, widths, lengths, compiled in (
        (("none", "causal"), WIDTHS[:1], LENGTHS, False),
        (("boolean", "additive"), WIDTHS[:1], (512, 2048, 8192), False),
        (("none",), WIDTHS[:1], COMPILED_LENGTHS, True),
        (("none", "causal"), WIDTHS[1:], (512, 2048, 8192), False),
        (("boolean", "additive"), WIDTHS[:1], LENGTHS[:-1], False),
        (("boolean", "additive"), WIDTHS[1:], (2048,), False),
        (("none", "causal"), WIDTHS[1:], LENGTHS, False),
    ):
        for dtype, length, width, mask in product(("float32", "bfloat16"), lengths, widths, masks):
            ordered[dtype, place(length, width, mask), compiled] = None
    return list(ordered)


def config(dtype: Any, rounds: int, device: str, *, compiled: bool) -> Config:
    return Config(
        dtype=dtype, device=device, rounds=rounds, widths=WIDTHS, threads=(1,),
        compiled_lengths=COMPILED_LENGTHS,
        contenders=(COMPILED,) if compiled else tuple(name for name in CONTENDERS if name != COMPILED),
    )  # fmt: skip


def warm(job: str, device: str) -> None:
    """Call every computation of a contender, dtype, width and mask once, at some lengths."""
    name, dtype, width, mask, *lengths = job.split(":")
    for derivative, length in product(DERIVATIVES, lengths):
        if name == COMPILED and derivative == "double backward":
            continue  # torch.compile refuses it, after it has compiled the rest again
        at = place(int(length), int(width), mask)
        x = draw(
            at.heads, at.length, at.width, mask,
            seed=0, device=torch.device(device), dtype=DTYPES[dtype],
        )  # fmt: skip
        with contextlib.suppress(Exception):  # the measurement says what cannot be done
            computation(name, derivative, x)()


def jobs(device: str) -> list[str]:
    """List the computations that are compiled beforehand."""
    dtypes = "bfloat16", "float32"
    serve_all = ":".join(map(str, SERVE_ALL))
    found = [f"{COMPILED}:{dtype}:64:none:{n}" for dtype in dtypes for n in COMPILED_LENGTHS]
    names = [name for name in ("ours", "jvp-flash-attention") if not absent(name, torch.device(device))]
    masks = {"ours": ("none", "causal"), "jvp-flash-attention": MASKS}
    for name, width, dtype in product(names, WIDTHS, dtypes):
        found += [f"{name}:{dtype}:{width}:{mask}:{serve_all}" for mask in masks[name]]
    return found


def warm_all(device: str) -> None:
    """Compile in several processes, which leave what they made in the caches of Triton and Inductor."""
    limit = time.monotonic() + JOB_SECONDS

    def run(job: str) -> None:
        _script(["--warm", job, "--device", device], limit - time.monotonic(), capture_output=True)

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(run, jobs(device)))


def _script(arguments: list[str], limit: float, **options: Any) -> int:
    """The exit status of this script in a process of its own; 1 where it takes longer."""
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, timeout=max(limit, 0.1), check=False, env=environment, **options)
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode


def measure(out: Path, minutes: float, rounds: int, device: str) -> None:
    """Measure cells until the time is up; start again behind a cell that ends the process."""
    end = time.monotonic() + minutes * 60 - WRITING
    out.mkdir(parents=True, exist_ok=True)
    target = torch.device(device)
    head = {
        "device": torch.cuda.get_device_name() if target.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "absent": [why for name in CONTENDERS if (why := absent(name, target))],
    }
    (out / "cells.jsonl").write_text(json.dumps(head) + "\n", encoding="utf-8")
    warm_all(device)
    print(f"compiled; {end - time.monotonic():.0f} s are left", flush=True)
    status = 1
    while status and (left := end - time.monotonic()) > 0:
        limits = ["--minutes", str(left / 60), "--rounds", str(rounds)]
        status = _script(["--cells", "--out", str(out), "--device", device, *limits], left)
    (out / "report.md").write_text(report(out), encoding="utf-8")


def measure_cells(out: Path, minutes: float, rounds: int, device: str) -> None:
    """Measure the cells that were not begun before; each is written when it is done."""
    clock = Clock(minutes * 60)
    target = torch.device(device)
    bench = lambda dtype, compiled: AttentionBench(  # noqa: E731
        config(dtype, rounds, device, compiled=compiled), target, DTYPES[dtype], clock
    )
    begun = [line["begun"] for line in _lines(out) if "begun" in line]
    gc.collect()
    gc.freeze()  # the meter of memory collects garbage before each call
    with (out / "cells.jsonl").open("a", encoding="utf-8") as file:
        for dtype, at, compiled in cells():
            name = f"{dtype}: {at}, {COMPILED if compiled else 'the others'}"
            if name in begun or not clock.has_room(at):
                continue
            print(json.dumps({"begun": name}), file=file, flush=True)
            try:
                cell = bench(dtype, compiled).cell(at)
                _wait(target)
            except Exception as error:  # memory that fails late, or a card that failed before
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                _wait(target)  # raises if this process can compute nothing more
                continue
            for timed in cell.timed:
                if not compiled or timed.contender == COMPILED:
                    print(json.dumps({"dtype": dtype, **asdict(timed)}), file=file, flush=True)
            passed = time.monotonic() - clock.start
            print(f"{passed:5.0f} s  {name}, {at.heads} heads: {words(cell.timed)}", flush=True)
            torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines written so far, without a last line that is not whole."""
    found = []
    for line in (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def words(timed: list[Timed]) -> str:
    """Time in that of the math path, or a note, for each derivative of ours (or of torch.compile)."""
    name = next(one.contender for one in timed if one.contender != MATH)
    some = [one for one in timed if one.contender == name]
    ratios = ", ".join(f"{one.derivative} {one.note or format(one.ratio()[0], '.2f')}" for one in some)
    return f"{name}: {ratios}"


def read(folder: Path) -> dict[str, Cost]:
    """One result for each dtype, with the names of the cells that were not measured."""
    head, *lines = _lines(folder)
    found: dict[str, Cost] = {}
    for dtype in DTYPES:
        timed = [line for line in lines if line.get("dtype") == dtype]
        if timed:
            measured = [Timed(**{k: v for k, v in line.items() if k != "dtype"}) for line in timed]
            done = {(one.length, one.width, one.mask) for one in measured}
            left = [str(at) for name, at, _ in cells() if name == dtype and at[:3] not in done]
            found[dtype] = Cost(head["device"], dtype, head["torch"], measured, left, notes=head["absent"])
    return found


def report(folder: Path) -> str:
    """Markdown: time in that of the math path, and peak memory, of every contender."""
    names = [name for name in CONTENDERS if name != MATH]
    head = ["width", "mask", "length", "heads", "math, ms", *names, "MB: ours", "math"]
    lines: list[str] = []
    for dtype, cost in read(folder).items():
        lines += [f"## {dtype}, {cost.device}, torch {cost.torch}", ""]
        for derivative in DERIVATIVES:
            lines += [f"### {derivative}", "", _row(head), "|---" * len(head) + "|"]
            places: dict[tuple[Any, ...], dict[str, Timed]] = {}
            for one in cost.measured:
                if one.derivative == derivative:
                    at = one.width, one.mask, one.length, one.heads
                    places.setdefault(at, {})[one.contender] = one
            for at, some in sorted(places.items()):
                unit = some.get(MATH)
                first = "" if unit is None else unit.note or f"{1e3 * statistics.median(unit.seconds):.3g}"
                peaks = [f"{some[name].peak / 1e6:.3g}" if name in some else "" for name in ("ours", MATH)]
                lines.append(_row([*map(str, at), first, *(_cell(some.get(name)) for name in names), *peaks]))
            lines.append("")
        if cost.left_out:
            lines += ["Not measured: " + "; ".join(cost.left_out), ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(one: Timed | None) -> str:
    if one is None:
        return ""
    if one.note:
        return one.note[:60].replace("|", "/")
    median, low, high = one.ratio()
    error = "" if one.error != one.error else f", error {one.error:.0e}"
    return f"{median:.2f} ({low:.2f}–{high:.2f}){error}"


def show(folder: Path) -> None:
    """The tables and figures of the study, beside the lines that they are made of."""
    for dtype, cost in read(folder).items():
        cost.tables()["attention"].to_csv(folder / f"attention-{dtype}.csv", index=False, float_format="%.5g")
        for name, figure in cost.figures().items():
            figure.savefig(folder / f"{name}-{dtype}.png", dpi=150)
    (folder / "report.md").write_text(report(folder), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/attention-cuda"))
    parser.add_argument("--minutes", type=float, default=3.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--read", type=Path, help="a folder with cells.jsonl")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--cells", action="store_true", help=argparse.SUPPRESS)
    asked: Any = parser.parse_args()
    if asked.read:
        show(asked.read)
    elif asked.warm:
        warm(asked.warm, asked.device)
    else:
        action = measure_cells if asked.cells else measure
        action(asked.out, asked.minutes, asked.rounds, asked.device)


if __name__ == "__main__":
    main()

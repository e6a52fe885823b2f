"""Kill runs (SIGKILL) at random moments, resume them, and compare the results bit for bit.

The script kills three commands at twenty random moments each, uniform over the time of an undisturbed run,
and starts them again in the same folder. Every fourth run is killed a second time. The script compares each
result with that of an undisturbed run, arrays byte by byte and other numbers as text. It counts repeated work
in operator products, including the check at the start of a process. The task has eight fixed sequences.

    spectrum   stochastic Lanczos quadrature, eigenvalues, traces and norms of three operators
    blocks     norms, extreme eigenvalues and densities block by block
    beyond     a figure of a paper (ormaniec2025), piece by piece

The script takes a few minutes of one core, and exits with an error if a number differs.

    python benchmarks/kills.py [--kills 20] [--only spectrum]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESULTS = Path(__file__).parent / "results" / "kills" / "default.json"
PRELOADED = ["curvescope.studies.run_study", "curvescope.studies.spectrum", "curvescope.studies.blocks"]
PRELOADED += ["curvescope.papers.reproduce", "curvescope.papers.ormaniec2025.beyond"]
SMALL = "n_layers = 1\nd_model = 4\nn_heads = 1\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\n"
SPECTRUM = {
    "num_probes": 1,
    "num_steps": 20,
    "num_eigenvalues": 1,
    "num_trace_probes": 4,
    "num_map_probes": 1,
}
SPECTRUM |= {"max_products": 30, "map_blocks": ["L0.W_[QV]"]}
BLOCKS = {"density": ["L0.W_[QV]"], "extremes": ["L0.W_K"], "num_steps": 12, "num_trace_probes": 4}
BEYOND = {"scales": 5, "d_model": 4, "blocks": ("L0.W_[QKV]",)}
SEQUENCES = 8  # of the task
TWICE = 4  # every fourth is killed a second time


class Command(NamedTuple):
    """A command, its output folder, and the paths of its files."""

    words: str
    run: Callable[[Path, Path], None]
    found: Callable[[Path], tuple[Path, Path]]  # the text and the arrays of the result


def _study(name: str, settings: dict[str, Any]) -> Command:
    def run(model: Path, out: Path) -> None:
        from curvescope.studies import run_study

        run_study.run(name, {"model": str(model), "data": "task:addition", **settings}, out=out)

    def found(out: Path) -> tuple[Path, Path]:
        (path,) = (out / name).glob("*/result.json")
        return path, path.with_name("arrays.npz")

    chosen = " ".join(f"--set {key}={value}" for key, value in settings.items())
    return Command(f"curvescope run {name} small.toml --data task:addition {chosen}", run, found)


def _figure(paper: str, name: str, settings: dict[str, Any]) -> Command:
    def run(model: Path, out: Path) -> None:
        from curvescope.papers.reproduce import reproduce

        reproduce(paper, [name], settings=settings, out=out)

    def found(out: Path) -> tuple[Path, Path]:
        return out / f"{name}.json", out / f"{name}.npz"

    chosen = " ".join(f"--set {key}={value}" for key, value in settings.items())
    return Command(f"curvescope reproduce {paper} --figure {name} {chosen}", run, found)


COMMANDS = {
    "spectrum": _study("spectrum", SPECTRUM),
    "blocks": _study("blocks", BLOCKS),
    "beyond": _figure("ormaniec2025", "beyond", BEYOND),
}


def work(name: str, model: Path, out: Path, counter: Path) -> None:
    """Run a command in this process, and append a byte to a file for every product."""
    import torch

    from curvescope.data.tasks import task_data
    from curvescope.operators.base import CurvatureOperator
    from curvescope.papers.ormaniec2025.beyond import Beyond
    from curvescope.studies import problem_config
    from curvescope.studies.blocks.study import Blocks
    from curvescope.studies.spectrum.study import Spectrum

    torch.set_num_threads(1)
    original, file = CurvatureOperator._stream, counter.open("ab", buffering=0)

    def counted(self: Any, V: Any, rows: Any, columns: Any) -> Any:
        result = original(self, V, rows, columns)
        file.write(b".")
        return result

    CurvatureOperator._stream = counted
    problem_config.task = partial(task_data, num_sequences=SEQUENCES)
    Spectrum.figures = Blocks.figures = Beyond.figures = lambda self: {}
    COMMANDS[name].run(model, out)


class Runs:
    """Processes of one command that start with all imports done."""

    def __init__(self, name: str, place: Path):
        self.name, self.place = name, place
        self.processes = get_context("forkserver")
        self.processes.set_forkserver_preload(PRELOADED)
        self.model = place / "small.toml"
        self.model.write_text(SMALL, encoding="utf-8")

    def run(self, out: Path, *, kill_after: float | None = None) -> bool:
        """Run it. Return True if it was killed before its end."""
        counter = out.with_suffix(".count")
        process = self.processes.Process(target=work, args=(self.name, self.model, out, counter))
        process.start()
        process.join(kill_after)
        if process.is_alive():
            process.kill()
            process.join()
            return True
        if process.exitcode:
            raise SystemExit(f"{self.name} ended with exit code {process.exitcode}")
        return False

    def products(self, out: Path) -> int:
        """Return the number of products counted in a folder."""
        counter = out.with_suffix(".count")
        return counter.stat().st_size if counter.exists() else 0


def contents(command: Command, out: Path) -> dict[str, bytes]:
    """Return the result's text, and the bytes of each of its arrays."""
    text, arrays = command.found(out)
    with np.load(arrays, allow_pickle=False) as archive:
        array_bytes = {
            key: archive[key].tobytes() + str(archive[key].dtype).encode() for key in archive.files
        }
    return {"": text.read_bytes(), **array_bytes}


def kill(name: str, place: Path, *, kills: int, seed: int) -> dict[str, Any]:
    """Kill a command at several moments, and return the comparison."""
    command, runs, chance = COMMANDS[name], Runs(name, place), random.Random(seed)
    start = time.monotonic()
    runs.run(place / "warm")  # files are read, the processes begin
    warm = time.monotonic() - start
    start = time.monotonic()
    runs.run(place / "right")
    whole = time.monotonic() - start
    right, usual = contents(command, place / "right"), runs.products(place / "right")
    print(f"{name}: {whole:.1f} s undisturbed ({warm:.1f} s at first), {usual} products", flush=True)
    cases: list[dict[str, Any]] = []
    for number in itertools.count():
        if len(cases) == kills:
            break
        out = place / f"out{number}"
        moments = [chance.random() for _ in range(2 if len(cases) % TWICE == TWICE - 1 else 1)]
        at = []
        for moment in moments:
            if runs.run(out, kill_after=moment * whole):
                at.append(runs.products(out))
        if not at:
            continue  # it was faster than the undisturbed one
        runs.run(out)
        same = contents(command, out) == right
        again = runs.products(out) - usual
        cases.append({"moments": moments, "killed_after_products": at, "same": same, "taken_again": again})
        print(f"  killed at {at} of {usual} products: same {same}, {again} taken again", flush=True)
    return {"command": command.words, "products": usual, "seconds": round(whole, 1), "kills": cases}


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def main() -> None:
    """Run all commands, store the results, and exit with an error if a number differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=[*COMMANDS], action="append")
    parser.add_argument("--keep", type=Path, help="a folder for everything that is written")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() and args.only else {}
    for seed, name in enumerate(COMMANDS):
        if args.only and name not in args.only:
            continue
        with _place(None if args.keep is None else args.keep / name) as place:
            results[name] = kill(name, place, kills=args.kills, seed=seed)
        results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, one thread"
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    cases = [case for name in COMMANDS if name in results for case in results[name]["kills"]]
    print(f"{sum(case['same'] for case in cases)} of {len(cases)} ended with the same bits")
    sys.exit(not all(case["same"] for case in cases))


if __name__ == "__main__":
    main()

"""Compare the prediction of a preflight with what a run takes: seconds and bytes, case by case.

Each case is forecast in one process and run in another, so that the peak of the memory is its own. On a CPU
seconds are those of the processor, one thread, from the start of Python on, and bytes those of the process;
on a card seconds are those on the wall, from when a study is imported, and bytes what torch has allocated.

    OMP_NUM_THREADS=1 python benchmarks/preflight.py --out benchmarks/results/preflight/cpu.json
    python benchmarks/preflight.py --device cuda --out benchmarks/results/preflight/card.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ASSETS = Path(os.environ.get("CURVESCOPE_ASSETS", Path(__file__).resolve().parents[2] / "shared/assets"))
STORIES = ASSETS / "stories15M"
FEW = {"num_probes": 2, "num_steps": 12, "num_eigenvalues": 1, "num_trace_probes": 8, "num_map_probes": 1}
QUICK = {"block_steps": 0, "num_probes": 2, "num_steps": 8, "num_shared": 2, "num_sample_probes": 2}
SMALL = {"n_layers": 4, "d_model": 256, "n_heads": 4, "d_ff": 1024, "vocab_size": 256, "n_ctx": 128}
GPT2 = {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 3072, "vocab_size": 50257, "n_ctx": 1024}
CPU: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "spectrum, tiny-gpt": ("spectrum", "tiny-gpt", {"tokens": 128}),
    "blocks, tiny-gpt": ("blocks", "tiny-gpt", {"tokens": 128}),
    "gap, tiny-gpt": ("gap", "tiny-gpt", {"tokens": 128, "checkpoints": ["final"]}),
    "propagation, tiny-gpt": ("propagation", "tiny-gpt", {"tokens": 128}),
    "diagnose, tiny-gpt": ("diagnose", "tiny-gpt", {"tokens": 128}),
    "taylor, tiny-gpt": ("taylor", "tiny-gpt", {"tokens": 64, "num_steps": 20}),
    "spectrum, 3 M parameters": ("spectrum", SMALL, {"tokens": 128, **FEW}),
    "diagnose, stories15M": ("diagnose", STORIES, {"tokens": 128, **QUICK}),
}
"""Study, model (a name, a folder, or the settings of one of the zoo), and settings."""
LONG = {"seq_len": 1024, "batch_size": 4, "tokens": 8192}
CARD: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "spectrum, tiny-gpt, card": ("spectrum", "tiny-gpt", {}),
    "spectrum, 124 M parameters, card": ("spectrum", GPT2, {**LONG, **FEW, "map_blocks": ["L0.W_*"]}),
    "diagnose, 124 M parameters, card": ("diagnose", GPT2, {**LONG, **QUICK}),
    "gap, 124 M parameters, card": ("gap", GPT2, {**LONG, "num_draws": 0}),
}


def settings_of(case: str, device: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Study and settings of a case; a model of the zoo is written there, with a tokenizer of bytes."""
    study, model, settings = (CPU | CARD)[case]
    if isinstance(model, dict):
        from curvescope.tokenizers import ByteTokenizer

        lines = [f"{name} = {value}" for name, value in model.items()]
        (folder / "model.toml").write_text("\n".join(lines), encoding="utf-8")
        ByteTokenizer().save(folder / "bytes.json")
        settings = settings | {"tokenizer": str(folder / "bytes.json")}
        model = folder / "model.toml"
    return study, {"model": str(model), "device": device, **settings}


def foretell(case: str, device: str) -> dict[str, float]:
    """Seconds and bytes that are predicted, and the seconds of the processor that it took."""
    from curvescope.studies import find
    from curvescope.studies.preflight import forecast

    with tempfile.TemporaryDirectory() as folder:
        name, settings = settings_of(case, device, Path(folder))
        study, start = find(name), clock(device)()
        found = forecast(name, study, study.Config.from_dict(settings), clock=clock(device))
        assert found is not None
        p = found.prediction
        took = clock(device)() - start
        return {"seconds": p.seconds, "bytes": p.memory, "base": p.base, "most": p.most, "took": took}


def carry_out(case: str, device: str) -> dict[str, float]:
    """Seconds and bytes that a run takes."""
    import torch

    from curvescope.studies import find, run_study
    from curvescope.studies.preflight.measurements import MemoryMeter

    with tempfile.TemporaryDirectory() as out:
        name, settings = settings_of(case, device, Path(out))
        find(name)
        meter = MemoryMeter(torch.device(device))
        meter.begin()
        start = 0.0 if device == "cpu" else clock(device)()
        run_study.run(name, settings, out=out)
        return {"seconds": clock(device)() - start, "bytes": meter.peak()}


def clock(device: str) -> Any:
    """Return the clock: processor time on a CPU, else wall-clock time."""
    return time.process_time if device == "cpu" else time.perf_counter


def in_a_process(work: str, case: str, device: str) -> dict[str, float]:
    """Return the result of `foretell` or `carry_out` from a process of its own."""
    words = [sys.executable, __file__, "--device", device, "--only", case, "--work", work]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}, {work}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(case: str, device: str) -> dict[str, Any]:
    """Predicted, measured, and their ratios."""
    predicted, measured = (in_a_process(work, case, device) for work in ("foretell", "carry_out"))
    ratios = {name: predicted[name] / measured[name] for name in ("seconds", "bytes")}
    row = {"case": case, "device": device, "predicted": predicted, "measured": measured, "ratio": ratios}
    print(case, *(_words(name, predicted[name], measured[name]) for name in ratios), sep="   ", flush=True)
    return row


def _words(name: str, predicted: float, measured: float) -> str:
    unit = 1e6 if name == "bytes" else 1
    what = "MB" if name == "bytes" else "s"
    return f"{predicted / unit:.0f} {what}, was {measured / unit:.0f} ({predicted / measured:.2f})"


def main() -> None:
    """All cases of a device, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file; cases that it has are not done again")
    parser.add_argument("--only", help="one case")
    parser.add_argument("--work", choices=["foretell", "carry_out"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        print(json.dumps(globals()[given.work](given.only, given.device)))
        return
    there = json.loads(given.out.read_text())["cases"] if given.out and given.out.exists() else []
    rows = {row["case"]: row for row in there}
    cases = CPU if given.device == "cpu" else CARD
    for case, (_, model, _) in cases.items():
        if (given.only and case != given.only) or case in rows or (model == STORIES and not STORIES.exists()):
            continue
        rows[case] = compared(case, given.device)
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            machine = {"python": platform.python_version(), "threads": os.environ.get("OMP_NUM_THREADS", "")}
            tree = {"machine": machine, "cases": list(rows.values())}
            given.out.write_text(json.dumps(tree, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""Time of whole studies: against a requested budget, and with and without the sampling error.

    python benchmarks/study_times.py budgets     # curvescope run STUDY MODEL --data README.md --budget 1min
    python benchmarks/study_times.py sampling    # default settings, and the same with sampling=false

Every run is a process of its own. A budget is in seconds on the clock, so these runs need a machine that does
nothing else: `load` is the processor time of the run over what all its threads could have had. Runs with and
without the sampling error alternate and are compared by processor time, on one thread, without the import of
the package. Each row is stored when it is done; a row that is stored is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path(os.environ.get("CURVESCOPE_ASSETS", ROOT.parent / "shared/assets"))
RESULTS = Path(__file__).parent / "results" / "study-times"
BUDGETS = {"1min": 60.0, "2min": 120.0, "5min": 300.0}
BUDGET_STUDIES = ("blocks", "spectrum")
SAMPLING_STUDIES = ("spectrum", "blocks", "diagnose")
ROUNDS = 2
WORDS = re.compile(r"chosen for|too short|lowered|measuring only|settled")


def budget_row(study: str, budget: str) -> dict[str, Any]:
    """Run a study on a model of 15 million parameters with a budget; return the seconds that it took."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "curvescope", "run", study, str(ASSETS / "stories15M")]
        command += ["--data", str(ROOT / "README.md"), "--budget", budget, "--out", out]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out)
        seconds = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if WORDS.search(line)]
    return {
        "study": study,
        "budget": BUDGETS[budget],
        "seconds": round(seconds, 1),
        "overrun": round(seconds / BUDGETS[budget] - 1, 3),
        "processor": round(processor, 1),
        "load": round(processor / seconds, 2),
        "exit": done.returncode,
        "lines": lines[:6],
    }


def sampling_seconds(study: str, *, sampling: bool) -> float:
    """Return the processor seconds of a study at default settings, in a process of one thread."""
    code = (
        "import sys, time; from curvescope.studies import find; study = find(sys.argv[1]); "
        "cfg = study.Config.from_dict({'sampling': sys.argv[2] == 'True'}); start = time.process_time(); "
        "study.run(cfg); print(time.process_time() - start)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, study, str(sampling)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def sampling_row(study: str) -> dict[str, Any]:
    """Processor seconds with and without the sampling error, in alternating runs."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for i in range(ROUNDS):
        for name in ("with", "without") if i % 2 else ("without", "with"):
            seconds[name].append(round(sampling_seconds(study, sampling=name == "with"), 1))
    extra = statistics.mean(seconds["with"]) / statistics.mean(seconds["without"]) - 1
    return {"study": study, **seconds, "extra": round(extra, 3)}


def main() -> None:
    """Measure the rows that are not stored."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="*", default=["budgets", "sampling"])
    parser.add_argument("--only", help="one row, such as blocks-1min or spectrum")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    for table in args.table:
        file = args.out / f"{table}.json"
        rows = json.loads(file.read_text()) if file.exists() else {}
        cases: dict[str, Any] = {}
        if table == "budgets":
            cases = {f"{s}-{b}": (budget_row, s, b) for s in BUDGET_STUDIES for b in BUDGETS}
        else:
            cases = {study: (sampling_row, study) for study in SAMPLING_STUDIES}
        for name, (measure, *arguments) in cases.items():
            if name in rows or args.only not in (None, name):
                continue
            rows[name] = measure(*arguments)
            print(name, json.dumps(rows[name], ensure_ascii=False), flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

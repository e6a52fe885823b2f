"""Attention's Triton kernels on a card, over everything that changes them, against float64.

    python tests/kernels/cuda_grid.py --out FOLDER               the grid, as far as --budget seconds go
    python tests/kernels/cuda_grid.py --out FOLDER --sanitize    few cases, under compute-sanitizer

A group is a precision, a head width, a mask and a kind of length: most of the time goes to compiling, and it
shares few kernels with others. Each runs in a process of its own, several at a time; one that dies is
started again after the case that killed it, which is a failure.
FOLDER gets grid.json and grid.md (sanitize.json and sanitize.md). The exit status is 1 where a case failed.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from grid_cases import BOUND, KINDS, MASKS, NAMES, PRECISIONS, WIDTHS, Case, cases, errors, few, kind_of

PLACES = ("/usr/local/cuda*/bin/compute-sanitizer", "/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
DEATHS = 3  # of one group, after which the rest of it is left
PATIENCE = 20  # seconds for a case that was begun in time
SHOWN = 30  # failures in the summary; all are in the JSON
LATE, SILENT = "late", "compute-sanitizer saw no kernel"


# ------------------------------------------------------------------------------------------------ one group


def work(group: str, *, skip: int, sanitize: bool, until: float, device: str) -> None:
    """Run a group's cases from number `skip`, a line of JSON before and after each, until the time is up."""
    precision, width, *rest = group.split(":")
    todo = _cases(group, sanitize)
    where = {"device": device, "exact_on": "cpu" if sanitize else device}
    how = {"backend": "triton" if device == "cuda" and rest[-1:] != ["one"] else "auto"}
    for number, case in list(enumerate(todo))[skip:]:
        if time.time() > until:
            break
        print(json.dumps({"begin": number}), flush=True)
        found: dict[str, Any] = {"number": number}
        try:
            found["errors"] = errors(case, precision, int(width), **where, **how)
        except Exception as error:  # whatever a kernel does is a finding
            found["raised"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if "CUDA" in repr(error):  # the context is lost
                print(json.dumps(found), flush=True)
                sys.exit(1)
        print(json.dumps(found), flush=True)
    sys.stderr.flush()
    os._exit(0)  # Python's own end may abort while a thread of autograd gives back its last graph


# ----------------------------------------------------------------------------------------------- all groups


def run_grid(
    groups: list[str], *, budget: float, jobs: int, sanitizer: str | None = None, device: str = "cuda"
) -> dict[str, Any]:
    """Every group, `jobs` at a time, in their order, until `budget` seconds have passed; what was found."""
    start = time.time()
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda group: _group(group, sanitizer, device, start + budget), groups))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "capability": torch.cuda.get_device_capability() if device == "cuda" else (),
        "versions": {name: version(name) for name in ("torch", "triton") if find_spec(name)},
        "cuda": torch.version.cuda,
        "sanitizer": sanitizer,
        "seconds": round(time.time() - start),
        "groups": dict(zip(groups, found, strict=True)),
    }


def _cases(group: str, sanitize: bool) -> list[Case]:
    if sanitize:
        return few()
    mask, kind = group.split(":")[2:]
    return [case for case in cases() if (case.mask, kind_of(case.Lq)) == (mask, kind)]


def _group(group: str, sanitizer: str | None, device: str, until: float) -> dict[str, Any]:
    """Number of cases run, those not reached, the worst error of each output, and failures."""
    todo = _cases(group, sanitizer is not None)
    result: dict[str, Any] = {"done": 0, "cases": len(todo), "worst": [0.0] * len(NAMES), "failures": []}
    skip, deaths, seen = 0, 0, set()
    while skip < len(todo) and time.time() < until and deaths < DEATHS:
        lines, tail, status = _process(group, skip, sanitizer, device, until)
        begun = max((x["begin"] for x in lines if "begin" in x), default=skip - 1)
        ended = {x["number"]: x for x in lines if "number" in x}
        for number, one in ended.items():
            _note(result, group, todo[number], one)
        seen |= {*ended, *([begun] if status not in (0, LATE) else [])}
        skip = begun + 1
        if status in (0, LATE):
            break
        deaths += 1
        last = ended.get(begun)
        if last is None or "raised" not in last:
            at = str(todo[begun]) if 0 <= begun < len(todo) else "before the first case"
            result["failures"].append({"case": at, "what": f"the process died ({status})", "tail": tail})
    result["not_reached"] = [str(case) for number, case in enumerate(todo) if number not in seen]
    return result


def _note(result: dict[str, Any], group: str, case: Case, one: dict[str, Any]) -> None:
    result["done"] += 1
    found = one.get("errors")
    if found is None:
        result["failures"].append({"case": str(case), "what": one["raised"]})
        return
    result["worst"] = [max(a, b) for a, b in zip(result["worst"], found, strict=True)]
    bound = BOUND[group.split(":")[0]]
    wrong = {name: error for name, error in zip(NAMES, found, strict=True) if not error <= bound}
    if wrong:
        result["failures"].append({"case": str(case), "what": f"errors {wrong}"})


def _process(
    group: str, skip: int, sanitizer: str | None, device: str, until: float
) -> tuple[list[dict[str, Any]], str, int | str]:
    """The lines of one worker, the end of what else it said, and its exit status."""
    command = [sys.executable, __file__, "--group", group, "--device", device]
    command += ["--skip", str(skip), "--until", str(until)]
    env = dict(os.environ)
    if sanitizer is not None:
        tool = [sanitizer, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "66"]
        command = [*tool, *command, "--sanitize"]
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # every tensor has borders of its own
    with tempfile.TemporaryFile("w+") as said:
        worker = subprocess.Popen(command, stdout=said, stderr=said, env=env, process_group=0)
        try:
            status = worker.wait(max(1.0, until + PATIENCE - time.time()))
        except subprocess.TimeoutExpired:  # no failure: what is not finished is not reached
            os.killpg(worker.pid, signal.SIGKILL)
            status = LATE
        said.seek(0)
        out = said.read().splitlines()
    lines = [json.loads(line) for line in out if line.startswith("{") and line.endswith("}")]
    if sanitizer is not None and status == 0 and not any("ERROR SUMMARY: 0 errors" in x for x in out):
        status = SILENT
    others = [line for line in out if not line.startswith("{")]
    return lines, "\n".join([*others[:25], "…", *others[-15:]] if len(others) > 40 else others), status


# -------------------------------------------------------------------------------------------------- summary


def failures(found: dict[str, Any]) -> list[str]:
    """One line for each case that failed."""
    return [
        f"{group}: {one['case']}: {one['what']}" + (f"\n\n```\n{one['tail']}\n```" if one.get("tail") else "")
        for group, result in found["groups"].items()
        for one in result["failures"]
    ]


def summary(found: dict[str, Any]) -> str:
    """Markdown: versions, counts, the worst error of each precision and width, failures."""
    groups = found["groups"]
    done, number = (sum(r[key] for r in groups.values()) for key in ("done", "cases"))
    wrong, missed = failures(found), sum(len(r["not_reached"]) for r in groups.values())
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    head = f"{found['device']} (sm_{''.join(map(str, found['capability']))}), {versions}, "
    head += f"CUDA {found['cuda']}; {found['seconds']} s"
    lines = [head + (", under compute-sanitizer (memcheck)" if found["sanitizer"] else "") + ".", ""]
    lines += [
        f"{done} of {number} cases run, {missed} not reached (grid.json names them), {len(wrong)} failures.",
        "",
    ]
    lines += ["| precision | width | cases | " + " | ".join(NAMES) + " |", "|---" * (3 + len(NAMES)) + "|"]
    for (precision, width), some in sorted(_by_width(groups).items()):
        done, number = (sum(r[key] for r in some) for key in ("done", "cases"))
        worst = [max(errors) for errors in zip(*(r["worst"] for r in some), strict=True)]
        cells = [precision, str(width), f"{done}/{number}", *(f"{e:.1e}" for e in worst)]
        lines.append("| " + " | ".join(cells) + " |")
    bounds = ", ".join(f"{name} {bound:.0e}" for name, bound in BOUND.items())
    lines += ["", f"Largest relative error over the cases, against float64; bounds: {bounds}.", ""]
    shown = [f"- {line}" for line in wrong[:SHOWN]] + ["- …"] * (len(wrong) > SHOWN)
    return "\n".join([*lines, *shown]) + "\n"


def _by_width(groups: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The groups of one precision and width, over the masks."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for group, result in groups.items():
        precision, width, *_ = group.split(":")
        found.setdefault((precision, int(width)), []).append(result)
    return found


def find_sanitizer() -> str | None:
    """compute-sanitizer of the CUDA toolkit, wherever it lies."""
    places = [path for pattern in PLACES for path in sorted(glob.glob(pattern), reverse=True)]
    return shutil.which("compute-sanitizer") or (places[0] if places else None)


def all_groups(
    precisions: list[str], widths: list[int], *, kinds: tuple[str, ...] = KINDS, sanitize: bool = False
) -> list[str]:
    """Groups in order of value; half precision has one width for each tile, and one in between.

    Under compute-sanitizer, where starting a process costs more than its cases, a group is a width.
    """
    some = [(p, w) for p in precisions for w in widths if p != "bf16" or w in (16, 64, 80, 128, 256)]
    if sanitize:
        return [f"{precision}:{width}" for precision, width in some]
    return [f"{p}:{w}:{mask}:{kind}" for kind in kinds for p, w in some for mask in MASKS]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/cuda-grid"))
    parser.add_argument("--budget", type=float, default=240.0, help="seconds; what is not reached is said")
    parser.add_argument("--jobs", type=int, default=max(1, min(16, os.cpu_count() or 1)))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="of lengths")
    parser.add_argument("--sanitize", action="store_true", help="few cases, under compute-sanitizer")
    parser.add_argument("--sanitizer", default=find_sanitizer(), help="path of compute-sanitizer")
    for name, kind in (("--group", str), ("--device", str), ("--skip", int), ("--until", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.group is not None:
        work(asked.group, skip=asked.skip, sanitize=asked.sanitize, until=asked.until, device=asked.device)
        return
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch finds none")
    if asked.sanitize and asked.sanitizer is None:
        parser.error("compute-sanitizer was not found: it is part of the CUDA toolkit; --sanitizer names it")
    groups = all_groups(asked.precisions, asked.widths, kinds=tuple(asked.kinds), sanitize=asked.sanitize)
    sanitizer = asked.sanitizer if asked.sanitize else None
    found = run_grid(groups, sanitizer=sanitizer, budget=asked.budget, jobs=asked.jobs)
    asked.out.mkdir(parents=True, exist_ok=True)
    name = "sanitize" if asked.sanitize else "grid"
    (asked.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (asked.out / f"{name}.md").write_text(summary(found))
    print(summary(found))
    sys.exit(1 if failures(found) else 0)


if __name__ == "__main__":
    main()

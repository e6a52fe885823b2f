"""Run other libraries' own test suites with curvescope behind their classes, and count what became of them.

    python tests/peer_suites/run.py [--suites FOLDER] [--out FOLDER] [--only NAME] [-- arguments for pytest]

The suites are those of the source distributions of the versions in requirements-peers.lock: downloaded, or
found unpacked in a folder. That of PyTorch is one file of its sources at the installed version. Nothing of
them is part of this repository. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SUITES = {
    "curvlinops": ("curvlinops-for-pytorch", "plugin_curvlinops", "test"),
    "hessian-eigenthings": ("hessian-eigenthings", "plugin_eigenthings", "tests"),
    "BackPACK": ("backpack-for-pytorch", "plugin_backpack", "test/extensions"),
    "PyTorch": ("torch", "plugin_pytorch", "test/test_transformers.py"),
}
PYTORCH = "https://raw.githubusercontent.com/pytorch/pytorch"
Record = dict[str, dict[str, Any]]


def versions() -> dict[str, str]:
    """The pinned version of every package, and the installed one of torch."""
    lines = (ROOT / "requirements-peers.lock").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return pinned | {"torch": installed("torch").partition("+")[0]}


def found(package: str, version: str, folder: Path) -> Path:
    """The unpacked source distribution in a folder, downloaded where it is not there."""
    name = f"{package}-{version}".replace("-", "_").lower()
    fits = [p for p in folder.iterdir() if p.is_dir() and p.name.replace("-", "_").lower() == name]
    if fits:
        return fits[0]
    if package == "torch":
        tests = SUITES["PyTorch"][2]
        target = folder / f"torch-{version}" / tests
        target.parent.mkdir(parents=True)
        urllib.request.urlretrieve(f"{PYTORCH}/v{version}/{tests}", target)
        return folder / f"torch-{version}"
    get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*get, "--no-binary", package, "--dest", folder, f"{package}=={version}"], check=True)
    archive = next(p for p in folder.glob("*.tar.gz") if p.name[:-7].replace("-", "_").lower() == name)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return found(package, version, folder)


def run_suite(folder: Path, plugin: str, tests: str, more: list[str], *, flip: bool = False) -> Record:
    """The record of one suite, in the folder of its library."""
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "record.json"
        path = os.pathsep.join([str(HERE), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CURVESCOPE_PEERS_RECORD": str(record)}
        own |= {"CURVESCOPE_PEERS_FLIP": "1"} if flip else {}
        command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-q", "--tb=line"]
        subprocess.run([*command, *(more or [tests])], cwd=folder, env={**os.environ, **own}, check=False)
        if not record.exists():
            raise SystemExit(f"the suite in {folder} wrote no record: see what pytest says above")
        return json.loads(record.read_text(encoding="utf-8"))


def summary(records: dict[str, Record], pinned: dict[str, str]) -> str:
    """Counts of all suites, then reasons."""
    rows, reasons = [], []
    for name, record in records.items():
        count = Counter(test["outcome"] for test in record.values())
        expressed = count["passed"] + count["failed"]
        results = sum(test.get("results", 0) for test in record.values())
        version = pinned[SUITES[name][0]]
        numbers = (len(record), expressed, count["passed"], count["failed"], results)
        rows.append(f"| {name} {version} | {' | '.join(f'{number:,}' for number in numbers)} |")
        for outcome in ("failed", "left out"):
            found = [(test, of["reason"]) for test, of in record.items() if of["outcome"] == outcome]
            why = Counter(f"{_short(test)}: {why}" if outcome == "failed" else why for test, why in found)
            reasons += [f"| {name} | {outcome} | {n:,} | {reason} |" for reason, n in why.most_common()]
    head = (
        "| suite | tests | expressed | passed | failed | results of curvescope |\n|---|---|---|---|---|---|"
    )
    table = "| suite | | tests | reason |\n|---|---|---|---|"
    return "\n".join([head, *rows, "", table, *reasons]) + "\n"


def _short(test: str) -> str:
    """The name of a test without what it is given."""
    return re.sub(
        r"\[.*", "", test.rpartition("::")[2] if "[" not in test else test.split("::")[1], flags=re.S
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suites", type=Path, help="a folder with unpacked source distributions")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "peer-suites")
    parser.add_argument("--only", choices=SUITES)
    parser.add_argument("more", nargs="*", help="more arguments for pytest, in place of the suite's folder")
    given = parser.parse_args()
    folder = given.suites or given.out / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    pinned, records = versions(), {}
    for name, (package, plugin, tests) in SUITES.items():
        if given.only in (None, name):
            print(f"== {name}", flush=True)
            records[name] = run_suite(found(package, pinned[package], folder), plugin, tests, given.more)
            (given.out / "record.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
            (given.out / "summary.md").write_text(summary(records, pinned), encoding="utf-8")
    print(summary(records, pinned))
    sys.exit(any(test["outcome"] == "failed" for record in records.values() for test in record.values()))


if __name__ == "__main__":
    main()

"""Run studies over all cores, and store their results: claims in a file, tables in a page."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from curvescope.runs.study_result import Claim, Shown

RESULTS = Path(__file__).parent / "results"
GUIDES = Path(__file__).parent.parent / "docs" / "guides"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
Task = TypeVar("Task")


def arguments(words: str | None) -> argparse.Namespace:
    """Read the profile, the number of processes, and the folder of finished parts."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="default", choices=["default", "full"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    parser.add_argument(
        "--parts",
        type=Path,
        default=Path("runs/parts"),
        help="folder of finished parts; an interrupted run resumes there",
    )
    return parser.parse_args()


def spread(
    work: Callable[[Task], Shown], tasks: Mapping[str, Task], *, jobs: int, parts: Path
) -> dict[str, Shown]:
    """Return the results of all tasks by name, each from a process of one thread; read finished ones."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of the processes that begin now
    todo = {name: task for name, task in tasks.items() if not (parts / name / "result.json").exists()}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {name: pool.submit(work, task) for name, task in todo.items()}
        for name, future in running.items():
            future.result().save(parts / name)
            print(f"{name} is done", flush=True)
    return {name: Shown.load(parts / name) for name in tasks}


def store(path: Path, study: str, settings: Mapping[str, Any], claims: Sequence[Claim], **more: Any) -> None:
    """Write claims and further values that a page states, as JSON."""
    rows = [{"claim": c.claim, "measured": c.measured, "verdict": c.verdict} for c in claims]
    tree = {"study": study, "settings": dict(settings) or "defaults", **more, "claims": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def put_table(page: Path, marker: str, rows: Iterable[Sequence[str]]) -> None:
    """Replace the table after `<!-- marker -->` by the rows, heading first."""
    heading, *body = (f"| {' | '.join(row)} |" for row in rows)
    table = "\n".join([heading, "|" + "---|" * (heading.count(" | ") + 1), *body])
    begin = f"<!-- {marker} -->\n"
    before, found, behind = page.read_text(encoding="utf-8").partition(begin)
    if not found:
        raise SystemExit(f"{page} has no line {begin.strip()}")
    rest = re.sub(r"\A(\|.*\n)*\n*", "", behind.lstrip("\n"))
    page.write_text(f"{before}{begin}\n{table}\n\n{rest}".rstrip("\n") + "\n", encoding="utf-8")


def claim_rows(claims: Sequence[Claim]) -> list[tuple[str, str, str]]:
    """Convert to rows for `put_table`."""
    return [("claim", "measured", "verdict"), *((c.claim, c.measured, c.verdict) for c in claims)]

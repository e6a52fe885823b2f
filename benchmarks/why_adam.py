"""Run the study `why_adam` on many cores, and write the results that docs/guides/why_adam.md shows.

    python benchmarks/why_adam.py --scale quick --workers 2     # benchmarks/results/why_adam/default.json
    python benchmarks/why_adam.py --scale full --workers 12     # benchmarks/results/why_adam/full.json
    python benchmarks/why_adam.py --run runs/why_adam/…         # from a run of the command line

Every configuration has its own process. Finished pieces are stored under --out, so an interrupted run
resumes. The numbers are those of `curvescope run why_adam --set scale=…`.
"""

from __future__ import annotations

import argparse
import json
from collections import ChainMap
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from curvescope.core.result import Result
from curvescope.runs.pieces import Pieces
from curvescope.studies.why_adam import Config, WhyAdam, run

ROOT = Path(__file__).parent.parent
STORED = ROOT / "benchmarks" / "results" / "why_adam"
IMAGES = ROOT / "docs" / "images"
NAMES = {"quick": "default", "full": "full"}


def one(cfg: Config, folder: Path) -> str:
    """Run a configuration in its own process, with one thread."""
    import torch

    torch.set_num_threads(1)
    run(cfg, state=Pieces(folder))
    return cfg.configurations[0]


def all_of(cfg: Config, out: Path, workers: int) -> WhyAdam:
    """Run all configurations in parallel, and then the study from their pieces."""
    folders = {name: out / cfg.scale / name for name in cfg.configurations}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(one, replace(cfg, configurations=(n,)), f) for n, f in folders.items()]
        for job in jobs:
            print("done:", job.result(), flush=True)
    pieces: ChainMap[str, Result] = ChainMap({}, *(Pieces(folder) for folder in folders.values()))
    return run(cfg, state=pieces)


def store(result: WhyAdam, name: str) -> None:
    """Write claims and the short tables as JSON, and figures as images."""
    rows = {key: table.to_dict("records") for key, table in result.tables().items()}
    claims_of_page: dict[str, Any] = {
        "study": "why_adam",
        "settings": "defaults" if name == "default" else f"scale={name}",
        "seeds": result.num_seeds,
        "steps": result.steps,
        "notes": result.notes,
        "claims": [claim._asdict() for claim in result.claims()],
    }
    for key in ("gaps", "correlations", "changes"):
        claims_of_page[key] = [
            {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows[key]
        ]
    STORED.mkdir(parents=True, exist_ok=True)
    text = json.dumps(claims_of_page, indent=1, ensure_ascii=False)
    (STORED / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    ending = "" if name == "default" else f"-{name}"
    for key, figure in result.figures().items():
        figure.savefig(IMAGES / f"why_adam-{key}{ending}.png", dpi=110)


def show(result: WhyAdam) -> None:
    """Return the tables of the page, in Markdown."""
    print(result.opening(), *result.notes, sep="\n")
    for claim in result.claims():
        print(f"| {claim.claim} | {claim.measured} | {claim.verdict} |")
    for row in result.tables()["gaps"].to_dict("records"):
        gap = f"{row['gap']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
        both = " | ".join(f"{row[f'lr_{o}']:g} | {row[f'loss_{o}']:.3f}" for o in ("adam", "sgd"))
        print(f"| {row['configuration']} | {row['parameters']} | {both} | {gap} |")
    for row in result.tables()["changes"].to_dict("records"):
        change = f"{row['change']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
        print(f"| {row['from']} to {row['to']} | {row['of']} | {row['scope']} | {change} | {row['pairs']} |")


def main() -> None:
    """Run or read the study, store it, and show it."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--scale", choices=list(NAMES), default="quick")
    ask.add_argument("--workers", type=int, default=2)
    ask.add_argument("--out", type=Path, default=Path("runs/why_adam_pieces"))
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--run", type=Path, help="a run folder that is finished, of the scale that is named")
    given = ask.parse_args()
    cfg = Config(scale=given.scale, device=given.device)
    result = WhyAdam.load(given.run) if given.run else all_of(cfg, given.out, given.workers)
    store(result, NAMES[given.scale])
    show(result)


if __name__ == "__main__":
    import matplotlib

    matplotlib.use("Agg")
    main()

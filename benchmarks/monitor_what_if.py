"""Is "the largest rate that would have been stable over training" right? Retrain at 0.8 and 1.25 of it.

    OMP_NUM_THREADS=1 python benchmarks/monitor_what_if.py            # 10 seeds; resumes where it was
    OMP_NUM_THREADS=1 python benchmarks/monitor_what_if.py --tables   # into docs/guides/unstable.md

A small GPT is trained on all its data at once, at a rate that warms up over 20 steps, with a monitor. Its
history gives the largest stable rate, `stable_rate`. The same seed is trained again at 0.8 and 1.25 of that
rate, without a monitor. All data are in every batch, so that a stable loss hardly rises: a retraining is
unstable if its loss rises above `RISEN` times its lowest so far.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _stored import GUIDES, put_table
from monitor_diagnosis import Recipe, read_history, train

from curvescope.monitor.run_history import stable_rate

OUT = Path(__file__).parent / "results" / "monitor_diagnosis" / "what_if.jsonl"
RECIPES = {
    "SGD with momentum": Recipe(optimizer="sgd", lr=0.1, batch=0, sequences=64),
    "AdamW": Recipe(lr=3e-3, batch=0, sequences=64),
}
FACTORS = (0.8, 1.25)
RISEN = 1.1


def measure(name: str, seed: int) -> dict[str, Any]:
    """The largest stable rate of a run, and what happens at multiples of it."""
    recipe = RECIPES[name]
    rate = stable_rate(read_history(train(recipe, seed, watched=True)))
    assert rate is not None
    row: dict[str, Any] = {
        "optimizer": name,
        "seed": seed,
        "rate": recipe.lr,
        "largest": rate.value,
        "low": rate.low,
        "high": rate.high,
        "step": rate.step,
    }
    for factor in FACTORS:
        loss = train(replace(recipe, lr=factor * rate.value), seed, watched=False)["loss"]
        rise = float(np.nanmax(loss / np.minimum.accumulate(loss))) if np.isfinite(loss).all() else np.inf
        row[str(factor)] = {
            "rise": min(rise, 1e9),
            "last_loss": float(np.mean(loss[-10:])) if np.isfinite(loss[-10:]).all() else None,
        }
    return row


def table(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Table of how often the sharpness and the loss were unstable, by optimizer and factor."""
    found: list[tuple[str, ...]] = [
        (
            "optimizer",
            "rate",
            "seeds",
            "unstable: the loss rises by 10 %",
            "largest rise, median",
            "last loss, median",
        )
    ]
    for name in RECIPES:
        own = [row for row in rows if row["optimizer"] == name]
        for factor in map(str, FACTORS):
            tried = [row[factor] for row in own]
            last = [one["last_loss"] for one in tried if one["last_loss"] is not None]
            found.append(
                (
                    name,
                    f"{factor} of the largest stable",
                    f"{len(own)}",
                    f"{sum(one['rise'] > RISEN for one in tried)}",
                    f"{np.median([one['rise'] for one in tried]):.3g}×",
                    f"{np.median(last):.2f}" if last else "diverged",
                )
            )
    return found


def main() -> None:
    """Measure what is missing, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines = OUT.read_text(encoding="utf-8").splitlines() if OUT.exists() else []
    rows = [json.loads(line) for line in lines]
    if asked.tables:
        put_table(GUIDES / "unstable.md", "what-if", table(rows))
        return
    done = {(row["optimizer"], row["seed"]) for row in rows}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(asked.seeds):
        for name in RECIPES:
            if (name, seed) not in done:
                row = measure(name, seed)
                with OUT.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()

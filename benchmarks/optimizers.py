"""Run the stored results of the study `optimizers` over all cores, one process per optimizer and task.

    python benchmarks/optimizers.py                              # the defaults
    python benchmarks/optimizers.py --profile full --jobs 16     # longer, more seeds

Both write benchmarks/results/optimizers/PROFILE.json, the tables of docs/guides/optimizers.md and the figure
next to it. Finished parts are stored under --parts, so an interrupted run resumes there.
"""

from __future__ import annotations

from dataclasses import replace

from _stored import GUIDES, IMAGES, RESULTS, arguments, claim_rows, put_table, spread, store

from curvescope.studies import optimizers
from curvescope.studies.optimizers.study import FULL

PAGE = GUIDES / "optimizers.md"
NUMBERS = ("lr", "loss", "low", "high", "steps", "work", "products", "seconds", "wall")


def main() -> None:
    args = arguments(__doc__)
    settings = FULL if args.profile == "full" else {}
    cfg = optimizers.Config.from_dict(settings)
    tasks = {
        f"{arena}.{name}": replace(cfg, arenas=(arena,), optimizers=(name,))
        for arena in reversed(cfg.arenas)  # the longest first
        for name in reversed(cfg.optimizers)
    }
    parts = args.parts / f"optimizers-{args.profile}"
    results = spread(optimizers.run, tasks, jobs=args.jobs, parts=parts)
    each = [results[f"{arena}.{name}"] for arena in cfg.arenas for name in cfg.optimizers]
    result = optimizers.merge([item for item in each if isinstance(item, optimizers.OptimizerComparison)])
    tables, claims = result.tables(), result.claims()
    ends = tables["ends"].round(dict.fromkeys(NUMBERS, 6)).to_dict("records")
    trials = tables["trials"].round(6).to_dict("records")
    path = RESULTS / "optimizers" / f"{args.profile}.json"
    store(path, "optimizers", settings, claims, ends=ends, trials=trials)
    put_table(PAGE, f"{args.profile}: ends", [HEADING, *(_end(row) for row in ends)])
    put_table(PAGE, f"{args.profile}: claims", claim_rows(claims))
    name = "optimizers" if args.profile == "default" else "optimizers-full"
    result.figures()["courses"].savefig(IMAGES / f"{name}.png", dpi=110)


HEADING = ("where", "optimizer", "lr", "held-out loss, 95 %", "steps", "products", "processor, s")


def _end(row: dict[str, float | str | bool]) -> tuple[str, ...]:
    lr = f"{row['lr']:g}{', the last tried' if row['at_edge'] else ''}"
    loss = f"{row['loss']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    counts = (f"{row[name]:.0f}" for name in ("steps", "products"))
    return (str(row["arena"]), str(row["optimizer"]), lr, loss, *counts, f"{row['seconds']:.1f}")


if __name__ == "__main__":
    main()

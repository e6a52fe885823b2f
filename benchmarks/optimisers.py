"""The stored runs of the study `optimisers`, over all cores: an optimiser in an arena is a process.

    python benchmarks/optimisers.py                              # the defaults
    python benchmarks/optimisers.py --profile full --jobs 16     # longer, more seeds

Both write benchmarks/results/optimisers/PROFILE.json, the tables of docs/guides/optimisers.md and the figure
beside it. What was done is kept under --parts, and a run that was stopped goes on there.
"""

from __future__ import annotations

from dataclasses import replace

from _stored import GUIDES, IMAGES, RESULTS, arguments, claim_rows, put_table, spread, store

from curvescope.studies import optimisers
from curvescope.studies.optimisers.study import FULL

PAGE = GUIDES / "optimisers.md"
NUMBERS = ("lr", "loss", "low", "high", "steps", "work", "products", "seconds", "wall")


def main() -> None:
    asked = arguments(__doc__)
    settings = FULL if asked.profile == "full" else {}
    cfg = optimisers.Config.from_dict(settings)
    tasks = {
        f"{arena}.{name}": replace(cfg, arenas=(arena,), optimisers=(name,))
        for arena in reversed(cfg.arenas)  # the longest first
        for name in reversed(cfg.optimisers)
    }
    parts = asked.parts / f"optimisers-{asked.profile}"
    found = spread(optimisers.run, tasks, jobs=asked.jobs, parts=parts)
    each = [found[f"{arena}.{name}"] for arena in cfg.arenas for name in cfg.optimisers]
    result = optimisers.merge([one for one in each if isinstance(one, optimisers.Compared)])
    tables, claims = result.tables(), result.claims()
    ends = tables["ends"].round(dict.fromkeys(NUMBERS, 6)).to_dict("records")
    trials = tables["trials"].round(6).to_dict("records")
    path = RESULTS / "optimisers" / f"{asked.profile}.json"
    store(path, "optimisers", settings, claims, ends=ends, trials=trials)
    put_table(PAGE, f"{asked.profile}: ends", [HEADING, *(_end(row) for row in ends)])
    put_table(PAGE, f"{asked.profile}: claims", claim_rows(claims))
    name = "optimisers" if asked.profile == "default" else "optimisers-full"
    result.figures()["courses"].savefig(IMAGES / f"{name}.png", dpi=110)


HEADING = ("where", "optimiser", "lr", "held-out loss, 95 %", "steps", "products", "processor, s")


def _end(row: dict[str, float | str | bool]) -> tuple[str, ...]:
    lr = f"{row['lr']:g}{', the last tried' if row['at_edge'] else ''}"
    loss = f"{row['loss']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
    counts = (f"{row[name]:.0f}" for name in ("steps", "products"))
    return (str(row["arena"]), str(row["optimiser"]), lr, loss, *counts, f"{row['seconds']:.1f}")


if __name__ == "__main__":
    main()

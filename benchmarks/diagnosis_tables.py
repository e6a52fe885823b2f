"""Write the tables of docs/diagnose.md, from the measurements of `benchmarks/diagnosis.py`.

python benchmarks/diagnosis_tables.py    # writes them between their marks in the page
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "diagnosis"
PAGE = Path(__file__).parents[1] / "docs" / "diagnose.md"
BELOW = ("flat_blocks",)  # checks whose unusual values are below the limit
THEORY = ("learning_rate", "norm_placement")  # checks whose limits do not come from healthy models
MEANT = {
    "layer": ("uneven_layers", "the matrices of one layer times 30"),
    "saturated": ("saturated_attention", "W_Q and W_K of one layer times 100"),
    "post_norm": ("norm_placement", "a fresh post-norm stack of 12 layers"),
    "copies": ("duplicates", "half of the sequences are copies"),
    "rate": ("learning_rate", "a learning rate of twice 2/λ_max"),
    "dead_head": ("dead_heads", "a head whose rows of W_O are zero"),
    "feed_forward": ("flat_blocks", "a feed-forward network that is off"),
    "embedding": ("embedding_scale", "E and P times 100"),
    "logits": ("confidence", "U times 30"),
    "rubbish": ("steep_sequences", "random targets in 2 of 16 sequences, after training"),
    "sink": ("sinks", "8 added to the scores of the first key"),
}


def read(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of results."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def hits(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of planted faults, with the share found by the intended check."""
    table = ["| planted | | found by | seeds | by any check |", "|---|---|---|---|---|"]
    for case, (check, words) in MEANT.items():
        case_rows = [row for row in rows if row["kind"] == "planted" and row["case"] == case]
        num_found = sum(check in row["found"] for row in case_rows)
        any_check = sum(bool(row["found"]) for row in case_rows)
        counted = f"{num_found} of {len(case_rows)} | {any_check} of {len(case_rows)}"
        table.append(f"| `{case}` | {words} | `{check}` | {counted} |")
    return table


def alarms(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of false alarms on healthy models, by check."""
    table = ["| healthy | false alarms | of what |", "|---|---|---|"]
    healthy = [row for row in rows if row["kind"] == "healthy"]
    for case in dict.fromkeys(row["case"] for row in healthy):
        case_rows = [row for row in healthy if row["case"] == case]
        names = sorted({name for row in case_rows for name in row["found"]})
        count = sum(bool(row["found"]) for row in case_rows)
        table.append(
            f"| {case} | {count} of {len(case_rows)} | {', '.join(f'`{n}`' for n in names) or '–'} |"
        )
    total = sum(bool(row["found"]) for row in healthy)
    table.append(f"| all | {total} of {len(healthy)} | |")
    return table


def usual(rows: list[dict[str, Any]]) -> list[str]:
    """Return the most extreme value of every check over healthy models, for its limit."""
    table = ["| check | farthest healthy value | in |", "|---|---|---|"]
    names = dict.fromkeys(name for row in rows for name in row["values"])
    for name in sorted(names):
        if name in THEORY:
            continue
        values = [(row["values"][name][0], row["case"]) for row in rows if name in row["values"]]
        value, case = (min if name in BELOW else max)(values)
        table.append(f"| `{name}` | {value:.3g} | {case} |")
    return table


def main() -> None:
    """Write the tables into the page."""
    page = PAGE.read_text(encoding="utf-8")
    measured, calibrating = read("validation"), read("calibration")
    tables = {"hits": hits(measured), "alarms": alarms(measured), "usual": usual(calibrating)}
    for name, table in tables.items():
        block = f"<!-- {name} -->\n" + "\n".join(table) + f"\n<!-- end of {name} -->"
        page = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, b=block: b, page, flags=re.S)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

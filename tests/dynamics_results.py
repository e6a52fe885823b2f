"""The result of the study `dynamics` with its own settings, and the tables of docs/dynamics.md made from it.

curvescope run dynamics --out FOLDER
python tests/dynamics_results.py FOLDER/dynamics/RUN
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from curvescope.core.number_format import plural
from curvescope.papers import all_claims
from curvescope.runs.study_result import FAILS, HOLDS, OPEN
from curvescope.studies.dynamics import Dynamics
from curvescope.studies.dynamics.view import alarm_rows

DATA = Path(__file__).parent / "studies" / "data" / "dynamics"
PAGE = Path(__file__).parents[1] / "docs" / "dynamics.md"
BEGIN, END = "<!-- {}: written by tests/dynamics_results.py -->\n\n", "\n<!-- end -->"


def load() -> Dynamics:
    """The stored result."""
    return Dynamics.load(DATA)


def parts(result: Dynamics) -> dict[str, str]:
    """What the page has from the result, by name."""
    claims = result.claims()
    counts = [
        f"{sum(claim.verdict == verdict for claim in claims)} {verdict}" for verdict in (HOLDS, FAILS, OPEN)
    ]
    rows = pd.DataFrame([(c.claim, c.source, c.measured, c.verdict) for c in claims])
    rows.columns = ["claim", "whose", "measured", "verdict"]
    alarms = pd.DataFrame(alarm_rows(result))
    alarms["false alarms below the ceiling"] = [
        f"{count} of {total}"
        for count, total in zip(alarms["false_below"], alarms["measured_below"], strict=True)
    ]
    alarms["at the edge"] = [
        f"{count} of {total}"
        for count, total in zip(alarms["false_at_edge"], alarms["measured_at_edge"], strict=True)
    ]
    alarms["warned"] = [
        f"{count} of {total}" for count, total in zip(alarms["warned"], alarms["spikes"], strict=True)
    ]
    alarms["lead, steps"] = [f"{lead:g}" if lead == lead else "–" for lead in alarms["lead_steps"]]
    columns = ["meaning", "warned", "lead, steps", "false alarms below the ceiling", "at the edge"]
    return {
        "claims": f"{plural(len(claims), 'claim')}: {', '.join(counts)}.\n\n"
        + all_claims.markdown(rows, list(rows.columns)),
        "alarms": all_claims.markdown(alarms, columns),
    }


def marked(name: str, text: str) -> str:
    """A part as it stands on the page, between its marks."""
    return BEGIN.format(name) + text + END


def main(folder: Path) -> None:
    result = Dynamics.load(folder)
    result.save(DATA)
    page = PAGE.read_text(encoding="utf-8")
    for name, text in parts(result).items():
        start = page.index(BEGIN.format(name))
        stop = page.index(END, start) + len(END)
        page = page[:start] + marked(name, text) + page[stop:]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

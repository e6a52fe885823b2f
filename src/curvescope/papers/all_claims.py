"""Collect the claims of all finished figures of a paper in one table.

`all_claims.csv` for programs, `all_claims.md` for readers; the report shows the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from curvescope.core.errors import CurvescopeError
from curvescope.core.number_format import plural
from curvescope.papers import figures_of
from curvescope.papers.folder import ALL_CLAIMS, load_result, read_settings
from curvescope.runs.folder import Say
from curvescope.runs.study_result import Shown

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("figure", "claim", "whose", "published", "measured", "verdict", "published in")
CAPTION = (
    "Every claim of the finished figures with the measured values. whose: the author of the claim's "
    "wording, a paper, an article about it, or this project. Verdicts are computed from the numbers in "
    "the same row."
)


def table(results: Mapping[str, Shown]) -> pd.DataFrame:
    """Return one row per claim, figure by figure."""
    import pandas as pd

    rows = [
        (figure, c.claim, c.whose, c.published, c.measured, c.verdict, c.source)
        for figure, result in results.items()
        for c in result.claims()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def tally(claims: pd.DataFrame) -> str:
    """Count the claims by verdict, the most frequent first: `77 claims: 40 holds, 20 fails, …`."""
    counts = Counter(claims["verdict"]).most_common()
    words = "; ".join(f"{count} {verdict}" for verdict, count in counts)
    return f"{plural(len(claims), 'claim')}{': ' if words else ''}{words}"


def markdown(claims: pd.DataFrame, columns: Sequence[str] = COLUMNS) -> str:
    """Format a table in Markdown, and escape vertical bars in cells."""
    rows = [list(columns), ["---"] * len(columns), *claims[list(columns)].to_numpy().tolist()]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows) + "\n"


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def write(out: Path, made: Mapping[str, Shown], *, say: Say) -> None:
    """Write the table of every finished figure in `out`; results in `made` need no loading."""
    paper = read_settings(out)["paper"]
    claims = table(finished(out, made, say=say))
    claims.to_csv(out / f"{ALL_CLAIMS}.csv", index=False)
    text = f"# Claims of {paper}\n\n{tally(claims)}. {CAPTION}\n\n{markdown(claims)}"
    (out / f"{ALL_CLAIMS}.md").write_text(text, encoding="utf-8", newline="\n")


def read(out: Path) -> pd.DataFrame:
    """Read the table of claims from a folder."""
    import pandas as pd

    return pd.read_csv(out / f"{ALL_CLAIMS}.csv", keep_default_na=False)


def finished(out: Path, made: Mapping[str, Shown], *, say: Say) -> dict[str, Shown]:
    """Return the results of all finished figures in the paper's order; report and skip unreadable ones."""
    meta, results = read_settings(out), {}
    for name in figures_of(meta["paper"], more=True):
        if name not in meta["figures"]:
            continue
        try:
            results[name] = made[name] if name in made else load_result(out, name)
        except CurvescopeError as error:
            say(f"{name}: its claims are missing from {ALL_CLAIMS}: {error}")
    return results

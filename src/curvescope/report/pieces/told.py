"""What a page tells at its top about the effort behind its numbers, from the settings of its runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from curvescope.core.errors import CurvescopeError
from curvescope.core.numbers import plural
from curvescope.report.reading import Read
from curvescope.studies.folder import chosen

PROBES = re.compile(r"num_(\w+_)?probes")


def errors_told(runs: Sequence[Read]) -> str:
    """`Every estimate has its error …`, but for those of a single probe."""
    single: dict[str, list[str]] = {}
    for run in runs:
        names = [name for name, value in run.settings.items() if PROBES.fullmatch(name) and value == 1]
        if names:
            single[run.study] = list(dict.fromkeys([*single.get(run.study, []), *names]))
    each = [f"{study} (`{'`, `'.join(names)}`)" for study, names in single.items()]
    but = f", but for those of one probe: {', '.join(each)}" if each else ""
    return f"Every estimate has its error{but}. What did not converge says so."


def chosen_small(runs: Sequence[Read]) -> str:
    """Which settings were chosen to be in time, and how to have the studies' own; "" where none were."""
    found: dict[str, list[str]] = {}
    for run in runs:
        small = _small(run)
        if small:
            found.setdefault(small, []).append(run.study)
    if not found:
        return ""
    each = "; ".join(f"{', '.join(dict.fromkeys(studies))} {small}" for small, studies in found.items())
    return f"Settings were lowered to be done in time: {each}. `--profile full` takes the studies' own."


def _small(run: Read) -> str:
    """`32 tokens, 1 probe`: what was lowered, the tokens and the least number of probes."""
    try:
        lowered = chosen(run.path)
    except (CurvescopeError, OSError, ValueError, KeyError):  # of another version
        return ""
    counts = {name: value for name, value in lowered.items() if isinstance(value, int) and value > 0}
    words = [plural(counts["tokens"], "token")] if "tokens" in counts else []
    probes = [value for name, value in counts.items() if PROBES.fullmatch(name)]
    words += [plural(min(probes), "probe")] if probes else []
    words += [plural(counts["num_steps"], "step")] if "num_steps" in counts else []
    return ", ".join(words) or ("in part" if lowered else "")

"""Cards of models, from what run folders say: no model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from curvescope.core.errors import CurvescopeError
from curvescope.core.number_format import plural, rounded
from curvescope.models.description import Description, telling_facts, times
from curvescope.monitor.diagnosis import RunFinding
from curvescope.report.page_elements import Card, Cell, Finding, Table, heading, severity
from curvescope.report.pieces.tables import cell
from curvescope.report.run_reader import Read
from curvescope.report.sections import SECTIONS
from curvescope.runs.folder import MODELS
from curvescope.studies.diagnose.study import Diagnosis
from curvescope.studies.run_study import chosen

LABELS = {
    "kind": "family",
    "task": "task",
    "n_layers": "layers",
    "n_heads": "heads",
    "n_kv_heads": "key and value heads",
    "d_model": "width",
    "d_head": "width of a head",
    "d_ff": "feed-forward width",
    "n_ctx": "context",
    "vocab_size": "vocabulary",
    "norm": "place of norms",
    "norm_kind": "norm",
    "tied": "tied embeddings",
    "d_hidden": "hidden width",
}


def cards(runs: Sequence[Read]) -> list[Card]:
    """One card for each model that is named by a run, with its blocks where a run folder tells them."""
    found: dict[str, Card] = {}
    for run in runs:
        if not run.model:
            continue
        for card in _of_run(run):
            if card.name not in found or (found[card.name].roles is None and card.roles is not None):
                found[card.name] = card
    return list(found.values())


def _of_run(run: Read) -> list[Card]:
    """The card of its model, or of every side of a comparison; one where they differ in weights alone."""
    described = descriptions(run.path)
    if not described:
        return [_bare_card(run)]
    sides = run.result.subjects()
    if not sides or len(sides) != len(described):
        return [_card(run, described[0], run.model)]
    if all({**told, "model": ""} == {**described[0], "model": ""} for told in described):
        return [_card(run, described[0], " and ".join(sides), side=1)]
    both = enumerate(zip(sides, described, strict=True), start=1)
    return [_card(run, told, name, i) for i, (name, told) in both]


def descriptions(run: Path) -> list[Description]:
    """Read `model.json`; return nothing if it is missing, as in old runs, or broken."""
    try:
        found = json.loads((run / MODELS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _card(run: Read, told: Description, name: str, side: int = 0) -> Card:
    facts = telling_facts(told.get("facts", {}))
    rows = [("parameters", f"{told['parameters']:,}"), ("blocks", f"{len(told['blocks']):,}")]
    rows += [(LABELS.get(key, key.replace("_", " ")), cell(value).text) for key, value in facts.items()]
    rows += [*([] if side else _asked(run)), ("numbers", str(told.get("dtype", "")))]
    anchor = f"model-{run.number}" + (f"-{side}" if side else "")
    return Card(
        name=name,
        facts=[(label, words) for label, words in rows if words],
        notes=told.get("notes", []),
        roles=_table(f"{anchor}-roles", "Roles", told["roles"], ("role", "blocks", "shape")),
        blocks=_table(f"{anchor}-blocks", "Blocks", told["blocks"], ("block", "shape")),
    )


def _bare_card(run: Read) -> Card:
    """Return a card from the settings and the result of a run without a description of its model."""
    size = getattr(run.result, "num_parameters", None)
    rows = [("parameters", f"{size:,}")] if isinstance(size, int) else []
    dtype = str(run.settings.get("dtype", ""))
    return Card(run.model, [*rows, *_asked(run), *([("numbers", dtype)] if dtype else [])])


def _asked(run: Read) -> list[tuple[str, str]]:
    """Return the source and the revision of the settings."""
    revision = run.settings.get("revision")
    source = run.model.removesuffix(f"@{revision}")
    return [(label, str(value)) for label, value in (("source", source), ("revision", revision)) if value]


def _table(anchor: str, title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    """Roles or blocks, with how many parameters they have and which share of all."""
    made = []
    for row in rows:
        front = [times(row[c]) if isinstance(row[c], list) else row[c] for c in columns]
        share = Cell(f"{row['share']:.2%}", repr(row["share"]), number=True)
        made.append([*map(cell, front), cell(row["parameters"]), share])
    return Table(anchor, title, "", [*columns, "parameters", "share"], made)


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
    return f"Every estimate has its error{but}. Numbers that did not converge are marked."


def chosen_small(runs: Sequence[Read]) -> str:
    """Say which settings were lowered to save time, and how to run with the defaults; "" if none were."""
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


RESTS_ON = {
    "learning_rate": ("checks", "spectra"),
    "block_learning_rate": ("blocks", "block-map"),
    "negative_curvature": ("checks", "spectra"),
    "condition": ("checks", "spectra"),
    "confidence": ("checks", "spectra"),
    "uneven_layers": ("layers", "block-map"),
    "flat_blocks": ("checks", "block-map"),
    "norm_placement": ("layers", "propagation"),
    "embedding_scale": ("checks", "geometry"),
    "sharp_sequences": ("sequences", ""),
    "steep_sequences": ("sequences", ""),
    "duplicates": ("sequences", ""),
    "batch_choice": ("parts", ""),
    "saturated_attention": ("heads", "geometry"),
    "sinks": ("heads", "geometry"),
    "dead_heads": ("heads", "geometry"),
}
"""For every check the table of the diagnosis and the section with more on it."""


def run_findings(found: Sequence[RunFinding]) -> list[Finding]:
    """Cards with the findings of a training run."""
    return [
        Finding(
            heading=heading(one.name),
            level=severity(one.severity),
            number=rounded(one.value, 3),
            unit=one.unit,
            where=one.where or f"step {one.step}",
            meaning=f"{one.evidence}.",
            advice=one.remedy,
            evidence=f"limit {one.limit:g}: {one.reason}",
            links=[],
        )
        for one in found
    ]


def findings(
    found: Diagnosis, *, anchor: str, tables: Collection[str], there: Sequence[str]
) -> list[Finding]:
    """Return all findings, worst first.

    Args:
        anchor: of the diagnosis; its tables are at `anchor-NAME`.
        tables: names of the diagnosis' tables.
        there: anchors of the sections that the page has.
    """
    made = []
    for check in found.findings:
        own, section = RESTS_ON.get(check.name, ("checks", ""))
        links = [(f"{anchor}-{own}-table", f"table of {own}")] if own in tables else []
        links += [(section, SECTIONS[section].title)] if section in there else []
        made.append(
            Finding(
                heading=heading(check.name),
                level=severity(check.severity),
                number=check.number,
                unit=check.unit,
                where=check.where,
                meaning=check.meaning,
                advice=check.advice,
                evidence=check.evidence,
                links=links,
            )
        )
    return made

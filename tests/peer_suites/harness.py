"""What the plugins share: results of ours are counted in every test, what is not ours is left out by a table.

A test of another library is `expressed` when curvescope computed something in it. The record of a run has,
for every test, what became of it, how many results came from curvescope, and why it was left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

FLIP = "CURVESCOPE_PEERS_FLIP"  # in the environment: every result of ours with the wrong sign
RECORD = "CURVESCOPE_PEERS_RECORD"  # in the environment: where the record is written
UNTOUCHED = "tests what curvescope has no part in: formats, bookkeeping, helpers"

_count = 0


def ours(result: Any) -> Any:
    """A result that curvescope computed, counted; with the wrong sign where the environment asks for it."""
    global _count
    _count += 1
    return -result if os.environ.get(FLIP) else result


class Harness:
    """Leaves out the tests that match a rule (expression in their names, reason), and records the rest."""

    def __init__(self, rules: Iterable[tuple[str, str]]):
        self.rules = [(re.compile(pattern), reason) for pattern, reason in rules]
        self.record: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, left = [], []
        for item in items:
            reason = next((reason for rule, reason in self.rules if rule.search(item.nodeid)), None)
            (kept if reason is None else left).append(item)
            if reason is not None:
                self.record[item.nodeid] = {"outcome": "left out", "reason": reason, "results": 0}
        items[:] = kept
        config.hook.pytest_deselected(items=left)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None]:
        global _count
        _count = 0
        yield
        found = self.record.setdefault(item.nodeid, {"outcome": "skipped", "reason": "skips itself"})
        found["results"] = _count
        if found["outcome"] == "passed" and not _count:
            found.update(outcome="left out", reason=UNTOUCHED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.record[report.nodeid] = {
                "outcome": "left out",
                "reason": f"skips itself: {report.longrepr[2]}",
            }
        elif report.failed:
            words = str(getattr(report.longrepr, "reprcrash", report.longrepr)).strip().splitlines()
            self.record[report.nodeid] = {"outcome": "failed", "reason": words[0] if words else report.when}
        elif report.when == "call" and report.passed:
            self.record.setdefault(report.nodeid, {"outcome": "passed", "reason": ""})

    def pytest_sessionfinish(self) -> None:
        if os.environ.get(RECORD):
            Path(os.environ[RECORD]).write_text(json.dumps(self.record, indent=1), encoding="utf-8")

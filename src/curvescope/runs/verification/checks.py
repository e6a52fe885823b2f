"""Results of the checks of a run's operators: errors with their bounds, and `verification.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from curvescope.core.errors import CurvescopeError
from curvescope.runs.disk.atomic_files import write_atomically

VERIFICATION = "verification.json"


@dataclass(frozen=True)
class ErrorCheck:
    """One comparison: a relative error and its tolerance."""

    name: str
    error: float
    tolerance: float
    words: str

    @property
    def passed(self) -> bool:
        """Return True if the error is within the tolerance and not NaN."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """The checks of one operator."""

    operator: str
    model: str
    dtype: str
    checks: tuple[ErrorCheck, ...]
    left_out: tuple[str, ...] = ()  # checks that are impossible for a sharded model
    kind: str = ""  # eight digits of the digest of layers, loss and engine, without weights

    @property
    def passed(self) -> bool:
        """Return True if all checks passed."""
        return all(check.passed for check in self.checks)

    def plain(self) -> dict[str, Any]:
        """Return a plain dictionary for a file."""
        return {**asdict(self), "passed": self.passed}

    def refusal(self) -> CurvescopeError:
        """Return an error that lists the failed checks."""
        wrong = "; ".join(
            f"{c.name} is off by {c.error:.2e}; rounding explains at most {c.tolerance:.0e} ({c.words})"
            for c in self.checks
            if not c.passed
        )
        return CurvescopeError(
            f"the {self.operator} of {self.model} failed its check, so the run does not use it: {wrong}",
            hint="engine=autograd runs without our kernels; dtype=float64 has less rounding",
        )


def save_verification(folder: Path, verification: Verification) -> None:
    """Write the result to `verification.json`, which has one entry per operator and kind of model."""
    other_entries = [
        entry
        for entry in read_verifications(folder)
        if verification_key(entry) != verification_key(verification.plain())
    ]
    write_atomically(
        folder / VERIFICATION,
        json.dumps([*other_entries, verification.plain()], indent=1, ensure_ascii=False),
    )


def verification_key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    """Key that identifies an entry."""
    return entry["operator"], entry["model"], entry.get("kind", "")


def read_verifications(folder: Path) -> list[dict[str, Any]]:
    """Read the results of the checks of a run; none for older runs."""
    try:
        return json.loads((folder / VERIFICATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []


def describe_errors(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return the errors of all checks in one line; "" without checks."""
    names = {entry["model"] for entry in entries}
    return "; ".join(
        f"{entry['operator']} "
        + (f"of {entry['model']} " if len(names) > 1 else "")
        + ", ".join(
            [f"{c['name']} {c['error']:.0e} (≤ {c['tolerance']:.0e})" for c in entry["checks"]]
            + [f"not {name}" for name in entry.get("left_out", ())]
        )
        for entry in entries
    )

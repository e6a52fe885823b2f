"""What a run found when it checked its operators: errors beside what they may be, and `verification.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from curvescope.core.errors import CurvescopeError
from curvescope.runs.disk.durable import write_whole

VERIFICATION = "verification.json"


@dataclass(frozen=True)
class Check:
    """One comparison: a relative error, and what it may be."""

    name: str
    error: float
    tolerance: float
    words: str

    @property
    def passed(self) -> bool:
        """Whether the error is a number that is small enough."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """The checks of one operator."""

    operator: str
    model: str
    dtype: str
    checks: tuple[Check, ...]
    left_out: tuple[str, ...] = ()  # checks that a whole model would have had
    kind: str = ""  # eight digits of what its products depend on apart from weights: layers, loss, engine

    @property
    def passed(self) -> bool:
        """Whether all of them are."""
        return all(check.passed for check in self.checks)

    def plain(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "passed": self.passed}

    def refusal(self) -> CurvescopeError:
        """The sentence of checks that failed."""
        wrong = "; ".join(
            f"{c.name} is off by {c.error:.2e}, at most {c.tolerance:.0e} is rounding ({c.words})"
            for c in self.checks
            if not c.passed
        )
        return CurvescopeError(
            f"the {self.operator} of {self.model} failed its check, nothing is measured with it: {wrong}",
            hint="engine=autograd runs without our kernels; dtype=float64 has less rounding",
        )


def keep(folder: Path, found: Verification) -> None:
    """Write it to `verification.json`, which has one entry for each operator of each kind of model."""
    others = [one for one in read(folder) if name_of(one) != name_of(found.plain())]
    write_whole(folder / VERIFICATION, json.dumps([*others, found.plain()], indent=1, ensure_ascii=False))


def name_of(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """What tells entries apart."""
    return found["operator"], found["model"], found.get("kind", "")


def read(folder: Path) -> list[dict[str, Any]]:
    """What a run found when it checked its operators; nothing of one that has none, or is older."""
    try:
        return json.loads((folder / VERIFICATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []


def words(found: Sequence[Mapping[str, Any]]) -> str:
    """The errors of all checks in one line; "" where there are none."""
    names = {one["model"] for one in found}
    return "; ".join(
        f"{one['operator']} "
        + (f"of {one['model']} " if len(names) > 1 else "")
        + ", ".join(
            [f"{c['name']} {c['error']:.0e} (≤ {c['tolerance']:.0e})" for c in one["checks"]]
            + [f"not {name}" for name in one.get("left_out", ())]
        )
        for one in found
    )

"""What a diagnosis says: findings, worst first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from curvescope.core.numbers import with_error
from curvescope.core.result import Result

Severity = Literal["fault", "warning", "note", "fine", "not looked at"]
"""Worst first. A note is a number to know or a known phenomenon; what is fine is no finding."""
FOUND = ("fault", "warning", "note")
USUAL = "as healthy models have it"


@dataclass(frozen=True)
class Finding(Result):
    """One check: its number with an error, the limit, and what follows.

    A check finds something where the value is beyond the limit by more than its error.
    """

    name: str
    severity: str  # a Severity
    value: float
    error: float  # one standard error, or the bound that its method gives
    limit: float  # the value is unusual beyond this; nan where nothing is
    unit: str  # what the value is
    where: str  # block, layer, heads or sequences; "" for all
    meaning: str
    advice: str  # "" where there is no reason for any
    evidence: str  # which experiment of ours, which paper
    below: bool = False  # whether unusual is below the limit, not above

    @property
    def found(self) -> bool:
        """Whether there is something to say."""
        return self.severity in FOUND

    @property
    def number(self) -> str:
        """The value with its error."""
        return with_error(self.value, self.error)

    @property
    def excess(self) -> tuple[float, float, float]:
        """Value over limit, with value ∓ error over it too: unusual above 1; nan without a limit.

        Where unusual is below the limit it is the limit over the value.
        """
        if not self.limit > 0 or not math.isfinite(self.value):
            return math.nan, math.nan, math.nan
        error = 0.0 if math.isnan(self.error) else self.error
        ends = [max(self.value + sign * error, 0.0) / self.limit for sign in (0, -1, 1)]
        if self.below:
            ends = [1 / max(end, 1e-12) for end in (ends[0], ends[2], ends[1])]
        return ends[0], ends[1], ends[2]


def judged(finding: Finding) -> Finding:
    """The finding, fine where its value is not beyond the limit by more than its error."""
    error = 0.0 if math.isnan(finding.error) else finding.error
    if finding.below:
        beyond = finding.value + error < finding.limit
    else:
        beyond = finding.value - error > finding.limit
    return finding if beyond else replace(finding, severity="fine", meaning=USUAL, advice="")


def unseen(name: str, why: str) -> Finding:
    """A check that does not apply, with the reason."""
    nan = math.nan
    return Finding(name, "not looked at", nan, nan, nan, "", "", why, "", "")


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; within a severity, farthest beyond the limit first."""
    order = get_args(Severity)

    def place(finding: Finding) -> tuple[int, float]:
        far = finding.excess[0]
        return order.index(finding.severity), -math.inf if math.isnan(far) else -far

    return sorted(findings, key=place)

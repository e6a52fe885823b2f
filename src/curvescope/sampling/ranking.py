"""The order of several numbers that were measured on one sample, and how certain their first place is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from curvescope.core.number_format import one_of
from curvescope.core.result import Result
from curvescope.sampling.statistics import Sampled, log_ratio

NAMED = 3  # rivals that a sentence names


@dataclass(frozen=True)
class Ranking(Result):
    """The largest of several numbers, and those that could be the largest on other data.

    A rival is a number whose 95 % interval of log(first / rival) is not above zero. The interval uses the
    same groups of sequences for both numbers, so that data which raise both do not count.
    """

    names: list[str]  # the largest first
    rivals: list[str]  # in the same order
    num_groups: int

    @property
    def certain(self) -> bool:
        """True if the first place is the same on other data, with 95 % certainty against each other one."""
        return bool(self.names) and self.num_groups > 1 and not self.rivals

    @property
    def words(self) -> str:
        """`E is first on other data too`, or which others may be first."""
        if not self.names:
            return ""
        if self.num_groups < 2:
            return "one sequence does not say whether the order is the same on other data"
        if self.certain:
            return f"{self.names[0]} is first on other data too, with 95 % certainty against each other block"
        return f"on other data of this size {one_of([self.names[0], *self.rivals], NAMED + 1)} may be first"


def rank(numbers: Mapping[str, Sampled]) -> Ranking:
    """Order numbers of one sample from the largest down."""
    names = sorted(numbers, key=lambda name: -numbers[name].value)
    if not names:
        return Ranking([], [], 0)
    first = numbers[names[0]]
    rivals = [name for name in names[1:] if not log_ratio(first, numbers[name])[1] > 0]
    return Ranking(names, rivals, first.num_groups)

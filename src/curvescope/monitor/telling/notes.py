"""What a reader of a run should know: each note once, with the steps at which a count in it was another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

COUNTED = re.compile(r"(.*\bin )(\d+)( entries\b.*)", re.S)
FEW = 4  # counts that are listed one by one


@final
class Notes:
    """Notes in the order in which they came.

    Args:
        texts: those that are there from the beginning.
    """

    def __init__(self, texts: Sequence[str] = ()):
        self._found: dict[tuple[str, str], list[tuple[str, int]]] = {(text, ""): [] for text in texts}

    def add(self, text: str, step: int) -> None:
        """A note of a step; "in 5 entries" is put together with what other steps say of the same."""
        if parts := COUNTED.fullmatch(text):
            self._found.setdefault((parts[1], parts[3]), []).append((parts[2], step))
        else:
            self._found.setdefault((text, ""), [])

    def all(self) -> list[str]:
        """One sentence each."""
        return [f"{before}{_counts(counts)}{after}" for (before, after), counts in self._found.items()]


def _counts(counts: Sequence[tuple[str, int]]) -> str:
    """`186 (step 0), 11 (step 50)`; of many the first and the last."""
    said = [f"{count} (step {step})" for count, step in counts]
    if len(said) <= FEW:
        return ", ".join(said)
    return f"{said[0]} to {said[-1]}, at {len(said)} measurements,"

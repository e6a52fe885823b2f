"""What is said about rounding, next to what was measured; every verdict is computed from intervals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin
from curvescope.studies.quantize.correlations import better, relative_error, rows
from curvescope.studies.quantize.rounding import INPUTS, NEAREST, OWN, Roundings
from curvescope.studies.weight_changes import Interval, over_sequences

if TYPE_CHECKING:
    from curvescope.studies.quantize.study import Quantized

OURS: Origin = ("ours", "ours")
NEAR = 0.2  # of the measured increase
BOTH = "both orders"
FIRST = "first and second order rank the blocks by the measured increase"


def judge(result: Quantized) -> list[Claim]:
    """Predictions first, then methods against each other."""
    bits = [int(b) for b in result.together.bits]
    claims = [_signed(words, found) for words, found in ranked(result).items()]
    errors = {b: relative_error(result, i) for i, b in enumerate(bits)}
    claims.append(_near(errors, len(result.blocks)))
    ways = [
        (
            "weights that are rounded later make up for earlier ones (by inputs)",
            INPUTS,
            NEAREST,
            result.blocks,
        ),
        ("so they do with all blocks rounded together", INPUTS, NEAREST, {"all": result.together}),
        (
            f"the GGN of {', '.join(result.exact)} makes up for more than its inputs do",
            OWN,
            INPUTS,
            result.exact,
        ),
    ]
    for words, one, other, parts in ways:
        if parts:
            claims += _lower(words, list(parts.values()), one, other)
    return claims


def ranked(result: Quantized) -> dict[str, dict[int, Correlation]]:
    """Rank correlations over blocks and differences of two, by what is said about them and by bits."""
    ranks = {(row.bits, row.predictor): row.correlation for row in rows(result)}
    places = {int(b): i for i, b in enumerate(result.together.bits)}
    others = {"the size of the rounding error": "error", "the trace of the GGN times that size": "trace"}
    found = {FIRST: {b: ranks[b, BOTH] for b in places}}
    for words, other in others.items():
        each = {b: better(result, BOTH, other, i) for b, i in places.items()}
        found[f"they rank blocks better than {words} does"] = each
    return found


def _signed(words: str, found: dict[int, Correlation]) -> Claim:
    """It holds if all intervals are above zero, and fails if one is below."""
    published = "ρ > 0" if words == FIRST else "ρ larger"
    measured = ", ".join(f"{one.words} at {b} bits" for b, one in found.items())
    verdict = FAILS if any(one.high < 0 for one in found.values()) else OPEN
    verdict = HOLDS if all(one.low > 0 for one in found.values()) else verdict
    return Claim(words, published, measured, verdict, *OURS)


def _near(found: dict[int, Correlation], blocks: int) -> Claim:
    """Of so many blocks, of which those that rounding does not change are left out."""
    words = f"the prediction is within {100 * NEAR:.0f} % of the measured increase, in the median over blocks"
    measured = ", ".join(
        f"{one.value:.2g} [{one.low:.2g}, {one.high:.2g}] at {b} bits"
        + (f" ({blocks - one.count} of {blocks} without any change)" if one.count < blocks else "")
        for b, one in found.items()
    )
    verdict = FAILS if any(one.low > NEAR for one in found.values()) else OPEN
    verdict = HOLDS if all(one.high < NEAR for one in found.values()) else verdict
    return Claim(words, f"at most {NEAR:g}", measured, verdict, *OURS)


def held_out_differences(parts: Iterable[Roundings], one: str, other: str) -> list[Interval]:
    """Loss by one method less that by another, for each number of bits, on other data: means over blocks."""
    pairs = [(part.at(one), part.at(other)) for part in parts]
    found = np.mean([a.held_out - b.held_out for a, b in pairs], axis=0)
    return [over_sequences(values, pairs[0][0].held_shares) for values in found]


def _lower(words: str, parts: list[Roundings], one: str, other: str) -> list[Claim]:
    """A claim for every number of bits: it holds if the loss is lower on other data, by its interval."""
    claims = []
    for bits, found in zip(parts[0].bits, held_out_differences(parts, one, other), strict=True):
        verdict = HOLDS if found.high < 0 else FAILS if found.low > 0 else OPEN
        said = f"difference of losses {found.words}"
        claims.append(Claim(f"{words}, {bits} bits, on other data", "lower loss", said, verdict, *OURS))
    return claims

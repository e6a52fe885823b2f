"""Every check, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable

from curvescope.studies.diagnose.checks import attention, data, layers, spectrum, steps
from curvescope.studies.diagnose.checks.seen import Seen
from curvescope.studies.diagnose.finding import Finding, sort

CHECKS: dict[str, Callable[[Seen], Finding]] = {
    "learning_rate": steps.learning_rate,
    "block_learning_rate": steps.block_learning_rate,
    "negative_curvature": spectrum.negative_curvature,
    "condition": spectrum.condition,
    "confidence": spectrum.confidence,
    "uneven_layers": layers.uneven_layers,
    "flat_blocks": layers.flat_blocks,
    "norm_placement": layers.norm_placement,
    "embedding_scale": layers.embedding_scale,
    "sharp_sequences": data.sharp_sequences,
    "steep_sequences": data.steep_sequences,
    "duplicates": data.duplicates,
    "batch_choice": data.batch_choice,
    "saturated_attention": attention.saturated_attention,
    "sinks": attention.sinks,
    "dead_heads": attention.dead_heads,
}


def look(seen: Seen) -> list[Finding]:
    """What all checks say, worst first."""
    return sort(check(seen) for check in CHECKS.values())

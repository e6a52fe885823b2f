"""The captions of the study `activations`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.parts import TITLES

if TYPE_CHECKING:
    from curvescope.studies.activations.study import Activations


def captions(result: Activations) -> dict[str, str]:
    """What each figure and table shows."""
    exact = all(p.exact for p in result.points)
    how = "Blocks were written out." if exact else "By Lanczos; traces are estimated, ± is a standard error."
    what = (
        f"the {TITLES[result.matrix]} of the summed loss of a token's sequence in the state x of that token "
        "alone, in nats per squared unit of x"
    )
    return {
        "depth": f"Along the depth: λ_max of {what} (left), the same times |x|², so that steps are measured "
        "in units of x (middle), and the trace (right). Lines are medians over tokens, bands hold the middle "
        "half.",
        "positions": "Mean over sequences of log₁₀ λ_max |x|², by position and point. A causal model's early "
        "tokens are read by all later ones, its last ones by nobody else. Gray: not above zero.",
        "text": "The first sequence, each token colored by its λ_max |x|² at three points: where the loss "
        "of this text hangs on the state of a single token. Gray: not above zero.",
        "tokens": f"One row for each token and point: ends of the spectrum and trace of {what}. {how} "
        "towards and away: the tokens whose logits the sharpest direction raises on the direct path, on the "
        "side where the loss falls, and on the other.",
        "points": "Medians over tokens at each point, and the share of tokens whose trace is negative.",
    }

"""Products that ranks divide among them, against those that one of them makes alone."""

from __future__ import annotations

from curvescope.core.ranks import from_first, place
from curvescope.core.seeds import probes
from curvescope.operators.base import CurvatureOperator
from curvescope.runs.verified.checks import Check
from curvescope.runs.verified.plain import SEED
from curvescope.runs.verified.rounding import TOLERANCE, norm

MOST = 8  # columns


def check_ranks(op: CurvatureOperator) -> Check:
    """Of one column, and of one for each rank: by sequences or by columns, as they are divided."""
    _, ranks = place()
    V = probes(op.shape[0], min(ranks, MOST), seed=SEED, dtype=op.dtype, device=op.device)
    one, all_of_them = op @ V[:, :1], op @ V

    def gap() -> float:
        alone = (op @ V).double()
        sizes = [norm(alone[:, :1]), norm(alone)]
        gaps = [norm(one.double() - alone[:, :1]), norm(all_of_them.double() - alone)]
        return max(g / s if s else g for g, s in zip(gaps, sizes, strict=True))

    words = f"products that {ranks} ranks make together against those of one alone, relative to them"
    return Check("ranks", from_first(gap), TOLERANCE[op.dtype], words)

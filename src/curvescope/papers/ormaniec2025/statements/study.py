"""What the paper and its slides state, checked: exponents, structure, and where a rate is only a bound.

Everything is exact, on small random instances in float64: closed forms of one head, and dense blocks of small
networks for depth and norms. `low` and `high` are the least and largest value over the instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from curvescope.core.progress import Progress
from curvescope.papers.claims import Claim
from curvescope.papers.ormaniec2025.statements import data, depth, softmax, weights
from curvescope.papers.ormaniec2025.statements.rows import FAILS, OURS, VERDICTS, Group
from curvescope.papers.setting import FigureConfig
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NUM_HEADS = {"quick": 5, "full": 20}
NUM_MODELS = {"quick": 2, "full": 5}


@dataclass(frozen=True)
class Config(FigureConfig):
    """The profile sets the number of random heads and networks."""


@dataclass(frozen=True)
class Statements(Shown):
    """All groups of statements."""

    num_heads: int
    num_models: int
    groups: dict[str, Group]

    def claims(self) -> list[Claim]:
        """A line per group, and one for every statement that fails."""
        found = []
        for group in self.groups.values():
            counts = Counter(row.verdict for row in group.rows)
            words = ", ".join(f"{counts[v]} × {v.partition(',')[0]}" for v in VERDICTS if counts[v])
            worst = max(counts, key=VERDICTS.index)
            found.append(Claim(group.title, f"{len(group.rows)} statements", words, worst))
        return found + [
            Claim(
                row.statement, f"{row.claimed:g}", f"{row.measured:.3g}", row.verdict, row.where,
                "ours" if row.where == OURS else "paper",
            )
            for group in self.groups.values()
            for row in group.rows
            if row.verdict == FAILS
        ]  # fmt: skip

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return [(c.claim, c.published, f"{c.measured}") for c in self.claims()]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        over = f"over {self.num_heads} random heads"
        return {
            "statements_data": f"One softmax head with tokens σX. Top: norms of its blocks (one head), with "
            f"the stated powers in gray. Middle: local slopes, mean {over}; gray lines are the stated "
            "exponents, which hold for small scores and are bounds beyond. Bottom: the same for tokens of "
            "mean zero, where all blocks of H_o grow as σ⁶.",
            "statements_weights": f"Exponents in the weights and in the attention moments, measured (mean "
            f"{over}) with the claimed one in brackets; a dash is a block that is zero.",
            "statements_softmax": "Left: how much larger the block of H_o of W_V is than that of W_Q, with "
            "softmax and without; a line per head. Middle: how negative the Hessian over the scores' weights "
            "is, with W_Q and W_K and with their product. Right: entries of the paper's model (5, 25, 50, "
            "75, 95 %).",
            "statements_depth": "Left: the block of H_o of the first W_Q of linear attention, softmax "
            "attention with skips, and the first layer of a linear MLP. Right: one layer with Pre-LN (solid) "
            "and without a norm (dashed).",
            "statements": f"Every statement: claimed, measured as the mean of instances ({self.num_heads} "
            f"heads or {self.num_models} networks and their layers) with the least and the largest, and a "
            "verdict that follows from these numbers.",
        }

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row per statement."""
        import pandas as pd

        columns = ("statement", "where", "claimed", "measured", "low", "high", "verdict", "note")
        rows = [{c: getattr(row, c) for c in columns} for g in self.groups.values() for row in g.rows]
        return {"statements": pd.DataFrame(rows, columns=list(columns))}

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.papers.ormaniec2025.statements import figures

        return figures.draw(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Statements:
    """Measure the groups, those of `state` excepted."""
    heads, models = NUM_HEADS[cfg.profile], NUM_MODELS[cfg.profile]
    groups = _groups(heads, models, cfg.device)
    pieces = [Piece(name, measure) for name, measure in groups.items()]
    found = work_through(pieces, progress=progress, state=state)
    return Statements(heads, models, {name: found.take(Group, name) for name in groups})


def _groups(heads: int, models: int, device: str) -> dict[str, Callable[[], Group]]:
    return {
        "data": lambda: data.growth_in_data(heads),
        "saturation": lambda: data.saturation(heads),
        "targets": lambda: data.scaled_targets(heads),
        "centering": lambda: data.centering(heads),
        "weights": lambda: weights.growth_in_weights(heads),
        "moments": lambda: weights.attention_moments(heads),
        "softmax": lambda: softmax.heterogeneity(heads, device),
        "parameterization": lambda: softmax.parameterization(heads),
        "linear": lambda: softmax.linear(heads),
        "depth": lambda: depth.depth(models),
        "pre_norm": lambda: depth.pre_norm(models),
    }

"""How far bounds of the Hessian are from the truth, and where published ones are no bounds.

The norm of the Hessian of attention heads, post-norm blocks, stacks of them and fully connected ReLU networks
is computed exactly, next to the bounds of petrov2025 and its precursor as they are printed and as they are
corrected, and so is everything that the printed proofs estimate on the way. Instances are random, over scales
of data and weights, or made to be difficult. Nothing is trained and no model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from curvescope.core.config import Config as Settings
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.runs.shown import Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.bounds import analysis
from curvescope.studies.bounds.analysis import (
    Comparisons,
    Row,
    Sizes,
    block_estimates,
    compare_block,
    compare_head,
    compare_network,
    compare_stack,
    head_estimates,
    joined,
    norm_estimates,
    slack,
    tagged,
)

if TYPE_CHECKING:
    import pandas as pd

SHARPNESS = (0.0, 1.0, 2.0, 3.0, 4.0)
ROW_WIDTHS = (3, 6, 12, 24)
LARGEST = 2000  # parameters of a Hessian that is written out
MOST_ROWS = 4096  # of a block's second derivative in Kronecker form, which takes their square for a while


@dataclass(frozen=True)
class Config(Settings):
    """Which instances. The defaults take half a minute on a CPU."""

    num_seeds: int = setting(6, "random instances of every kind at every scale")
    weight_scales: tuple[float, ...] = setting((0.1, 0.3, 1.0, 3.0), "standard deviation of weights · √rows")
    data_scales: tuple[float, ...] = setting((0.3, 1.0, 3.0, 10.0), "standard deviation of tokens")
    query_scales: tuple[float, ...] = setting((1.0, 10.0, 100.0, 1000.0), "of W_Q where W_K = 0")
    output_scales: tuple[float, ...] = setting((1.0, 0.1, 0.01, 0.0), "what W_2 of a block is multiplied by")
    depths: tuple[int, ...] = setting((1, 2, 4), "blocks of a stack")
    num_layers: tuple[int, ...] = setting((1, 2, 4), "layers of a fully connected ReLU network")
    num_tokens: int = setting(6, "tokens L")
    width: int = setting(4, "width d of a token")
    head_size: int = setting(3, "d_K")
    hidden: int = setting(6, "width of feed-forward layers and of networks")
    seed: int = setting(0, "of the first instance; the others follow")

    def __post_init__(self) -> None:
        scales = ("weight_scales", "data_scales", "query_scales", "output_scales")
        as_tuples(self, *scales, "depths", "num_layers")
        super().__post_init__()
        at_least(self, 1, "num_seeds", "num_tokens", "head_size", "hidden")
        at_least(self, 3, "width")
        for name in (*scales, "depths", "num_layers"):
            if not getattr(self, name):
                raise UsageError(f"{name}: expected at least one number, got none")
        for name in scales:
            if any(scale < 0 or (scale == 0 and name != "output_scales") for scale in getattr(self, name)):
                raise UsageError(f"{name}: expected positive numbers, got {getattr(self, name)}")
        for name in ("depths", "num_layers"):
            if any(count < 1 for count in getattr(self, name)):
                raise UsageError(f"{name}: expected numbers from 1 on, got {getattr(self, name)}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Raise where a Hessian, or a second derivative in Kronecker form, is too large to be written out."""
        L, d, m = self.num_tokens, self.width, self.hidden
        block = 2 * d * self.head_size + d * d + 2 * d * m
        most = max([block * max(self.depths), *(d * m + m * m * n for n in self.num_layers)])
        if most > LARGEST:
            raise UsageError(
                f"expected Hessians of at most {LARGEST} parameters, which are written out, got {most}",
                hint="make width, hidden, depths or num_layers smaller",
            )
        rows = L * d * d * max(d, m, self.head_size)
        if rows > MOST_ROWS:
            raise UsageError(
                f"expected second derivatives of at most {MOST_ROWS} rows, num_tokens · width² · the largest "
                f"of width, hidden and head_size, got {rows}",
                hint="make num_tokens, width or hidden smaller",
            )

    @property
    def sizes(self) -> Sizes:
        """Of the instances."""
        return Sizes(self.num_tokens, self.width, self.head_size, self.hidden)


@dataclass(frozen=True)
class Tried(Result):
    """One kind of instance at one scale."""

    bounds: Comparisons  # of norms of Hessians
    estimates: Comparisons  # of what proofs use


@dataclass(frozen=True)
class Bounds(Shown):
    """Every bound next to the truth."""

    num_seeds: int
    bounds: Comparisons
    estimates: Comparisons

    def tables(self) -> dict[str, pd.DataFrame]:
        """Every comparison, and the slack of every bound and estimate."""
        return {
            "bounds": self.bounds.to_frame(),
            "slack": slack(self.bounds),
            "estimates": slack(self.estimates),
        }


class Kind(NamedTuple):
    """A kind of instance over its scales: how it is compared, given scale and seed."""

    instance: str
    varied: str
    scales: tuple[float, ...]
    tried: Callable[[float, int], tuple[list[Row], list[Row]]]
    random: bool = True


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Bounds:
    """Compare every bound with the truth.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    pieces = [
        Piece(f"{kind.instance}, {kind.varied} {scale}", partial(_try, cfg, kind, scale))
        for kind in kinds(cfg)
        for scale in dict.fromkeys(map(float, kind.scales))
    ]
    found = work_through(pieces, progress=progress, state=state)
    tried = [found.take(Tried, piece.name) for piece in pieces]
    return Bounds(
        num_seeds=cfg.num_seeds,
        bounds=joined(one.bounds for one in tried),
        estimates=joined(one.estimates for one in tried),
        notes=[analysis.NO_STACK],
    )


def kinds(cfg: Config) -> Iterator[Kind]:
    """All kinds of instances."""
    sizes = cfg.sizes

    def head(make: Callable[..., analysis.Head], name: str):
        def tried(scale: float, seed: int) -> tuple[list[Row], list[Row]]:
            one = make(sizes, seed, **{name: scale})
            return compare_head(one), head_estimates(one)

        return tried

    def block(make: Callable[..., analysis.Block], name: str):
        def tried(scale: float, seed: int) -> tuple[list[Row], list[Row]]:
            one = make(sizes, seed, **{name: scale})
            return compare_block(one), block_estimates(one)

        return tried

    yield Kind(analysis.HEAD, analysis.WEIGHTS, cfg.weight_scales, head(analysis.random_head, "weight_scale"))
    yield Kind(analysis.HEAD, analysis.DATA, cfg.data_scales, head(analysis.random_head, "data_scale"))
    yield Kind(analysis.KEYLESS, "W_Q", cfg.query_scales, head(analysis.keyless_head, "query_scale"))
    yield Kind(analysis.CLUSTERS, "sharpness", SHARPNESS, _clusters, random=False)
    yield Kind(
        analysis.BLOCK, analysis.WEIGHTS, cfg.weight_scales, block(analysis.random_block, "weight_scale")
    )
    yield Kind(analysis.BLOCK, analysis.DATA, cfg.data_scales, block(analysis.random_block, "data_scale"))
    yield Kind(analysis.CLOSING, "W_2", cfg.output_scales, block(analysis.closing_block, "output_scale"))
    yield Kind(analysis.ROW, "width", ROW_WIDTHS, _row)
    yield Kind(analysis.STACK, analysis.DEPTH, cfg.depths, partial(_stack, sizes))
    for n in dict.fromkeys(cfg.num_layers):
        yield Kind(analysis.network(n), analysis.WEIGHTS, cfg.weight_scales, partial(_network, sizes, n))


def _try(cfg: Config, kind: Kind, scale: float) -> Tried:
    """All seeds of a kind at one scale; one where nothing is random."""
    seeds = range(cfg.seed, cfg.seed + (cfg.num_seeds if kind.random else 1))
    found = {seed: kind.tried(scale, seed) for seed in seeds}
    parts = [
        tagged(kind.instance, kind.varied, scale, {seed: rows[i] for seed, rows in found.items()})
        for i in (0, 1)
    ]
    return Tried(*parts)


def _clusters(scale: float, seed: int) -> tuple[list[Row], list[Row]]:
    one = analysis.two_clusters(sharpness=scale)
    return compare_head(one), head_estimates(one)


def _row(scale: float, seed: int) -> tuple[list[Row], list[Row]]:
    return [], norm_estimates(analysis.random_row(seed, width=int(scale)))


def _stack(sizes: Sizes, scale: float, seed: int) -> tuple[list[Row], list[Row]]:
    return compare_stack(analysis.random_stack(sizes, seed, depth=int(scale))), []


def _network(sizes: Sizes, num_layers: int, scale: float, seed: int) -> tuple[list[Row], list[Row]]:
    one = analysis.random_network(sizes, seed, num_layers=num_layers, weight_scale=scale)
    return compare_network(one), []

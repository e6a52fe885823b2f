"""Bounds of the Hessian compared with exact norms, and the cases in which published bounds fail.

The study computes the exact Hessian norm of attention heads, post-norm blocks, stacks of blocks and fully
connected ReLU networks. It compares them with the bounds of petrov2025 and its precursor, as printed and as
corrected, and does the same for every intermediate estimate of the printed proofs. Instances are random, over
scales of data and weights, or chosen to be difficult. The study trains nothing and loads no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from curvescope.core.config import Config as Settings
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Shown, Tables
from curvescope.studies.bounds import analysis
from curvescope.studies.common.columns import stack_tables

SHARPNESS = (0.0, 1.0, 2.0, 3.0, 4.0)
ROW_WIDTHS = (3, 6, 12, 24)
LARGEST = 2000  # maximum number of parameters of a full Hessian
# Maximum rows of a block's second derivative in Kronecker form; memory grows with their square.
MOST_ROWS = 4096


@dataclass(frozen=True)
class Config(Settings):
    """Instances to compare. The defaults take half a minute on a CPU."""

    num_seeds: int = setting(6, "random instances of every kind at every scale", least=1)
    weight_scales: tuple[float, ...] = setting((0.1, 0.3, 1.0, 3.0), "standard deviation of weights · √rows")
    data_scales: tuple[float, ...] = setting((0.3, 1.0, 3.0, 10.0), "standard deviation of tokens")
    query_scales: tuple[float, ...] = setting(
        (1.0, 10.0, 100.0, 1000.0), "scales of W_Q in heads with W_K = 0"
    )
    output_scales: tuple[float, ...] = setting((1.0, 0.1, 0.01, 0.0), "factors of a block's W_2")
    depths: tuple[int, ...] = setting((1, 2, 4), "numbers of blocks in a stack")
    num_layers: tuple[int, ...] = setting((1, 2, 4), "numbers of layers of a fully connected ReLU network")
    num_tokens: int = setting(6, "tokens L", least=1)
    width: int = setting(4, "width d of a token", least=3)
    head_size: int = setting(3, "d_K", least=1)
    hidden: int = setting(6, "width of feed-forward layers and of networks", least=1)
    seed: int = setting(0, "seed of the first instance; the others use the next seeds")

    def __post_init__(self) -> None:
        scales = ("weight_scales", "data_scales", "query_scales", "output_scales")
        super().__post_init__()
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
        """Raise if a Hessian, or a second derivative in Kronecker form, is too large for a full matrix."""
        L, d, m = self.num_tokens, self.width, self.hidden
        block = 2 * d * self.head_size + d * d + 2 * d * m
        most = max([block * max(self.depths), *(d * m + m * m * n for n in self.num_layers)])
        if most > LARGEST:
            raise UsageError(
                f"expected Hessians of at most {LARGEST} parameters, because they are stored as full "
                f"matrices, got {most}",
                hint="reduce width, hidden, depths or num_layers",
            )
        rows = L * d * d * max(d, m, self.head_size)
        if rows > MOST_ROWS:
            raise UsageError(
                f"expected second derivatives of at most {MOST_ROWS} rows, num_tokens · width² · the largest "
                f"of width, hidden and head_size, got {rows}",
                hint="reduce num_tokens, width or hidden",
            )

    @property
    def sizes(self) -> analysis.Sizes:
        """Sizes of the instances."""
        return analysis.Sizes(self.num_tokens, self.width, self.head_size, self.hidden)


@dataclass(frozen=True)
class Tried(Result):
    """One kind of instance at one scale."""

    bounds: analysis.Comparisons  # bounds of Hessian norms
    estimates: analysis.Comparisons  # estimates within proofs


@dataclass(frozen=True)
class Bounds(Shown):
    """Bounds and estimates next to the exact norms."""

    num_seeds: int
    bounds: analysis.Comparisons
    estimates: analysis.Comparisons

    def tables(self) -> Tables:
        """Return every comparison, and the slack of every bound and estimate."""
        return {
            "bounds": self.bounds.to_frame(),
            "slack": analysis.slack(self.bounds),
            "estimates": analysis.slack(self.estimates),
        }


TwoTables = tuple[list[analysis.BoundRow], list[analysis.BoundRow]]
"""Rows about bounds of Hessian norms, and about estimates within proofs."""


class InstanceKind(NamedTuple):
    """A kind of instance, its scales, and the function that compares one instance, given scale and seed."""

    instance: str
    varied: str
    scales: tuple[float, ...]
    tried: Callable[[float, int], TwoTables]
    random: bool = True


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Bounds:
    """Compare every bound with the truth."""
    pieces = [
        Piece(f"{kind.instance}, {kind.varied} {scale}", partial(_try, cfg, kind, scale))
        for kind in kinds(cfg)
        for scale in dict.fromkeys(map(float, kind.scales))
    ]
    found = work_through(pieces, progress=progress, state=state)
    tried = [found.take(Tried, piece.name) for piece in pieces]
    return Bounds(
        num_seeds=cfg.num_seeds,
        bounds=stack_tables(one.bounds for one in tried),
        estimates=stack_tables(one.estimates for one in tried),
        notes=[analysis.NO_STACK],
    )


def kinds(cfg: Config) -> Iterator[InstanceKind]:
    """All kinds of instances."""
    sizes = cfg.sizes

    def head(make: Callable[..., analysis.HeadInstance], name: str):
        return lambda scale, seed: _head(make(sizes, seed, **{name: scale}))

    def block(make: Callable[..., analysis.BlockInstance], name: str):
        return lambda scale, seed: _block(make(sizes, seed, **{name: scale}))

    yield InstanceKind(
        analysis.HEAD, analysis.WEIGHTS, cfg.weight_scales, head(analysis.random_head, "weight_scale")
    )
    yield InstanceKind(
        analysis.HEAD, analysis.DATA, cfg.data_scales, head(analysis.random_head, "data_scale")
    )
    yield InstanceKind(analysis.KEYLESS, "W_Q", cfg.query_scales, head(analysis.keyless_head, "query_scale"))
    yield InstanceKind(analysis.CLUSTERS, "sharpness", SHARPNESS, _clusters, random=False)
    yield InstanceKind(
        analysis.BLOCK, analysis.WEIGHTS, cfg.weight_scales, block(analysis.random_block, "weight_scale")
    )
    yield InstanceKind(
        analysis.BLOCK, analysis.DATA, cfg.data_scales, block(analysis.random_block, "data_scale")
    )
    yield InstanceKind(
        analysis.CLOSING, "W_2", cfg.output_scales, block(analysis.closing_block, "output_scale")
    )
    yield InstanceKind(analysis.ROW, "width", ROW_WIDTHS, _row)
    yield InstanceKind(analysis.STACK, analysis.DEPTH, cfg.depths, partial(_stack, sizes))
    for n in dict.fromkeys(cfg.num_layers):
        yield InstanceKind(
            analysis.network(n), analysis.WEIGHTS, cfg.weight_scales, partial(_network, sizes, n)
        )


def _try(cfg: Config, kind: InstanceKind, scale: float) -> Tried:
    """Compare all seeds of a kind at one scale; one seed if nothing is random."""
    seeds = range(cfg.seed, cfg.seed + (cfg.num_seeds if kind.random else 1))
    found = {seed: kind.tried(scale, seed) for seed in seeds}
    parts = [
        analysis.tagged(kind.instance, kind.varied, scale, {seed: rows[i] for seed, rows in found.items()})
        for i in (0, 1)
    ]
    return Tried(*parts)


def _head(one: analysis.HeadInstance) -> TwoTables:
    return analysis.compare_head(one), analysis.head_estimates(one)


def _block(one: analysis.BlockInstance) -> TwoTables:
    return analysis.compare_block(one), analysis.block_estimates(one)


def _clusters(scale: float, seed: int) -> TwoTables:
    return _head(analysis.two_clusters(sharpness=scale))


def _row(scale: float, seed: int) -> TwoTables:
    return [], analysis.norm_estimates(analysis.random_row(seed, width=int(scale)))


def _stack(sizes: analysis.Sizes, scale: float, seed: int) -> TwoTables:
    return analysis.compare_stack(analysis.random_stack(sizes, seed, depth=int(scale))), []


def _network(sizes: analysis.Sizes, num_layers: int, scale: float, seed: int) -> TwoTables:
    one = analysis.random_network(sizes, seed, num_layers=num_layers, weight_scale=scale)
    return analysis.compare_network(one), []

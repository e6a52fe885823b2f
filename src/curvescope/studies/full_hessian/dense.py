"""The Hessian written out: from products with all unit vectors, and what is kept of it.

The matrix is symmetric, so the columns of a block are computed only at rows of blocks behind it on the way to
the output. Most columns belong to the feed-forward network, and a product that begins and ends behind the
attention does not run it: this takes half the time of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from curvescope.algorithms.columns import columns_at_once, to_numpy
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.studies.full_hessian.stripe import stripe
from curvescope.studies.full_hessian.training import PATH
from curvescope.viz.matrix import colors

ATTENTION = ("L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O")
CELL = 4  # entries along a side of a pixel of the large picture


@dataclass(frozen=True)
class Dense(Result):
    """The Hessian of one network at one time: numbers for every pair of blocks, and pictures."""

    names: list[str]  # b blocks, from input to output
    sizes: list[int]
    loss: float
    frobenius: np.ndarray  # (b, b), as the next two
    brightness: np.ndarray  # mean of log10(|entry| + 1e-6)
    max_abs: np.ndarray
    stripe_ratio: float
    stripe_share: float
    picture: np.ndarray  # colors, means over cells of one pair of blocks each; (0, 0) where it is not drawn
    attention: np.ndarray  # the entries between matrices of attention; (0, 0) likewise

    @property
    def rms(self) -> np.ndarray:
        """(b, b) root mean square entry of every pair of blocks."""
        return self.frobenius / np.sqrt(np.outer(self.sizes, self.sizes))

    @property
    def norm(self) -> float:
        """‖H‖_F."""
        return float(np.linalg.norm(self.frobenius))

    @property
    def pixels(self) -> list[int]:
        """Pixels of each block in the picture."""
        return [-(-size // CELL) for size in self.sizes]

    def pick(self, values: np.ndarray, one: str, two: str) -> float:
        """A number of a pair of blocks, by their names."""
        return float(values[self.names.index(one), self.names.index(two)])


def written_out(problem: Problem, names: Sequence[str]) -> np.ndarray:
    """The matrix over these blocks, in their order: (n, n), exactly symmetric."""
    H = Hessian(problem)
    stops = np.cumsum([problem.model.blocks[name].size for name in names]).tolist()
    where = {
        name: slice(stop - problem.model.blocks[name].size, stop)
        for name, stop in zip(names, stops, strict=True)
    }
    found = np.empty((stops[-1], stops[-1]), dtype=np.float64 if problem.dtype.itemsize == 8 else np.float32)
    for i, name in track(list(enumerate(names)), "columns of the Hessian"):
        part = H.block(list(names[i:]), [name])
        columns = to_numpy(part.to_dense(chunk=columns_at_once(part)))
        for row, place in part.space.slices.items():
            found[where[row], where[name]] = columns[place]
            found[where[name], where[row]] = columns[place].T
        own = found[where[name], where[name]]
        found[where[name], where[name]] = (own + own.T) / 2
    if not np.isfinite(found).all():
        raise CurvescopeError("the Hessian has entries that are no numbers", hint="use a smaller lr")
    return found


def measure(problem: Problem, *, keep: bool) -> Dense:
    """Everything about the Hessian of a one-block network; pictures too where they are to be kept."""
    names = [name for name in PATH if name in problem.model.blocks]
    sizes = [problem.model.blocks[name].size for name in names]
    H = written_out(problem, names)
    starts = np.cumsum([0, *sizes[:-1]])
    where = {name: slice(start, start + size) for name, start, size in zip(names, starts, sizes, strict=True)}
    log = colors(H)
    found = stripe(H[where["L0.W_Q"], where["L0.W_K"]], problem.model.facts["d_model"])
    inside = slice(where[ATTENTION[0]].start, where[ATTENTION[-1]].stop)
    none = np.zeros((0, 0), np.float32)
    return Dense(
        names=names,
        sizes=sizes,
        loss=problem.loss_value(),
        frobenius=np.sqrt(_sums(np.square(H, dtype=np.float64), starts)),
        brightness=_sums(log, starts) / np.outer(sizes, sizes),
        max_abs=np.maximum.reduceat(np.maximum.reduceat(np.abs(H), starts, axis=0), starts, axis=1),
        stripe_ratio=found.ratio,
        stripe_share=found.share,
        picture=pooled(log, sizes).astype(np.float32) if keep else none,
        attention=H[inside, inside].astype(np.float32) if keep else none,
    )


def pooled(values: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Means over cells of CELL × CELL entries, or what is left of them at the end of a block."""
    starts, stop = [], 0
    for size in sizes:
        starts += range(stop, stop + size, CELL)
        stop += size
    counts = np.diff([*starts, stop])
    return _sums(values, np.array(starts)) / np.outer(counts, counts)


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sums over rectangles that begin at `starts`, in both directions."""
    rows = np.add.reduceat(values, starts, axis=0, dtype=np.float64)
    return np.add.reduceat(rows, starts, axis=1)

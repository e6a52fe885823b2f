"""Models, checkpoints or data sets side by side, each against the first: how their curvature differs.

Every side is measured with the same random vectors on the same sample of the data, one model in memory at a
time: H, its GGN H_o and H_f = H − H_o as a whole (`gap.pair`), and every diagonal block of H that
is chosen (`algorithms.blocks.probes`). Blocks are matched by name. Pieces are stored in `state` as they are
done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.blocks.probes import OwnProbes, own_probes
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.compare import tables, words
from curvescope.studies.compare.quantities import OF_BLOCKS, QUANTITIES, Estimate
from curvescope.studies.compare.settings import Asked, Config
from curvescope.studies.gap.pair import ALL, Pair, measure_pair
from curvescope.studies.setting import make_problem, notes_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MATRICES = ("E", "P", "L*.W_*", "U", "W_*")  # the blocks by default; all where none is there


@dataclass(frozen=True)
class Side(Result):
    """One model on one set of data."""

    name: str
    model: str
    data: str
    num_terms: float
    num_parameters: int
    whole: Pair
    blocks: dict[str, OwnProbes]
    sizes: np.ndarray  # entries of each block

    def quantity(self, name: str, block: str = "") -> Estimate:
        """One of QUANTITIES, or of OF_BLOCKS of a block."""
        return OF_BLOCKS[name](self.blocks[block]) if block else QUANTITIES[name](self.whole)


@dataclass(frozen=True)
class Comparison(Shown):
    """All sides; the first is what others are compared with."""

    loss_name: str
    sides: list[Side]
    alike: bool  # whether all saw the same tokens
    on_data: bool | None = None  # whether sides are data sets; None: as the names of their data tell

    @property
    def blocks(self) -> list[str]:
        """Blocks that all sides have, in the order of the first."""
        return [name for name in self.sides[0].blocks if all(name in side.blocks for side in self.sides)]

    @property
    def alone(self) -> dict[str, list[str]]:
        """Blocks that some side does not have, by the sides that have them."""
        shared = set(self.blocks)
        found = {side.name: [name for name in side.blocks if name not in shared] for side in self.sides}
        return {name: blocks for name, blocks in found.items() if blocks}

    def difference(self, side: int, name: str, block: str = "") -> Estimate:
        """A quantity of a side less that of the first."""
        return self.sides[side].quantity(name, block).minus(self.sides[0].quantity(name, block))

    def ratio(self, side: int, name: str, block: str = "") -> Estimate:
        """A quantity of a side over that of the first."""
        return self.sides[side].quantity(name, block).over(self.sides[0].quantity(name, block))

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return words.summary(self)

    def subjects(self) -> list[str]:
        """The models, or the model on each of the data sets."""
        models, data = ({getattr(side, what) for side in self.sides} for what in ("model", "data"))
        on_data = len(models) == 1 and len(data) > 1 if self.on_data is None else self.on_data
        return [f"{side.model} on {side.name}" if on_data else side.name for side in self.sides]

    def opening(self) -> str:
        """What is larger, what is smaller, what is not decided."""
        return words.opening(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Differences, sides, blocks, and blocks without a partner."""
        return tables.of(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.compare import figures

        return figures.draw(self)


class Seen(NamedTuple):
    """What is known of a side before it is measured."""

    asked: Asked
    model: str
    data: str
    loss_name: str
    num_terms: float
    num_parameters: int
    blocks: dict[str, int]  # their entries
    batches: str  # fingerprints
    contents: str
    notes: list[str]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Comparison:
    """Measure every side.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    seen = [look(cfg, asked) for asked in cfg.asked()]

    @lru_cache(maxsize=1)
    def problem(side: int) -> Problem:
        return make_problem(seen[side].asked.cfg)

    pieces = [piece for side in range(len(seen)) for piece in _pieces(cfg, seen, side, problem)]
    contents = fingerprint(*(one.contents for one in seen))
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    sides = [_side(one, i, found) for i, one in enumerate(seen)]
    alike = len({one.batches for one in seen}) == 1
    result = Comparison(seen[0].loss_name, sides, alike, on_data=len(cfg.datasets) > 1)
    return replace(result, notes=words.notes(cfg, result, _notes(seen)))


def look(cfg: Config, asked: Asked) -> Seen:
    """Load a side, check it, and let it go."""
    problem = make_problem(asked.cfg)
    return Seen(
        asked,
        model=problem.model.name,
        data=problem.batches.name,
        loss_name=problem.loss.name,
        num_terms=problem.num_terms,
        num_parameters=problem.model.size_of(*problem.space()),
        blocks=chosen_blocks(cfg, problem),
        batches=fingerprint(problem.batches),
        contents=fingerprint(problem.model, problem.batches),
        notes=notes_of(asked.cfg, problem),
    )


def chosen_blocks(cfg: Config, problem: Problem) -> dict[str, int]:
    """The blocks that are compared, with their entries; a glob that matches nothing is an error."""
    chosen = problem.space(*(cfg.blocks or ("*",)))
    blocks = {block.name: problem.model.size_of(block) for block in chosen}
    matrices = {n: size for n, size in blocks.items() if any(fnmatchcase(n, glob) for glob in MATRICES)}
    return blocks if cfg.blocks or not matrices else matrices


def _pieces(cfg: Config, seen: Sequence[Seen], side: int, problem: Callable[[int], Problem]) -> list[Piece]:
    """The whole of a side, then its blocks."""
    name = seen[side].asked.name

    def whole() -> Result:
        return measure_pair(problem(side), ALL, cfg.effort(), keep=True)

    def of_block(block: str) -> Result:
        return own_probes(
            Hessian(problem(side), block),
            num_probes=cfg.num_block_probes,
            num_steps=cfg.num_block_steps,
            max_exact=cfg.max_exact,
            seed=cfg.seed,
        )

    found = [Piece(f"side{side}.whole", whole, f"{name}: H, GGN and functional Hessian")]
    for number, block in enumerate(seen[side].blocks):
        found.append(Piece(f"side{side}.block{number}", partial(of_block, block), f"{name}: {block}"))
    return found


def _side(one: Seen, number: int, found: Finished) -> Side:
    return Side(
        name=one.asked.name,
        model=one.model,
        data=one.data,
        num_terms=one.num_terms,
        num_parameters=one.num_parameters,
        whole=found.take(Pair, f"side{number}.whole"),
        blocks={name: found.take(OwnProbes, f"side{number}.block{i}") for i, name in enumerate(one.blocks)},
        sizes=np.array(list(one.blocks.values())),
    )


def _notes(seen: Sequence[Seen]) -> list[str]:
    """Those of all sides as they are, those of some with their names."""
    shared = [note for note in seen[0].notes if all(note in one.notes for one in seen)]
    return shared + [f"{one.asked.name}: {note}" for one in seen for note in one.notes if note not in shared]

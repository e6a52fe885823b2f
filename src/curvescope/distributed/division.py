"""Divide products among ranks that all have the full data: by sequences, or by columns.

A product with k columns over S sequences on R ranks is divided in one of two ways:

    data    each rank applies its share of the sequences to all columns, and the results are added
    probes  each rank applies all sequences to its share of the columns; other columns are zero in its sum

Either way the sum equals the product of a single process. Everything except products of curvature operators
is computed by every rank. `auto` chooses the way with less work for the busiest rank, and `data` if they are
equal, because a rank then caches only the graphs of its own sequences.

Each rank gets consecutive sequences with about the same total number of entries.

Sequences keep their number among all data. So random draws for a sequence (targets of a Fisher, random roots)
do not depend on the number of ranks or on the rank that has it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, final, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.ranks import (
    Division,
    PieceDivision,
    gather_objects,
    in_step,
    rank_and_size,
    use_division,
)
from curvescope.core.tensors import leaves
from curvescope.core.threads import equal_threads
from curvescope.data.batches import Batch, Batches, DataShare
from curvescope.distributed.sums import (
    add_over_ranks,
    describe_request,
    frozen_on_all,
    least_of_ranks,
    run_on_all_ranks,
    state_digest,
)
from curvescope.engines import Engine
from curvescope.operators import MonteCarloFisher
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.samples.batch_coupling import refuse_coupled
from curvescope.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Parallel = Literal["auto", "data", "probes", "pieces", "shards"]

ALL = "model and data"  # the parts that must be equal on all ranks
_PIECE_DIVISION: dict[str, PieceDivision] = {"pieces": "always", "auto": "auto"}


@contextmanager
def divided(parallel: Parallel = "auto", *, group: ProcessGroup | None = None) -> Iterator[None]:
    """Divide every product among ranks that have the same model and the same data, inside the context.

    Every rank must take the same steps. Results equal those of a single process up to rounding. Each rank
    computes its part of a product with its own number of threads, and everything else with the smallest
    number that any rank has. So quantities that every rank computes itself, such as Kronecker factors, agree
    to the last bit.

    Args:
        parallel: `data` or `probes`, or `auto`, which decides from sizes at every product. `pieces` divides
            the pieces of a study instead of products, as `auto` does if a rank gets eight of them or more.
            `shards` shards the models that studies load inside (`shard`); their products and vectors are
            sharded too.
        group: Ranks; by default all.
    """
    if parallel not in get_args(Parallel):
        hint = near_misses(str(parallel), list(get_args(Parallel)))
        raise UsageError(
            f"expected parallel to be one of {', '.join(get_args(Parallel))}, got {parallel!r}", hint=hint
        )
    with in_step(group):
        rank, ranks = rank_and_size()
        keeps_products_whole = parallel in ("pieces", "shards")  # products are not divided
        division = None if keeps_products_whole else _Divided(parallel, rank, ranks, group)
        threads = nullcontext() if keeps_products_whole else equal_threads(least_of_ranks(group))
        with (
            threads,
            use_division(
                division, pieces=_PIECE_DIVISION.get(parallel, "never"), models=parallel == "shards"
            ),
        ):
            yield


@dataclass(frozen=True, eq=False)
class _RankPart:
    """Part of a problem that a rank holds."""

    batches: Batches  # all batches, to detect changes
    own: list[Cut]
    problem: Problem
    engine: Engine
    speed: float  # speedup over one rank: all entries over those of the busiest rank

    @property
    def counts(self) -> bool:
        """Return True if this rank has a term with nonzero weight."""
        return bool(self.own) and self.problem.num_terms > 0


@final
class _Divided(Division):
    """Division of products of operators on full problems over the ranks of a group."""

    def __init__(self, parallel: Parallel, rank: int, ranks: int, group: ProcessGroup | None):
        self.parallel, self.rank, self.ranks, self.group = parallel, rank, ranks, group
        self._parts: WeakKeyDictionary[Engine, _RankPart] = WeakKeyDictionary()
        self._agreed: WeakKeyDictionary[Engine, list[int]] = WeakKeyDictionary()  # inside `frozen()`

    def undivided(
        self, op: CurvatureOperator, V: Tensor, rows: ParamSpace, columns: ParamSpace
    ) -> tuple[Tensor, float]:
        """Return the sum over all batches applied to V, and N."""
        N = 0.0

        def own() -> tuple[Tensor, float, list[int]]:
            nonlocal N
            N = op.problem.num_terms
            part = self._part(op)
            cut = self._own_columns if self._by_columns(part, V.shape[1]) else self._own_sequences
            return cut(op, V, rows, columns), 0.0, self._state(op)

        ask = partial(describe_request, op, V, rows, columns)
        found, _ = run_on_all_ranks(own, device=op.device, group=self.group, same=ALL, ask=ask)
        return add_over_ranks(found, self.group), N

    @contextmanager
    def frozen(self, op: CurvatureOperator) -> Iterator[None]:
        """Treat the products inside as one computation: raise on all ranks if one detects a change."""
        part, _ = run_on_all_ranks(
            lambda: (self._part(op), 0.0, self._state(op)), device=op.device, group=self.group, same=ALL
        )
        engines = [part.engine] if part.counts else []
        if self.parallel == "probes" or (self.parallel == "auto" and part.speed < self.ranks):
            engines.append(op.engine)
        before = self._agreed.get(op.engine)
        with frozen_on_all(engines, self.group):
            self._agreed[op.engine] = self._state(op)
            try:
                yield
            finally:
                if before is None:
                    del self._agreed[op.engine]
        run_on_all_ranks(lambda: (True, 0.0, self._state(op)), device=op.device, group=self.group, same=ALL)

    def _by_columns(self, part: _RankPart, k: int) -> bool:
        if self.parallel != "auto" or k == 0:
            return self.parallel == "probes"
        return k / -(-k // self.ranks) > part.speed

    def _own_columns(self, op: CurvatureOperator, V: Tensor, rows: ParamSpace, columns: ParamSpace) -> Tensor:
        """Return this rank's columns of the product, and zeros elsewhere."""
        k = V.shape[1]
        some = slice(self.rank * k // self.ranks, (self.rank + 1) * k // self.ranks)
        total = torch.zeros(rows.size, k, dtype=op.dtype, device=op.device)
        if some.start < some.stop:
            total[:, some] = op.undivided(V[:, some], rows, columns)[0]
        return total

    def _own_sequences(
        self, op: CurvatureOperator, V: Tensor, rows: ParamSpace, columns: ParamSpace
    ) -> Tensor:
        """Return the sum over this rank's sequences."""
        part = self._part(op)
        if not part.counts:
            return torch.zeros(rows.size, V.shape[1], dtype=op.dtype, device=op.device)
        local = copy.copy(op)
        local.problem, local.engine = part.problem, part.engine
        if isinstance(local, MonteCarloFisher):
            local.drawn = [local.drawn[index][:, some] for index, some in part.own]
        return local.undivided(V, rows, columns)[0]

    def _part(self, op: CurvatureOperator) -> _RankPart:
        """Return this rank's part; computed once per engine, which blocks of an operator share, and data."""
        known = self._parts.get(op.engine)
        if known is None or known.batches is not op.problem.batches:
            known = self._parts[op.engine] = self._find_part(op)
        return known

    def _find_part(self, op: CurvatureOperator) -> _RankPart:
        problem = op.problem
        batches = problem.batches
        shared = cuts(batches, self.ranks, within=problem.loss.has_outputs)
        several = {cut.batch for own in shared for cut in own if _is_cut(batches, cut)}
        if several and not _separable(problem, [batches[index] for index in sorted(several)]):
            shared = cuts(batches, self.ranks, within=False)
        sizes = [sum(_entries(batches, cut) for cut in own) for own in shared]
        local = copy.copy(problem)
        local.batches = cut_batches(batches, shared[self.rank])
        speed = sum(sizes) / max(*sizes, 1)
        return _RankPart(batches, shared[self.rank], local, op.engine.of(local), speed)

    def _state(self, op: CurvatureOperator) -> list[int]:
        known = self._agreed.get(op.engine)
        return state_digest(op.problem, data=True) if known is None else known


def _is_cut(batches: Batches, cut: Cut) -> bool:
    return cut.rows.stop - cut.rows.start < batches[cut.batch].num_sequences


def _entries(batches: Batches, cut: Cut) -> int:
    return batches[cut.batch][cut.rows].tensors()[0].numel()


def _separable(problem: Problem, batches: list[Batch]) -> bool:
    """Return True if sequences may be taken out of these batches."""
    try:
        refuse_coupled(problem, batches)
    except UsageError:
        return False
    return True


class Cut(NamedTuple):
    """Some sequences of one batch."""

    batch: int  # index of the batch
    rows: slice


def cuts(batches: Batches, ranks: int, *, within: bool = True) -> list[list[Cut]]:
    """Return the part of each rank, in the order of the data. With fewer units than ranks, some parts are
    empty.

    If all entries are divided into R equal ranges, a unit goes to the rank whose range has its middle.

    Args:
        batches: All data.
        ranks: R.
        within: If True, units are sequences, so that a batch may be cut; else units are batches.
    """
    sizes = [_entries_of(batch) for batch in batches]
    total, before = max(sum(sizes), 1), 0.0
    parts: list[list[Cut]] = [[] for _ in range(ranks)]
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        count = batch.num_sequences if within else 1
        owners = [
            min(ranks - 1, int(ranks * (before + (i + 0.5) * size / count) / total)) for i in range(count)
        ]
        for rank in sorted(set(owners)):
            first, last = owners.index(rank), count - owners[::-1].index(rank)
            rows = slice(first, last) if within else slice(0, batch.num_sequences)
            parts[rank].append(Cut(index, rows))
        before += size
    return parts


def cut_batches(batches: Batches, own_cuts: list[Cut]) -> Batches:
    """Return the batches of these cuts, as a share. Without a cut it has one sequence of weight zero."""
    firsts = [0, *torch.tensor([b.num_sequences for b in batches]).cumsum(0).tolist()]
    first_sequence = firsts[own_cuts[0].batch] + own_cuts[0].rows.start if own_cuts else 0
    parts = tuple(
        (batches[i], rows) for i, rows in own_cuts if rows.stop - rows.start < batches[i].num_sequences
    )
    share = DataShare(
        batches.first_sequence + first_sequence, batches.num_sequences, empty=not own_cuts, cut=parts
    )
    found = [batches[index][rows] for index, rows in own_cuts] or [batches[0][:1]]
    return Batches(found, name=batches.name, notes=batches.notes, share=share)


def share(batches: Batches, *, group: ProcessGroup | None = None) -> Batches:
    """Return this rank's share of data that every rank has: consecutive sequences with about equal numbers of
    entries.

    All shares together are the data in their order. A batch is cut if needed; this raises for a model whose
    sequences depend on each other.

    Args:
        batches: Data, the same on every rank.
        group: Ranks; by default all.
    """
    if not isinstance(batches, Batches):
        raise UsageError(
            f"expected cs.Batches to share, got a {type(batches).__name__}",
            hint="pass cs.Problem(model, data).batches",
        )
    if batches.share is not None:
        raise UsageError("expected all data, got a share", hint="share the data once")
    with in_step(group):
        rank, ranks = rank_and_size()
    return cut_batches(batches, cuts(batches, ranks)[rank])


def numbered(batches: Batches, *, group: ProcessGroup | None = None) -> Batches:
    """Number data that each rank has read itself, as shares in the order of the ranks. All ranks must call
    it.
    """
    with in_step(group):
        rank, _ = rank_and_size()
        counts = gather_objects(batches.num_sequences)
    share = DataShare(sum(counts[:rank]), sum(counts))
    return Batches(list(batches), name=batches.name, notes=batches.notes, share=share)


def _entries_of(batch: Batch) -> int:
    """Number of entries of the model's inputs."""
    return sum(t.numel() for t in leaves(batch.inputs))

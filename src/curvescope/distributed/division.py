"""Products that ranks with all of the data divide among them: by sequences, or by columns.

A product with k columns over S sequences on R ranks is cut one way or the other:

    data    each rank takes all columns through its share of the sequences, and the parts are added
    probes  each rank takes its share of the columns through all sequences; the others' are zero in its sum

Either way the sum is the product of a single process, and what is not a product of a curvature operator is
computed by every rank alike. `auto` takes what leaves less for the busiest rank, and `data` where both do the
same: then a rank keeps the graphs of its own sequences alone.

How data are shared out over ranks: consecutive sequences, about as many numbers for each.

Sequences keep their number among all data, so that what is drawn for one of them (targets of a Fisher, random
roots) does not depend on how many ranks there are, nor on which of them has it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, final, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.ranks import Apart, Division, dividing_by, everyone, in_step, place
from curvescope.core.tensors import leaves
from curvescope.data.batches import Batch, Batches, Share
from curvescope.distributed.sums import add_over_ranks, asked, done_by_all, frozen_on_all, state_words
from curvescope.engines import Engine
from curvescope.operators import MonteCarloFisher
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.samples.coupled import refuse_coupled
from curvescope.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Parallel = Literal["auto", "data", "probes", "pieces", "shards"]

ALL = "model and data"  # that every rank has
_APART: dict[str, Apart] = {"pieces": "always", "auto": "auto"}


@contextmanager
def divided(parallel: Parallel = "auto", *, group: ProcessGroup | None = None) -> Iterator[None]:
    """Inside, ranks that all have the same model and the same data divide every product among them.

    Every rank takes the same steps. Numbers are those of a single process up to rounding.

    Args:
        parallel: `data` or `probes`, or `auto`, which decides from sizes at every product; `pieces` divides
            the pieces of a study and no product, as `auto` does where a rank gets eight of them or more.
            `shards` divides models: those that studies load inside are spread over the ranks (`shard`), and
            their products and vectors are in pieces.
        group: The ranks, by default all there are.
    """
    if parallel not in get_args(Parallel):
        hint = near_misses(str(parallel), list(get_args(Parallel)))
        raise UsageError(
            f"expected parallel to be one of {', '.join(get_args(Parallel))}, got {parallel!r}", hint=hint
        )
    with in_step(group):
        rank, ranks = place()
        whole = parallel in ("pieces", "shards")  # products are whose they are
        division = None if whole else _Divided(parallel, rank, ranks, group)
        with dividing_by(division, pieces=_APART.get(parallel, "never"), models=parallel == "shards"):
            yield


@dataclass(frozen=True, eq=False)
class _Part:
    """What a rank has of a problem."""

    batches: Batches  # all of them, to see whether they are still the same
    own: list[Cut]
    problem: Problem
    engine: Engine
    speed: float  # how many times as fast as one rank: all numbers over those of the busiest

    @property
    def counts(self) -> bool:
        """Whether this rank has a term that counts, as targets and weights are now."""
        return bool(self.own) and self.problem.num_terms > 0


@final
class _Divided(Division):
    """Products of operators on whole problems, divided over the ranks of a group."""

    def __init__(self, parallel: Parallel, rank: int, ranks: int, group: ProcessGroup | None):
        self.parallel, self.rank, self.ranks, self.group = parallel, rank, ranks, group
        self._parts: WeakKeyDictionary[Engine, _Part] = WeakKeyDictionary()
        self._agreed: WeakKeyDictionary[Engine, list[int]] = WeakKeyDictionary()  # inside `frozen()`

    def undivided(
        self, op: CurvatureOperator, V: Tensor, rows: ParamSpace, columns: ParamSpace
    ) -> tuple[Tensor, float]:
        """Σ over all batches applied to V, and N."""
        N = 0.0

        def own() -> tuple[Tensor, float, list[int]]:
            nonlocal N
            N = op.problem.num_terms
            part = self._part(op)
            cut = self._own_columns if self._by_columns(part, V.shape[1]) else self._own_sequences
            return cut(op, V, rows, columns), 0.0, self._state(op)

        ask = partial(asked, op, V, rows, columns)
        found, _ = done_by_all(own, device=op.device, group=self.group, same=ALL, ask=ask)
        return add_over_ranks(found, self.group), N

    @contextmanager
    def frozen(self, op: CurvatureOperator) -> Iterator[None]:
        """Products inside belong together: an error on all ranks if one of them finds a change."""
        part, _ = done_by_all(
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
        done_by_all(lambda: (True, 0.0, self._state(op)), device=op.device, group=self.group, same=ALL)

    def _by_columns(self, part: _Part, k: int) -> bool:
        if self.parallel != "auto" or k == 0:
            return self.parallel == "probes"
        return k / -(-k // self.ranks) > part.speed

    def _own_columns(self, op: CurvatureOperator, V: Tensor, rows: ParamSpace, columns: ParamSpace) -> Tensor:
        """This rank's columns of the product, among zeros."""
        k = V.shape[1]
        some = slice(self.rank * k // self.ranks, (self.rank + 1) * k // self.ranks)
        total = torch.zeros(rows.size, k, dtype=op.dtype, device=op.device)
        if some.start < some.stop:
            total[:, some] = op.undivided(V[:, some], rows, columns)[0]
        return total

    def _own_sequences(
        self, op: CurvatureOperator, V: Tensor, rows: ParamSpace, columns: ParamSpace
    ) -> Tensor:
        """The sum over this rank's sequences."""
        part = self._part(op)
        if not part.counts:
            return torch.zeros(rows.size, V.shape[1], dtype=op.dtype, device=op.device)
        local = copy.copy(op)
        local.problem, local.engine = part.problem, part.engine
        if isinstance(local, MonteCarloFisher):
            local.drawn = [local.drawn[index][:, some] for index, some in part.own]
        return local.undivided(V, rows, columns)[0]

    def _part(self, op: CurvatureOperator) -> _Part:
        """Found once for an engine, which blocks of an operator share, and its data."""
        known = self._parts.get(op.engine)
        if known is None or known.batches is not op.problem.batches:
            known = self._parts[op.engine] = self._found(op)
        return known

    def _found(self, op: CurvatureOperator) -> _Part:
        problem = op.problem
        batches = problem.batches
        shared = cuts(batches, self.ranks, within=problem.loss.splits)
        several = {cut.batch for own in shared for cut in own if _is_cut(batches, cut)}
        if several and not _separable(problem, [batches[index] for index in sorted(several)]):
            shared = cuts(batches, self.ranks, within=False)
        sizes = [sum(_entries(batches, cut) for cut in own) for own in shared]
        local = copy.copy(problem)
        local.batches = taken(batches, shared[self.rank])
        speed = sum(sizes) / max(*sizes, 1)
        return _Part(batches, shared[self.rank], local, op.engine.of(local), speed)

    def _state(self, op: CurvatureOperator) -> list[int]:
        known = self._agreed.get(op.engine)
        return state_words(op.problem, data=True) if known is None else known


def _is_cut(batches: Batches, cut: Cut) -> bool:
    return cut.rows.stop - cut.rows.start < batches[cut.batch].num_sequences


def _entries(batches: Batches, cut: Cut) -> int:
    return batches[cut.batch][cut.rows].tensors()[0].numel()


def _separable(problem: Problem, batches: list[Batch]) -> bool:
    """Whether sequences may be taken out of these batches."""
    try:
        refuse_coupled(problem, batches)
    except UsageError:
        return False
    return True


class Cut(NamedTuple):
    """Some sequences of one batch."""

    batch: int  # its index
    rows: slice


def cuts(batches: Batches, ranks: int, *, within: bool = True) -> list[list[Cut]]:
    """What each rank has, in the order of the data; with fewer units than ranks some have nothing.

    A unit goes to the rank in whose R-th part of all numbers its middle lies.

    Args:
        batches: All data.
        ranks: R.
        within: Units are sequences, so that a batch may be cut; else whole batches are.
    """
    sizes = [_entries_of(batch) for batch in batches]
    total, before = max(sum(sizes), 1), 0.0
    found: list[list[Cut]] = [[] for _ in range(ranks)]
    for index, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        count = batch.num_sequences if within else 1
        owners = [
            min(ranks - 1, int(ranks * (before + (i + 0.5) * size / count) / total)) for i in range(count)
        ]
        for rank in sorted(set(owners)):
            first, last = owners.index(rank), count - owners[::-1].index(rank)
            rows = slice(first, last) if within else slice(0, batch.num_sequences)
            found[rank].append(Cut(index, rows))
        before += size
    return found


def taken(batches: Batches, own: list[Cut]) -> Batches:
    """The batches of these cuts, as a share; without one a sequence stands there that does not count."""
    firsts = [0, *torch.tensor([b.num_sequences for b in batches]).cumsum(0).tolist()]
    place = firsts[own[0].batch] + own[0].rows.start if own else 0
    parts = tuple((batches[i], rows) for i, rows in own if rows.stop - rows.start < batches[i].num_sequences)
    share = Share(batches.first_sequence + place, batches.num_sequences, empty=not own, cut=parts)
    found = [batches[index][rows] for index, rows in own] or [batches[0][:1]]
    return Batches(found, name=batches.name, notes=batches.notes, share=share)


def share(batches: Batches, *, group: ProcessGroup | None = None) -> Batches:
    """This rank's share of data that every rank has: consecutive sequences, about as many numbers for each.

    All shares together are the data in their order. A batch is cut where that is needed; a model whose
    sequences know of each other is refused then.

    Args:
        batches: The same on every rank.
        group: The ranks, by default all there are.
    """
    if not isinstance(batches, Batches):
        raise UsageError(
            f"expected cs.Batches to share out, got a {type(batches).__name__}",
            hint="cs.Problem(model, data).batches are those of what a problem takes",
        )
    if batches.share is not None:
        raise UsageError("expected all data to share out, got a share", hint="share the data once")
    with in_step(group):
        rank, ranks = place()
    return taken(batches, cuts(batches, ranks)[rank])


def numbered(batches: Batches, *, group: ProcessGroup | None = None) -> Batches:
    """Data that each rank has read for itself, as shares in the order of the ranks; all of them call it."""
    with in_step(group):
        rank, _ = place()
        counts = everyone(batches.num_sequences)
    share = Share(sum(counts[:rank]), sum(counts))
    return Batches(list(batches), name=batches.name, notes=batches.notes, share=share)


def _entries_of(batch: Batch) -> int:
    """Numbers that go into the model."""
    return sum(t.numel() for t in leaves(batch.inputs))

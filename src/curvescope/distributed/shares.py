"""How data are shared out over ranks: consecutive sequences, about as many numbers for each.

Sequences keep their number among all data, so that what is drawn for one of them (targets of a Fisher, random
roots) does not depend on how many ranks there are, nor on which of them has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from curvescope.core.errors import UsageError
from curvescope.core.ranks import everyone, in_step, place
from curvescope.core.tensors.trees import leaves
from curvescope.data.batches import Batch, Batches, Share

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    sizes = [_entries(batch) for batch in batches]
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


def _entries(batch: Batch) -> int:
    """Numbers that go into the model."""
    return sum(t.numel() for t in leaves(batch.inputs))

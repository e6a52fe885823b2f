"""Work that is the same every time, recorded on a CPU when it is asked for again, and then replayed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from curvescope.core.seeds import generator
from curvescope.engines.batch_products import Names, Work, results
from curvescope.engines.replay.plan import Pool
from curvescope.engines.replay.recording import NotRecordable, Recording, Writer
from curvescope.engines.vjp import Receive

LOG = logging.getLogger("curvescope")
# Directions before a recording, one at a time and several at once: it costs as much as a replay saves in 10
# to 50. Who asked for as many will go on; who wants eight of each of a hundred blocks pays for none.
WARM, MANY = 12, 16


@final
class Recorder:
    """Records work of one engine, which shares one memory."""

    def __init__(self) -> None:
        self.pool = Pool()

    def building(self) -> AbstractContextManager[None]:
        """Autograd's graphs are built inside."""
        return nullcontext()

    def replayed(self, work: Work, rows: Names, columns: Names, *, batch_bytes: int = 0) -> Work:
        """The work, recorded when it is asked for again."""
        return Replay(work, len(rows), self.pool)


@final
class Replay:
    """`work(tensors, group, receive)` for tensors (k, …), k directions, of always the same shapes.

    First it works as it is; then it records, and compares a replay with the work for other numbers: unless
    they are the same, bit for bit, it goes on as it is. What is received holds until the next call of any
    work that shares the pool.
    """

    def __init__(self, work: Work, num_rows: int, pool: Pool):
        self._work, self._num_rows, self._pool = work, num_rows, pool
        self._done = 0  # directions, without a recording
        self._recording: Recording | None = None
        self._refused = False

    def __call__(self, tensors: Sequence[Tensor], group: int, receive: Receive) -> None:
        k = tensors[0].shape[0]
        if self._refused or (k != 1 and (group > 1 or not self._soon(k))):
            self._done += k
            self._work(tensors, group, receive)
        elif k == 1:
            self._one(tensors, receive)
        else:
            columns = [self._column([t[j : j + 1] for t in tensors]) for j in range(k)]
            for number, some in enumerate(zip(*columns, strict=True)):
                if some[0] is not None:
                    receive(number, torch.cat(some))

    def _soon(self, k: int) -> bool:
        return self._recording is not None or self._done + k > MANY

    def _column(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Copies of the results of one direction."""
        found: list[Any] = [None] * self._num_rows
        self._one(tensors, lambda number, x: found.__setitem__(number, x.clone()))
        return found

    def _one(self, tensors: Sequence[Tensor], receive: Receive) -> None:
        if self._recording is None:
            self._done += 1
            if self._done > WARM and not self._refused:
                self._record(tensors)
        if self._recording is None:
            self._work(tensors, 1, receive)
            return
        for number, x in enumerate(self._recording.replay(tensors)):
            if x is not None:
                receive(number, x)

    def _record(self, tensors: Sequence[Tensor]) -> None:
        """The recording and its comparison, in as little memory as they take."""
        try:
            self._recording = self._compared([t.clone() for t in tensors])
        except (NotRecordable, RuntimeError) as error:  # of memory that is not there, say
            LOG.info("a product was not recorded: %s", str(error).splitlines()[0])
            self._refused = True

    def _compared(self, inputs: list[Tensor]) -> Recording:
        writer = Writer(inputs)
        with writer:
            found = results(self._work, inputs, 1, self._num_rows)
        recording, source = Recording(writer, found, self._pool), generator(0)
        del found, writer
        others = [t.normal_(generator=source) for t in inputs]
        if not _same(recording.replay(others), results(self._work, others, 1, self._num_rows)):
            raise NotRecordable("a replay gives other numbers")
        return recording


def _same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Whether all are the same, bit for bit."""
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)

"""Work that is the same every time, recorded on a GPU and replayed without waiting for the CPU.

A product launches some two thousand kernels, many of them short: launched one by one, the CPU cannot keep
up. A CUDA graph launches them all at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from curvescope.engines.batch_products import Names, Work
from curvescope.engines.vjp import Receive

LOG = logging.getLogger("curvescope")
WARM = 1  # calls before the recording, in which kernels are compiled and libraries wake up
SHARE = 1 / 32  # of the card's memory that the vector of a recording may take, or
SHARE_OF_BATCH = 1 / 4  # of what a graph of the batch takes


@final
class Recorder:
    """Records work of one engine: one stream, and one memory for what comes and goes in all recordings."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Autograd's graphs are built and run inside, all on the stream of the recording."""
        now = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            yield
        now.wait_stream(self.stream)

    def replayed(self, work: Work, rows: Names, columns: Names, *, batch_bytes: int = 0) -> Work:
        """The work, recorded when it is asked for again."""
        return Replay(work, self, in_place=rows == columns, batch_bytes=batch_bytes)


@final
class Replay:
    """`work(tensors, group, receive)` for tensors (k, …) of always the same shapes, recorded for k = 1.

    A recording has one vector of its own: a direction is copied there, and each result takes the place of
    the entries that it belongs to, which were read before any of it was made. Where such a vector is a good
    part of the memory, nothing is recorded. A replay is compared with the work, for numbers that the
    recording did not see, before it is used; unless they are the same up to the order of sums, the work goes
    on as it is. For several directions at once it is done as it is. What is received holds until the next
    call.

    Args:
        work: What is recorded.
        recorder: Its stream and memory.
        in_place: Whether results have the shapes of the directions, one for one.
        batch_bytes: What passes through the batch make.
    """

    def __init__(self, work: Work, recorder: Recorder, *, in_place: bool, batch_bytes: int):
        self._work, self._recorder, self._in_place = work, recorder, in_place
        self._batch_bytes = batch_bytes
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: dict[int, Tensor] = {}

    def __call__(self, tensors: Sequence[Tensor], group: int, receive: Receive) -> None:
        one = tensors[0].shape[0] == 1
        self._calls += one
        if one and self._calls == WARM + 1 and self._has_room(tensors):
            self._record(tensors)
        if not one or self._graph is None:
            with self._recorder.building():
                self._work(tensors, group, receive)
            return
        self._replay(tensors)
        for number, x in self._outputs.items():
            receive(number, x)

    def _has_room(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one more vector is little beside the card's memory, or beside what the batch takes."""
        size = sum(t.numel() * t.element_size() for t in tensors)
        total = torch.cuda.get_device_properties(self._recorder.stream.device).total_memory
        return size <= max(SHARE * total, SHARE_OF_BATCH * self._batch_bytes)

    def _replay(self, tensors: Sequence[Tensor]) -> None:
        assert self._graph is not None
        torch._foreach_copy_(self._inputs, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
        self._graph.replay()

    def _record(self, tensors: Sequence[Tensor]) -> None:
        """Work that cannot be recorded, or not in the memory there is, goes on as before."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._inputs = [torch.zeros_like(t) for t in tensors]
            with torch.cuda.graph(graph, pool=self._recorder.pool, stream=self._recorder.stream):
                self._work(self._inputs, 1, self._place)
            self._graph = graph
            if not self._same(tensors):
                raise RuntimeError("a replay gives other numbers")
        except RuntimeError as error:
            LOG.info("the product was not recorded as a CUDA graph: %s", str(error).splitlines()[0])
            self._graph, self._inputs, self._outputs = None, [], {}
            torch.cuda.synchronize(self._recorder.stream.device)

    def _place(self, number: int, x: Tensor) -> None:
        """Keep a result while the work is recorded; what comes again is added."""
        if number in self._outputs:
            self._outputs[number].add_(x)
        else:
            self._outputs[number] = self._inputs[number].copy_(x) if self._in_place else x

    def _same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a replay gives what the work gives, up to the order of sums."""
        self._replay(tensors)
        seen: set[int] = set()
        size = _length(self._outputs.values())

        def subtract(number: int, x: Tensor) -> None:
            seen.add(number)
            if number in self._outputs:
                self._outputs[number].sub_(x)  # the next replay writes it anew

        with self._recorder.building():
            self._work(tensors, 1, subtract)
        loose = {torch.float64: 1e-10}.get(tensors[0].dtype, 1e-4)
        return seen == self._outputs.keys() and _length(self._outputs.values()) <= loose * size


def _length(tensors: Iterable[Tensor]) -> float:
    """The norm of all of them together."""
    return math.hypot(*(float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in tensors))

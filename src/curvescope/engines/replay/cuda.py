"""Record repeated products on a GPU as CUDA graphs, and replay them without waiting for the CPU.

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

from curvescope.engines.batch_products import BatchProduct, Names
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
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)


@final
class Replay:
    """`work(tensors, group, receive)` for tensors (k, …) of always the same shapes, recorded for k = 1.

    A recording has one vector of its own: a direction is copied there, and each result takes the place of the
    entries that it belongs to, which were read before any of it was made. If such a vector takes too much
    memory, nothing is recorded. A replay is compared with the work on other inputs before it is used. If they
    differ by more than the order of sums explains, the work runs directly. Several directions at once also
    run directly. Results are valid until the next call.

    Args:
        work: What is recorded.
        recorder: Its stream and memory.
        columns: Names of the directions.
        in_place: Whether results have the shapes of the directions, one for one.
        batch_bytes: What passes through the batch make.
    """

    def __init__(
        self, work: BatchProduct, recorder: Recorder, columns: Names, *, in_place: bool, batch_bytes: int
    ):
        self._work, self._recorder, self._columns, self._in_place = work, recorder, columns, in_place
        self._batch_bytes = batch_bytes
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}

    def __call__(self, tensors: Sequence[Tensor], group: int, receive: Receive) -> None:
        is_single = tensors[0].shape[0] == 1
        self._calls += is_single
        if is_single and self._calls == WARM + 1 and self._has_room(tensors):
            self._record(tensors)
        if not is_single or self._graph is None:
            with self._recorder.building():
                self._work(tensors, group, receive)
            return
        self._replay(tensors)
        for name, x in self._outputs.items():
            receive(name, x)

    def _has_room(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if one more vector is small relative to the memory of the GPU, or of the batch."""
        size = sum(t.numel() * t.element_size() for t in tensors)
        total = torch.cuda.get_device_properties(self._recorder.stream.device).total_memory
        return size <= max(SHARE * total, SHARE_OF_BATCH * self._batch_bytes)

    def _replay(self, tensors: Sequence[Tensor]) -> None:
        assert self._graph is not None
        inputs = list(self._inputs.values())
        torch._foreach_copy_(inputs, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
        self._graph.replay()

    def _record(self, tensors: Sequence[Tensor]) -> None:
        """Record the work; if that fails, or memory is too small, the work continues to run directly."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._inputs = {name: torch.zeros_like(t) for name, t in zip(self._columns, tensors, strict=True)}
            with torch.cuda.graph(graph, pool=self._recorder.pool, stream=self._recorder.stream):
                self._work(list(self._inputs.values()), 1, self._place)
            self._graph = graph
            if not self._same(tensors):
                raise RuntimeError("a replay gives other numbers")
        except RuntimeError as error:
            LOG.info("the product was not recorded as a CUDA graph: %s", str(error).splitlines()[0])
            self._graph, self._inputs, self._outputs = None, {}, {}
            torch.cuda.synchronize(self._recorder.stream.device)

    def _place(self, name: str, x: Tensor) -> None:
        """Keep a result while the work is recorded; what comes again is added."""
        if name in self._outputs:
            self._outputs[name].add_(x)
        else:
            self._outputs[name] = self._inputs[name].copy_(x) if self._in_place else x

    def _same(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if a replay gives what the work gives, up to the order of sums."""
        self._replay(tensors)
        names_seen: set[str] = set()
        size = _length(self._outputs.values())

        def subtract(name: str, x: Tensor) -> None:
            names_seen.add(name)
            if name in self._outputs:
                self._outputs[name].sub_(x)  # the next replay writes it anew

        with self._recorder.building():
            self._work(tensors, 1, subtract)
        loose = {torch.float64: 1e-10}.get(tensors[0].dtype, 1e-4)
        return names_seen == self._outputs.keys() and _length(self._outputs.values()) <= loose * size


def _length(tensors: Iterable[Tensor]) -> float:
    """The norm of all of them together."""
    return math.hypot(*(float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in tensors))

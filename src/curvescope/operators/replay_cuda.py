"""Work that is the same every time, recorded on a GPU and replayed without waiting for the CPU.

A product launches some two thousand kernels, many of them short: launched one by one, the CPU cannot keep
up. A CUDA graph launches them all at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from curvescope.operators.engine import Work

LOG = logging.getLogger("curvescope")
WARM = 1  # calls before the recording, in which kernels are compiled and libraries wake up


class Recorder:
    """Records work of one engine: one stream, and one memory for what comes and goes in all recordings."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorder, (self.stream.device,)  # a copy begins empty

    @contextmanager
    def building(self) -> Iterator[None]:
        """Autograd's graphs are built inside: their backward runs on the stream of the recording."""
        now = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            yield
        now.wait_stream(self.stream)

    def replayed(self, work: Work) -> Work:
        """The work, recorded when it is asked for again."""
        return Replay(work, self)


class Replay:
    """`work(tensors)` for tensors (k, …) of always the same shapes: for one direction recorded.

    For several at once the work is done as it is. What a call returns holds until the next.
    """

    def __init__(self, work: Work, recorder: Recorder):
        self._work, self._recorder = work, recorder
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: Sequence[Tensor | None] = ()

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if tensors[0].shape[0] != 1:
            return self._work(tensors)
        self._calls += 1
        if self._calls == WARM + 1:
            self._record(tensors)
        if self._graph is None:
            return self._work(tensors)
        torch._foreach_copy_(self._inputs, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
        self._graph.replay()
        return self._outputs

    def _record(self, tensors: Sequence[Tensor]) -> None:
        """Work that cannot be recorded, or not in the memory there is, goes on as before."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._inputs = [t.clone() for t in tensors]
            with torch.cuda.graph(graph, pool=self._recorder.pool, stream=self._recorder.stream):
                self._outputs = self._work(self._inputs)
        except RuntimeError as error:
            LOG.info("the product was not recorded as a CUDA graph: %s", str(error).splitlines()[0])
            self._inputs, self._outputs = [], ()
            torch.cuda.synchronize(self._recorder.stream.device)
            return
        self._graph = graph

"""Work that is the same every time, recorded on a GPU and replayed without waiting for the CPU.

A product launches some two thousand kernels, many of them short: launched one by one, the CPU cannot keep
up. A CUDA graph launches them all at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from curvescope.engines.works import Work

LOG = logging.getLogger("curvescope")
WARM = 1  # calls before the recording, in which kernels are compiled and libraries wake up


@final
class Recorder:
    """Records work of one engine: one stream, and one memory for what comes and goes in all recordings."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

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


@final
class Replay:
    """`work(tensors, group)` for tensors (k, …) of always the same shapes: for one direction recorded.

    A replay is compared with the work for other numbers before it is used; unless they are the same up to
    the order of sums, the work goes on as it is. For several directions at once it is done as it is. What a
    call returns holds until the next.
    """

    def __init__(self, work: Work, recorder: Recorder):
        self._work, self._recorder = work, recorder
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: Sequence[Tensor | None] = ()

    def __call__(self, tensors: Sequence[Tensor], group: int) -> Sequence[Tensor | None]:
        if tensors[0].shape[0] != 1:
            return self._work(tensors, group)
        self._calls += 1
        if self._calls == WARM + 1:
            self._record(tensors)
        return self._work(tensors, 1) if self._graph is None else self._replay(tensors)

    def _replay(self, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        assert self._graph is not None
        torch._foreach_copy_(self._inputs, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
        self._graph.replay()
        return self._outputs

    def _record(self, tensors: Sequence[Tensor]) -> None:
        """Work that cannot be recorded, or not in the memory there is, goes on as before."""
        graph = torch.cuda.CUDAGraph()
        try:
            self._inputs = [t.clone() for t in tensors]
            with torch.cuda.graph(graph, pool=self._recorder.pool, stream=self._recorder.stream):
                self._outputs = self._work(self._inputs, 1)
            self._graph = graph
            source = torch.Generator(tensors[0].device).manual_seed(0)
            others = [torch.empty_like(t).normal_(generator=source) for t in tensors]
            wanted = [None if t is None else t.clone() for t in self._work(others, 1)]
            if not _same(self._replay(others), wanted):
                raise RuntimeError("a replay gives other numbers")
        except RuntimeError as error:
            LOG.info("the product was not recorded as a CUDA graph: %s", str(error).splitlines()[0])
            self._graph, self._inputs, self._outputs = None, [], ()
            torch.cuda.synchronize(self._recorder.stream.device)


def _same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Whether all are the same up to the order in which sums were taken."""
    pairs = list(zip(ours, theirs, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    there = [(a, b) for a, b in pairs if a is not None and b is not None]
    gap = sum(float((a - b).double().square().sum()) for a, b in there)
    size = sum(float(b.double().square().sum()) for _, b in there)
    loose = {torch.float64: 1e-10}.get(there[0][1].dtype, 1e-4) if there else 0.0
    return gap <= loose**2 * size

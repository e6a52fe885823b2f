"""The cache policy of an engine: what it keeps between products, and how much it computes at once.

Graphs are kept while memory allows (`graph_cache`), and products that are asked for again are recorded
(`replay`). If memory runs out, fewer directions go through a pass together, and in the end layers are
recomputed instead of being kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar, final

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.numbers import plural
from curvescope.data.batches import Batch
from curvescope.engines.batch_products import Names, Work
from curvescope.engines.graph_cache import Kept, KeptByAll, forget_everything
from curvescope.engines.kernel_validation import Known, num_entries
from curvescope.engines.memory import directions_per_pass, too_large
from curvescope.engines.replay import cpu, cuda
from curvescope.engines.run import PlainRunner, Runner
from curvescope.problem import Problem

T = TypeVar("T")
LOG = logging.getLogger("curvescope")
GRAPH_SIZE = 4  # of the gradient's graph, in units of the forward pass's results


@final
class CachePolicy:
    """What one engine keeps, for the state of its problem that it was last bound to.

    Attributes:
        recomputes: Layers are recomputed instead of being kept.
        max_columns: Columns at once, because memory ran out with more; None if it never did.
        overflowed: On a GPU, the graph of a batch was larger than what may be kept.
    """

    def __init__(self, problem: Problem, *, recomputes: bool):
        sharding = problem.model.sharding
        self._problem, self.recomputes = problem, recomputes
        self.whole = sharding is None or not sharding.gathers  # no parameter comes from another rank
        self._graphs = Kept() if self.whole or sharding is None else KeptByAll(sharding.spread)
        self.max_columns: int | None = None
        self.overflowed = False
        self._known: Known | None = None
        self._runner: Runner = PlainRunner(problem)
        self._recorder: cpu.Recorder | cuda.Recorder | None = None
        self._directions: dict[str, int] = {}  # at once, by how the module is run

    def bind(self, known: Known, runner: Runner) -> None:
        """Begin anew for another state of the problem."""
        self._graphs.forget()
        self._recorder, self._known, self._runner = None, known, runner
        self._directions.clear()

    def forget(self) -> None:
        """Free all graphs."""
        self._graphs.forget()

    def get(self, key: Hashable, build: Callable[[], T], size: int) -> T:
        """Return the entry of a key; it is built if it is not there, and expected to take `size` bytes."""
        return self._graphs.get(key, build, device=self._problem.device, size=size)

    def graph(self, key: Hashable, build: Callable[[], T], batch: Batch) -> T:
        """As `get`, for a graph of one batch."""
        found = self.get(key, build, self.graph_bytes(batch))
        self.overflowed |= self._problem.device.type == "cuda" and self._graphs.refused
        return found

    def replayed(self, build: Callable[[], Work], batch: Batch, rows: Names, columns: Names) -> Work:
        """Build the product of a batch; it records itself and replays if it is asked for again."""
        problem = self._problem
        on = ("cuda",) if self.recomputes else ("cpu", "cuda")  # a CPU would keep what layers do not
        if problem.device.type not in on or self._runner.name != "fast" or not self.whole:
            return build()
        if self._recorder is None:
            self._recorder = (
                cuda.Recorder(problem.device) if problem.device.type == "cuda" else cpu.Recorder()
            )
        with self._recorder.building():
            work = build()
        made = self.graph_bytes(batch)
        if problem.model.widening is not None:  # a pass makes the wide weights, too
            made += GRAPH_SIZE * problem.model.num_parameters * problem.dtype.itemsize
        return self._recorder.replayed(work, rows, columns, batch_bytes=made)

    def graph_bytes(self, batch: Batch) -> int:
        """Bytes that a graph of the batch is expected to take."""
        return 0 if self._known is None else int(GRAPH_SIZE * self._known.entry_bytes * num_entries(batch))

    def directions(self, batch: Batch, tangents: Mapping[str, Tensor], *, plain: bool = False) -> int:
        """Directions at once; decided with the first batch that is given several, then kept.

        Args:
            batch: A placed one.
            tangents: The directions, (k, *shape) each.
            plain: The module is run as it is.
        """
        if next(iter(tangents.values())).shape[0] == 1 or self.recomputes or not self.whole:
            return 1
        runner = PlainRunner(self._problem) if plain else self._runner
        if runner.name not in self._directions:
            assert self._known is not None, "found out before any product"
            size = self._known.pass_bytes(runner, batch)
            self._directions[runner.name] = directions_per_pass(self._problem, size)
        return self.limited(self._directions[runner.name])

    def limited(self, columns: int) -> int:
        """Return the number of columns that go at once, of those that are wanted."""
        return columns if self.max_columns is None else min(columns, self.max_columns)

    def halve(self, columns: int) -> bool:
        """Halve the directions that go at once, because memory ran out with so many columns.

        Returns:
            False if it is one already and nothing was kept that could be freed, or if parameters come from
            several ranks, of which the others go on with this product.
        """
        if not self.whole:
            return False
        now = min(columns, *self._directions.values(), self.limited(columns))
        held = forget_everything()
        if self._problem.device.type == "cuda":
            torch.cuda.empty_cache()
        if now > 1:
            self.max_columns = now // 2
            LOG.warning("memory ran out: from here on %s at a time", plural(self.max_columns, "column"))
        return now > 1 or held

    def too_large(self) -> CurvescopeError:
        """The error for one direction through one batch that takes more memory than there is."""
        batch = max(self._problem.batches, key=num_entries)
        return too_large(self._problem, batch, self.graph_bytes(batch), again=self.recomputes)

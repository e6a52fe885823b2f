"""Cache of graphs and recordings between products, and limits on how much is computed at once.

Graphs that do not depend on the directions are cached while memory allows. One store serves all engines of a
process, because they share one memory. The least recently used entry is freed first, and an engine's entries
are freed with the engine. Ranks with pieces of a model build graphs together, so each of them has the same
entries. Repeated products are recorded (`replay`). If memory runs out, fewer directions are computed per
pass; if that is not enough, layers are recomputed.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from threading import RLock
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.number_format import plural
from curvescope.core.ranks.shard_layout import ShardGroup
from curvescope.data.batches import Batch
from curvescope.engines.batch_products import BatchProduct, Names
from curvescope.engines.kernel_validation import ValidatedModel, num_entries
from curvescope.engines.memory import directions_per_pass, free_bytes, too_large
from curvescope.engines.module_runner import Runner
from curvescope.engines.replay import cpu, cuda
from curvescope.engines.replay.cpu import Pool
from curvescope.problem import Problem

SHARE = 0.5  # largest share of the memory that is free without cached entries
SHARE_ON_RANKS = 0.25  # the same on ranks, which never free single entries
T = TypeVar("T")
_store_lock = RLock()
_store: OrderedDict[tuple[int, Hashable], tuple[Any, int]] = OrderedDict()


@final
class EngineCache:
    """Cache entries of one engine, valid until the engine forgets them.

    Attributes:
        refused: True if the last entry built is too large for the cache.
    """

    def __init__(self) -> None:
        self._owner, self.refused = id(self), False
        weakref.finalize(self, _forget, self._owner)

    def forget(self) -> None:
        """Free all entries, because the state has changed."""
        _forget(self._owner)

    def get(self, key: Hashable, build: Callable[[], T], *, device: torch.device, size: int) -> T:
        """Return the entry of a key; build it if it is missing.

        Args:
            size: Expected size in bytes; on a GPU the size is measured.
        """
        at = (self._owner, key)
        with _store_lock:
            if at in _store:
                _store.move_to_end(at)
                self.refused = False
                return _store[at][0]
        before = _allocated(device)
        try:
            entry = build()
        except torch.OutOfMemoryError:
            if not _store:
                raise
            clear_all_caches()
            before = _allocated(device)
            entry = build()
        size = max(_allocated(device) - before, 0) if device.type == "cuda" else size
        with _store_lock:
            self.refused = not _insert(at, entry, size, device)
        return entry


@final
class SynchronizedCache:
    """Cache entries of an engine whose model is sharded: each is stored on all ranks, or on none.

    Single entries are never freed, because the other ranks would not know. If an entry does not fit on one
    rank, all ranks rebuild it at every use.
    """

    def __init__(self, spread: ShardGroup) -> None:
        self._spread, self.refused = spread, False
        self._entries: dict[Hashable, Any] = {}
        self._num_bytes = 0

    def forget(self) -> None:
        """Free all entries; every rank calls this."""
        self._entries.clear()
        self._num_bytes = 0

    def get(self, key: Hashable, build: Callable[[], T], *, device: torch.device, size: int) -> T:
        """Return the entry like `EngineCache.get`, on all ranks together."""
        if key in self._entries:
            return self._entries[key]
        before = _allocated(device)
        entry = build()
        size = max(_allocated(device) - before, 0) if device.type == "cuda" else size
        budget = SHARE_ON_RANKS * (
            free_bytes(device) + self._num_bytes + (size if device.type == "cuda" else 0)
        )
        if self._spread.all(self._num_bytes + size <= budget, device):
            self._entries[key] = entry
            self._num_bytes += size
        return entry


def clear_all_caches() -> bool:
    """Free the entries of all engines; return True if there were any."""
    with _store_lock:
        had_entries = bool(_store)
        _store.clear()
    return had_entries


def _insert(at: tuple[int, Hashable], value: Any, size: int, device: torch.device) -> bool:
    """Store an entry, freeing the least recently used ones; return False if it does not fit."""
    total = sum(entry[1] for entry in list(_store.values()))
    budget = SHARE * (free_bytes(device) + total + (size if device.type == "cuda" else 0))
    while _store and total + size > budget:
        total -= _store.popitem(last=False)[1][1]
    if size <= budget:
        _store[at] = (value, size)
    return size <= budget


def _forget(owner: int) -> None:
    with _store_lock:
        for at in [at for at in list(_store) if at[0] == owner]:
            _store.pop(at, None)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


LOG = logging.getLogger("curvescope")
GRAPH_SIZE = 4  # of the gradient's graph, in units of the forward pass's results


@final
class CachePolicy:
    """Cache of one engine, for the last bound state of its problem.

    Attributes:
        recomputes: True if layers are recomputed instead of stored.
        max_columns: Columns per pass after memory ran out with more; None if it never did.
        overflowed: True if the graph of a batch was too large for the cache of a GPU.
    """

    def __init__(self, problem: Problem, *, recomputes: bool):
        sharding = problem.model.sharding
        self._problem, self.recomputes = problem, recomputes
        self.is_local = (
            sharding is None or not sharding.gathers
        )  # True if no parameter comes from another rank
        self._graphs = (
            EngineCache() if self.is_local or sharding is None else SynchronizedCache(sharding.spread)
        )
        self.max_columns: int | None = None
        self.overflowed = False
        self._known: ValidatedModel | None = None
        self._runner = Runner(problem)
        self._pool = Pool()
        self._recorder: cuda.Recorder | None = None
        self._directions: dict[str, int] = {}  # directions per pass, for each way to run the module

    def bind(self, known: ValidatedModel, runner: Runner) -> None:
        """Reset the cache for another state of the problem."""
        self._graphs.forget()
        self._pool, self._recorder = Pool(), None
        self._known, self._runner = known, runner
        self._directions.clear()

    def forget(self) -> None:
        """Free all graphs."""
        self._graphs.forget()

    def get(self, key: Hashable, build: Callable[[], T], size: int) -> T:
        """Return the entry of a key; build it if it is missing, with an expected size of `size` bytes."""
        return self._graphs.get(key, build, device=self._problem.device, size=size)

    def graph(self, key: Hashable, build: Callable[[], T], batch: Batch) -> T:
        """Return the entry like `get`, for a graph of one batch."""
        cached = self.get(key, build, self.graph_bytes(batch))
        self.overflowed |= self._problem.device.type == "cuda" and self._graphs.refused
        return cached

    def replayed(
        self, build: Callable[[], BatchProduct], batch: Batch, rows: Names, columns: Names
    ) -> BatchProduct:
        """Build the product of a batch; repeated calls are recorded and replayed."""
        problem = self._problem
        devices = (
            ("cuda",) if self.recomputes else ("cpu", "cuda")
        )  # on a CPU, a recording would store the intermediate results of recomputed layers
        if problem.device.type not in devices or self._runner.name != "fast" or not self.is_local:
            return build()
        if problem.device.type == "cpu":
            return cpu.Replay(build(), rows, self._pool)
        self._recorder = self._recorder or cuda.Recorder(problem.device)
        with self._recorder.building():
            product = build()
        size = self.graph_bytes(batch)
        if problem.model.widening is not None:  # a pass also makes the float32 weights
            size += GRAPH_SIZE * problem.model.num_parameters * problem.dtype.itemsize
        return cuda.Replay(product, self._recorder, columns, in_place=rows == columns, batch_bytes=size)

    def graph_bytes(self, batch: Batch) -> int:
        """Expected size of a graph of the batch in bytes."""
        return 0 if self._known is None else int(GRAPH_SIZE * self._known.entry_bytes * num_entries(batch))

    def directions(self, batch: Batch, tangents: Mapping[str, Tensor], *, plain: bool = False) -> int:
        """Return the number of directions per pass; it is fixed by the first batch with several directions.

        Args:
            batch: A batch on the model's device.
            tangents: Directions, (k, *shape) each.
            plain: True if the module runs without our kernels.
        """
        if next(iter(tangents.values())).shape[0] == 1 or self.recomputes or not self.is_local:
            return 1
        runner = Runner(self._problem) if plain else self._runner
        if runner.name not in self._directions:
            assert self._known is not None, "the model is validated before any product"
            size = self._known.pass_bytes(runner, batch)
            self._directions[runner.name] = directions_per_pass(self._problem, size)
        return self.limited(self._directions[runner.name])

    def limited(self, columns: int) -> int:
        """Return the number of columns per pass, at most `columns`."""
        return columns if self.max_columns is None else min(columns, self.max_columns)

    def halve(self, columns: int) -> bool:
        """Halve the number of directions per pass, because memory ran out with `columns` of them.

        Returns:
            False if the number is one and nothing could be freed, or if the model is sharded, because the
            other ranks continue with this product.
        """
        if not self.is_local:
            return False
        current = min(columns, *self._directions.values(), self.limited(columns))
        freed = clear_all_caches()
        if self._problem.device.type == "cuda":
            torch.cuda.empty_cache()
        if current > 1:
            self.max_columns = current // 2
            LOG.warning("memory ran out: from now on %s at a time", plural(self.max_columns, "column"))
        return current > 1 or freed

    def too_large(self) -> CurvescopeError:
        """Return the error for one direction through one batch that needs more memory than there is."""
        batch = max(self._problem.batches, key=num_entries)
        return too_large(self._problem, batch, self.graph_bytes(batch), again=self.recomputes)

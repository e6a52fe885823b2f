"""Calls of one kind in several processes: when one is asked for, those behind it are begun as well."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Generic, Self, TypeVar

import torch

from curvescope.core.result import Result

T = TypeVar("T")


class Workers:
    """Processes of one thread each, started when they are needed and ended with the `with`."""

    def __init__(self, count: int):
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, work: Callable[..., Result], *given: object) -> Future[Result]:
        """A call that one of them makes, with copies of what is given."""
        if self._pool is None:
            method = multiprocessing.get_context("spawn")
            one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
            self._pool = ProcessPoolExecutor(self.count, method, **one_thread)
        return self._pool.submit(work, *given)


class Ahead(Generic[T]):
    """`work(item, *needed)` for items that are asked for in their order, with the same `needed` for all."""

    def __init__(self, work: Callable[..., Result], items: Sequence[T], workers: Workers):
        self._work, self._items, self._workers = work, list(items), workers
        self._begun: dict[T, Future[Result]] = {}

    def take(self, item: T, *needed: Result) -> Result:
        """The result for an item; one worker is this process itself."""
        if self._workers.count == 1:
            return self._work(item, *needed)
        if item not in self._begun:
            rest = self._items[self._items.index(item) :]
            self._begun = {one: self._workers.begin(self._work, one, *needed) for one in rest}
        return self._begun.pop(item).result()

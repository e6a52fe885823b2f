"""Equal numbers of threads on all ranks, and a test of whether threads speed up products.

Ranks that run one algorithm on full vectors repeat its inner products and small dense matrices, and branch on
them. The order of a sum depends on the number of threads. So ranks with different numbers of threads would
round differently, drift apart, and stop after different numbers of steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from threadpoolctl import threadpool_limits

NUM_TIMED = 30  # matrix products that `thread_slowdown` times for each number of threads
_original_threads: ContextVar[int | None] = ContextVar(
    "curvescope_own_threads", default=None
)  # None: no limit


@contextmanager
def equal_threads(least_of_ranks: Callable[[float], float]) -> Iterator[None]:
    """Inside, torch, numpy and scipy use the smallest number of threads of any rank.

    Nothing changes if all ranks have the same number. All ranks must enter this together.

    Args:
        least_of_ranks: Function that returns the smallest of the ranks' numbers.
    """
    num_threads = torch.get_num_threads()
    fewest, largest = int(least_of_ranks(num_threads)), -int(least_of_ranks(-num_threads))
    if fewest == largest:
        yield
        return
    token = _original_threads.set(num_threads if _original_threads.get() is None else _original_threads.get())
    try:
        with threadpool_limits(limits=fewest, user_api="blas"):  # of numpy and scipy
            torch.set_num_threads(fewest)
            yield
    finally:
        torch.set_num_threads(num_threads)
        _original_threads.reset(token)


@contextmanager
def unlimited_threads() -> Iterator[None]:
    """Inside, this rank computes its part of a product with its original number of threads."""
    num_threads = _original_threads.get()
    if num_threads is None:
        yield
        return
    limited = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(limited)


def thread_slowdown() -> float:
    """Time of a small matrix product with torch's number of threads, divided by its time with one thread.

    A ratio far above 1 means that the machine is busy: threads wait for each other. The test takes
    milliseconds on an idle machine.
    """
    num_threads = torch.get_num_threads()
    shared = _product_seconds()
    try:
        torch.set_num_threads(1)
        return shared / _product_seconds()
    finally:
        torch.set_num_threads(num_threads)


def _product_seconds() -> float:
    """Median duration of a small matrix product in seconds."""
    A, seconds = torch.ones(256, 256), []
    for _ in range(NUM_TIMED):
        start = time.perf_counter()
        torch.mm(A, A)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)

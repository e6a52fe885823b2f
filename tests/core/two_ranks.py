"""One of two processes that meet through a file; prints what each task gave or raised: RANK FILE."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from curvescope.algorithms import eigsh
from curvescope.core.errors import UsageError
from curvescope.core.operator import Matrix
from curvescope.core.ranks import in_step, shared_errors
from curvescope.runs.resumable_loop import Contents, Piece, work_through


def agreed(rank: int) -> float:
    """Nothing is wrong; the ranks meet before and after."""
    with shared_errors():
        mine = torch.tensor(float(rank + 1))
    dist.all_reduce(mine)
    return float(mine)


def own_product(rank: int) -> None:
    """As an operator over ranks does it: each its own part, then the sum."""
    with shared_errors():
        if rank == 1:
            raise MemoryError("no room for a batch")
        mine = torch.ones(2)
    dist.all_reduce(mine)


def algorithm(rank: int) -> None:
    """A product that is not finite on one rank."""
    A = torch.eye(5, dtype=torch.float64) * (float("nan") if rank == 1 else 1.0)
    eigsh(Matrix(A, symmetric=True), k=1)


class Full(dict):
    """A place that cannot be written to."""

    def __setitem__(self, name: str, value: object) -> None:
        raise OSError("no space left")


def storing(rank: int) -> None:
    """The pieces of a study, of which one cannot be written on rank 0."""
    work_through([Piece("one", lambda: Contents("x"))], state=Full() if rank == 0 else {})


def interrupted(rank: int) -> None:
    with shared_errors():
        if rank == 1:
            raise KeyboardInterrupt


def same_mistake(rank: int) -> None:
    """Every rank says the same: the error stays what it is."""
    with shared_errors():
        raise UsageError("expected a dog, got a cat", hint="bark")


def alone(rank: int) -> str:
    """Another thread is not in step: it does not wait for rank 1, which has none."""
    found: list[str] = []

    def look() -> None:
        with shared_errors():
            found.append("looked")

    if rank == 0:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    return "looked" if rank else found[0]


def main(rank: int, file: str) -> None:
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=wait)
    for task in (agreed, own_product, algorithm, storing, interrupted, same_mistake, alone):
        try:
            with in_step():
                print(task.__name__, task(rank))
        except (Exception, KeyboardInterrupt) as error:
            print(task.__name__, type(error).__name__, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

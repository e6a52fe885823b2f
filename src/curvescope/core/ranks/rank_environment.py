"""Rank of this process, read from the environment of torchrun or Slurm without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from curvescope.core.errors import UsageError

PORTS = range(20000, 50000)  # chosen by the number of the Slurm job


class Launch(NamedTuple):
    """Description of one of several processes that were started together."""

    rank: int
    ranks: int
    local: int  # its number on this machine
    address: str  # where rank 0 waits for the others
    port: int
    by: str  # torchrun or Slurm


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """Return the launch that torchrun or srun describes in the environment; None for a single process.

    A batch script of Slurm is one process for any number of tasks of its job: only `srun` starts a step.
    """
    try:
        if int(environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in environ:
            return _torchrun(environ)
        if int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and "SLURM_PROCID" in environ:
            return _slurm(environ)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"expected the variables of torchrun or srun in the environment, got {error} wrong or missing",
            hint="torchrun --nproc-per-node 2 -m curvescope …, or srun curvescope …",
        ) from error
    return None


def _torchrun(environ: Mapping[str, str]) -> Launch:
    rank = int(environ["RANK"])
    return Launch(
        rank,
        int(environ["WORLD_SIZE"]),
        int(environ.get("LOCAL_RANK", rank)),
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        "torchrun",
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    number = 100 * int(environ["SLURM_JOB_ID"]) + int(environ.get("SLURM_STEP_ID", 0))
    return Launch(
        int(environ["SLURM_PROCID"]),
        int(environ["SLURM_STEP_NUM_TASKS"]),
        int(environ["SLURM_LOCALID"]),
        environ.get("MASTER_ADDR") or first_host(nodes),
        int(environ.get("MASTER_PORT") or PORTS[number % len(PORTS)]),
        "Slurm",
    )


def first_host(nodes: str) -> str:
    """First host of a list in Slurm's notation: gpu003 for `gpu[003-007,12],login1`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise ValueError(f"the list of nodes {nodes!r}")
    name, number, end = match.groups()
    return f"{name}{number or ''}{end or ''}"

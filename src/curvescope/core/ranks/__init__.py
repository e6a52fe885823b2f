"""Processes (ranks) that compute one result together: shared errors, divided products, shards of vectors."""

from curvescope.core.ranks.collectives import (
    Division,
    PieceDivision,
    current_division,
    gather_objects,
    group_in_step,
    in_step,
    is_single_process,
    loads_sharded,
    on_first_rank,
    piece_division,
    rank_and_size,
    shared_errors,
    single_process,
    use_division,
)

__all__ = [
    "Division",
    "PieceDivision",
    "current_division",
    "gather_objects",
    "group_in_step",
    "in_step",
    "is_single_process",
    "loads_sharded",
    "on_first_rank",
    "piece_division",
    "rank_and_size",
    "shared_errors",
    "single_process",
    "use_division",
]

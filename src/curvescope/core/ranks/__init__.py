"""Processes that compute one thing: how they keep in step (`steps`), how they were started (`launch`)."""

from curvescope.core.ranks.collectives import (
    Apart,
    Division,
    alone,
    by_itself,
    dividing,
    dividing_by,
    everyone,
    from_first,
    group_in_step,
    in_step,
    pieces_apart,
    place,
    spreading,
    together,
)

__all__ = [
    "Apart",
    "Division",
    "alone",
    "by_itself",
    "dividing",
    "dividing_by",
    "everyone",
    "from_first",
    "group_in_step",
    "in_step",
    "pieces_apart",
    "place",
    "spreading",
    "together",
]

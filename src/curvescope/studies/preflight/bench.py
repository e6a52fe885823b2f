"""Products on a part of the first batch: seconds and bytes of each kind."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch

from curvescope.core.seeds import probes
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.operators.sources import FunctionalSources
from curvescope.problem import Problem
from curvescope.studies.preflight.cut import Cut, part
from curvescope.studies.preflight.meter import Meter
from curvescope.studies.setting import ModelOnData

CALLS = 4  # of a kind, where they are quick
LEAST = 2  # the first builds, the second is as in an algorithm
PASSED = 2  # vectors that are an algorithm's own: what is multiplied, and the product
Clock = Callable[[], float]


class Kind(NamedTuple):
    """Products with so many columns of one operator over some parameters."""

    name: str
    space: tuple[str, ...]
    columns: int


class Taken(NamedTuple):
    """What a kind takes on one whole batch."""

    seconds: float  # of each vector
    building: float  # seconds that the first products take more
    graph: int  # bytes that are kept
    passing: int  # bytes beyond those, and beyond what is multiplied and the product, while it is taken
    opening: float = 0.0  # seconds until the first product, whatever the data are: the model is looked at


@final
class Bench:
    """Products on a part of the first batch."""

    def __init__(self, problem: Problem, cfg: ModelOnData, meter: Meter, clock: Clock, cut: Cut):
        self.problem, self.cut = part(problem, cut), cut
        self._cfg, self._meter, self._clock = cfg, meter, clock
        self._operators: dict[str, CurvatureOperator] = {}  # their blocks share what they keep, as in studies
        self.fast, self.attends, self.why = False, False, ""

    def take(self, kind: Kind, calls: int = CALLS, *, patience: float = 0.0) -> Taken:
        """LEAST products, and while there is patience CALLS or more."""
        before = self._meter.begin()
        op, product, size = self._product(kind)
        seconds: list[float] = []
        opened = self._clock()
        with op.frozen():
            while len(seconds) < LEAST or (len(seconds) < max(calls, CALLS) and sum(seconds) < patience):
                start = self._clock()
                product()
                seconds.append(self._clock() - start)
        opened, peak = self._clock() - opened, self._meter.peak()
        del product  # and the columns with it: they pass
        after = self._meter.begin()
        self.fast, self.attends, self.why = op.engine.name == "fast", op.engine.attends, op.engine.why
        frozen = statistics.median(seconds[len(seconds) // 2 :])
        return Taken(
            frozen / kind.columns,
            max(sum(seconds) - frozen * len(seconds), 0.0),
            max(after - before, 0),
            max(peak - after - PASSED * size, 0),
            opened - sum(seconds),
        )

    def let_go(self) -> None:
        """Free what operators keep."""
        self._operators.clear()

    def _product(self, kind: Kind) -> tuple[CurvatureOperator, Callable[[], Any], int]:
        """The operator, a call that is done when a card has done it, and the bytes of its columns."""
        problem = self.problem
        if kind.name in ("gradient", "loss"):
            call = problem.gradient if kind.name == "gradient" else problem.loss_value
            return self._operator("hessian"), lambda: torch.as_tensor(call()).sum().item(), 0
        if kind.name in ("sources", "source"):
            sources = FunctionalSources(problem)
            op = sources[next(iter(sources))]
        else:
            sources, op = None, self._operator(kind.name).block(list(kind.space) or "*")
        V = probes(op.shape[1], kind.columns, seed=0, dtype=op.dtype, device=op.device)
        if kind.name == "sources" and sources is not None:
            return op, lambda: sum(float(found.sum()) for found in sources.products(V).values()), V.nbytes
        return op, lambda: float((op @ V).sum()), V.nbytes

    def _operator(self, name: str) -> CurvatureOperator:
        if name not in self._operators:
            how: Any = {"engine": self._cfg.engine, "checkpoint": self._cfg.checkpoint}
            self._operators[name] = OPERATORS[name](self.problem, **how)
        return self._operators[name]

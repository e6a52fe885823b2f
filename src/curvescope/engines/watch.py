"""Whether a problem is still what it was when something of it was kept.

Before a product everything is looked at that costs nothing: what the module does (`snapshot`), where numbers
lie and how often autograd saw them written. Behind it, so that a GPU does not wait, all numbers are summed up
(`digest`) and the user's own module is asked on a few positions (`ask`).
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from curvescope.engines import ask
from curvescope.engines.check import Known, known
from curvescope.engines.digest import digest, same
from curvescope.engines.snapshot import Snapshot, version
from curvescope.problem import Problem


@final
class Watch:
    """The state of a problem, as an engine saw it last; `known` is what was found out of its model."""

    def __init__(self, problem: Problem, *, engine: str, checkpoint: bool):
        self._problem, self._engine, self._checkpoint = problem, engine, checkpoint
        self._few: ask.Few | None = None
        self.known: Known | None = None
        self._loss: Snapshot | None = None
        self._places: tuple[Any, ...] = ()
        self._digest: tuple[Tensor, ...] = ()
        self._fresh = False

    @property
    def few(self) -> ask.Few:
        """A small part of the data."""
        if self._few is None:
            self._few = ask.few_positions(self._problem)
        return self._few

    def look(self) -> Known | None:
        """What is known of the model, or None where nothing seems to have changed since the last look."""
        moved = self._where() != self._places
        if moved:
            self._few = None
        found = known(self._problem, self.few.batch, engine=self._engine, checkpoint=self._checkpoint)
        if self._loss is None or not self._loss.same():
            self._loss, moved = Snapshot(self._problem.loss), True
        if found is self.known and not moved:
            return None
        self.known, self._fresh = found, True
        self._places = self._where()
        return found

    def confirm(self) -> bool:
        """Whether numbers and answers are still those that were found when something changed last."""
        now = digest(self._tensors())
        if self._fresh:
            self._digest, self._fresh = now, False
            return True
        before = self.few.answer
        return same(now, self._digest) and (
            before is None or ask.alike(ask.answer(self._problem, self.few.batch), before)
        )

    def forget(self) -> None:
        """Look at everything anew."""
        self._places, self.known, self._few = (), None, None

    def _tensors(self) -> list[Tensor]:
        problem = self._problem
        held = self.known.snapshot.tensors if self.known is not None else []
        data = [t for batch in problem.batches for t in batch.tensors()]
        return [*problem.model.module.parameters(), *problem.point.values(), *held, *data]

    def _where(self) -> tuple[Any, ...]:
        """Where all numbers lie, how often autograd saw them written, and which data they are."""
        return self._problem.batches, *((t.data_ptr(), version(t)) for t in self._tensors())

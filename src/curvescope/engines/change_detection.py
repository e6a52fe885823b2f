"""Whether a problem is still what it was when something of it was kept.

Before a product it is looked at where numbers lie and how often autograd saw them written. Behind it, so that
a GPU does not wait, everything else is: what the module does (`snapshot`), all numbers, summed up (`digest`),
and what the user's own module answers on a few positions (`ask`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.engines import reference_forward
from curvescope.engines.kernel_validation import Known, known
from curvescope.engines.state.snapshot import Snapshot, modes, version
from curvescope.engines.tensor_digest import digest, same
from curvescope.problem import Problem


@final
class Watch:
    """The state of a problem, as an engine saw it last.

    Attributes:
        known: What is known of its model.
        compared: Whether that was found out at the last look, and with it that outputs are the module's own.
    """

    def __init__(self, problem: Problem, *, engine: str, checkpoint: bool):
        self._problem, self._engine, self._checkpoint = problem, engine, checkpoint
        self._few: reference_forward.Few | None = None
        self.known: Known | None = None
        self.compared = False
        self._loss: Snapshot | None = None
        self._places: tuple[Any, ...] = ()
        self._digest: tuple[Tensor, ...] = ()
        self._fresh = False
        self._looked: Any = None  # an event of the stream
        self._side: torch.cuda.Stream | None = None

    @property
    def few(self) -> reference_forward.Few:
        """A small part of the data."""
        if self._few is None:
            self._few = reference_forward.few_positions(self._problem)
        return self._few

    def look(self) -> Known | None:
        """What is known of the model, or None where no number seems to have moved since the last look."""
        if self._problem.device.type == "cuda":
            self._looked = torch.cuda.current_stream(self._problem.device).record_event()
        if self.agreed(self.known is not None and self._where() == self._places):
            return None
        self._problem.choice.check()
        self._few, self._fresh = None, True
        self.known, self.compared = known(
            self._problem, self.few, engine=self._engine, checkpoint=self._checkpoint
        )
        self._loss = Snapshot(self._problem.loss)
        self._places = self._where()  # of the tensors of this loss
        return self.known

    def computed_again(self) -> Known:
        """What is known of the model where its layers are computed again, from here on."""
        found = known(self._problem, self.few, engine=self._engine, checkpoint=True)
        self._checkpoint, (self.known, self.compared) = True, found
        return self.known

    def written(self) -> bool:
        """Whether numbers seem to have moved since the last look."""
        return self._where() != self._places

    def confirm(self) -> bool:
        """Whether all is what it was when numbers were seen to move last; only noted if that was just now.

        What a pass through all data wrote is seen even then.
        """
        assert self.known is not None, "confirmed behind a look"
        assert self._loss is not None, "found with what is known"
        with self._aside():
            now, before = digest(self._tensors()), self.few.answer
            if self._fresh:
                self._digest, self._fresh = now, False
                return self.agreed(not self.written())
            answer = None if before is None else reference_forward.answer(self._problem, self.few.batch)
            return self.agreed(
                self.known.snapshot.same()
                and self._loss.same()
                and same(now, self._digest)
                and (answer is None or before is None or reference_forward.alike(answer, before))
            )

    def agreed(self, holds: bool) -> bool:
        """Whether something holds, on every rank that the model is spread over."""
        spread = self._problem.model.spread
        return holds if spread is None else spread.all(holds, self._problem.device)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU beside the product, which is still under way: on a stream that waits for `look` alone."""
        if self._looked is None:
            yield
            return
        self._side = self._side or torch.cuda.Stream(self._problem.device)
        self._side.wait_event(self._looked)
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.current_stream(self._problem.device).wait_stream(self._side)

    def forget(self) -> None:
        """Look at everything anew."""
        self._places = ()

    def _tensors(self) -> list[Tensor]:
        problem = self._problem
        held = self.known.snapshot.tensors if self.known is not None else []
        held = held + (self._loss.tensors if self._loss is not None else [])
        data = [t for batch in problem.batches for t in batch.tensors()]
        return [*problem.model.parameters.values(), *problem.point.values(), *held, *data]

    def _where(self) -> tuple[Any, ...]:
        """Where all numbers lie, how often autograd saw them written, which data; global settings."""
        return modes(), self._problem.batches, *map(_place, self._tensors())


def moved(problem: Problem) -> CurvescopeError:
    """What to say where a problem has changed between products that belong together."""
    return CurvescopeError(
        f"{problem.model.name} or its data changed while something was computed from many products",
        hint="begin again, and let nothing write to them meanwhile",
    )


def _place(t: Tensor) -> tuple[int, int, bool]:
    at = t.data_ptr() if t.layout == torch.strided else id(t)
    return at, version(t), t.requires_grad

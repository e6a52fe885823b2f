"""`CurvatureMonitor`: the curvature of a model in training, two lines in any loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from curvescope.algorithms.checks import check_count, check_number
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.models.choice.choosing import frozen
from curvescope.models.choice.params import Params
from curvescope.models.running.calling import Output
from curvescope.monitor.budget import Budget, Clock
from curvescope.monitor.columns import BLOCK_COLUMNS, COLUMNS, TEXT
from curvescope.monitor.files import BLOCKS, HISTORY, Files, Row
from curvescope.monitor.look import PARTS, Effort, Look
from curvescope.monitor.memory import Memory
from curvescope.monitor.quiet import unseen
from curvescope.monitor.result import Monitored
from curvescope.monitor.wrapped import load_quietly
from curvescope.monitor.writers import Writer, open_writers
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint

if TYPE_CHECKING:
    import pandas as pd

Optimizer = torch.optim.Optimizer
VECTORS_EVERY = 60.0  # seconds between two times that vectors are written


@final
class CurvatureMonitor:
    """Measures the curvature of a model while it is trained, and leaves the training as it is.

        monitor = cs.CurvatureMonitor(model, batches, every=50, out="runs/mine")
        for step, batch in enumerate(loader):
            ...
            monitor.step(step, optimizer=optimizer)
        monitor.close()

    The Hessian is that of the mean loss on the probe batches, which stay the same, in eval mode. See
    `monitor.columns` for what is measured, `monitor.budget` for how the budget is kept.

    Args:
        model: An `nn.Module` or `cs.Model`; the module inside where it is compiled or data-parallel.
        batches: Probe batches, as `cs.Problem` takes them; read again at every measurement.
        loss: As `cs.Problem` takes it, like loss_fn, terms, output and params.
        every: A measurement is due at steps that it divides.
        out: Folder to write to; one that a killed run left goes on. None keeps everything in memory.
        budget: Share of the time that measuring may take; 1 is no limit.
        seed: Of probes and starts.
        blocks: Whether blocks are measured too, or globs of those to measure.
        top: Eigenvectors of the largest eigenvalues that are followed.
        tol: Error of λ_max that is enough, relative.
        num_probes: Of traces.
        writers: "tensorboard", "wandb", or objects with `write(step, numbers)` and `close()`.
        clock: Of seconds.
    """

    def __init__(
        self,
        model: Any,
        batches: Any,
        loss: Any = "cross_entropy",
        *,
        every: int = 50,
        out: str | Path | None = None,
        budget: float = 0.1,
        seed: int = 0,
        blocks: bool | str | Sequence[str] = True,
        top: int = 3,
        tol: float = 0.01,
        num_probes: int = 4,
        max_products: int = 60,
        writers: str | Iterable[str | Writer] = (),
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        terms: Any = None,
        output: Output | None = None,
        params: Params | Mapping[str, Any] | None = None,
        clock: Clock = time.perf_counter,
    ):
        self.every = check_count("every", every, at_least=1)
        share = check_number("budget", budget, above=0.0)
        if share > 1:
            raise UsageError(f"expected a budget of at most 1, all of the time, got {budget!r}")
        self._effort = Effort(
            check_count("top", top, at_least=1),
            check_number("tol", tol, above=0.0),
            check_count("num_probes", num_probes, at_least=2),
            check_count("max_products", max_products, at_least=8),
            seed,
        )
        own = params if isinstance(params, Mapping) else None
        self._model, self.notes = load_quietly(model, output, own)
        chosen = None if isinstance(params, Mapping) else params
        self._make = lambda: Problem(self._model, batches, loss, loss_fn=loss_fn, terms=terms, params=chosen)
        self._problem, self._frozen = self._make(), frozen(self._model)
        self._globs = _globs(blocks)
        for glob in self._globs:
            self._problem.space(glob)  # raises where it matches nothing
        self._writers = open_writers(writers, None if out is None else Path(out))
        self._memory = Memory()
        self._rows: list[Row] = []
        self._block_rows: list[Row] = []
        self._seen_at: dict[str, int] = {}  # block: number of the measurement that saw its λ_max
        self._pending, self._closed, self._calls = False, False, 0
        parts = PARTS if self._globs else PARTS[:-1]
        self._budget = Budget(share, parts, clock)
        self._files = None if out is None else self._open(Path(out))
        self._resumed = bool(self._rows)
        self._vectors_at = -math.inf

    # ------------------------------------------------------------------------------- the loop

    def step(self, step: int, optimizer: Optimizer | None = None) -> dict[str, float] | None:
        """Measure if it is due and affordable; the numbers measured, or None.

        A measurement that has to wait is made at the first later step at which it is affordable.
        """
        self._check_open()
        self._rewind(step)
        self._pending = self._pending or step % self.every == 0
        parts = self._budget.affordable() if self._pending else None
        return None if parts is None else self._measure(step, optimizer, parts)

    def measure(self, step: int, optimizer: Optimizer | None = None) -> dict[str, float]:
        """Measure everything now, whatever is due and whatever it costs; the numbers measured."""
        self._check_open()
        self._rewind(step)
        return self._measure(step, optimizer, self._budget.parts, all_blocks=True)

    def close(self) -> None:
        """Write the finished run, and close the writers; the history stays."""
        if self._closed:
            return
        self._closed = True
        if self._files is not None:
            self._files.finish(self.result())
        self._writers.close()

    def __enter__(self) -> CurvatureMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------- what was seen

    @property
    def history(self) -> pd.DataFrame:
        """One row a measurement, see `monitor.columns`; what was not measured is nan."""
        import pandas as pd

        return pd.DataFrame(self._rows, columns=[*COLUMNS, TEXT])

    @property
    def blocks(self) -> pd.DataFrame:
        """One row a block and measurement."""
        import pandas as pd

        return pd.DataFrame(self._block_rows, columns=list(BLOCK_COLUMNS))

    def result(self) -> Monitored:
        """What was seen so far, as a result that can be saved and shown."""
        history = {name: np.array([row.get(name, math.nan) for row in self._rows], float) for name in COLUMNS}
        blocks = {
            name: np.array(
                [row.get(name, math.nan) for row in self._block_rows], str if name == "block" else float
            )
            for name in BLOCK_COLUMNS
        }
        return Monitored(
            model=self._model.name,
            data=self._problem.batches.name,
            loss_name=self._problem.loss.name,
            num_terms=self._problem.num_terms,
            num_parameters=self._problem.space().size,
            every=self.every,
            budget=self._budget.limit,
            history=history,
            blocks=blocks,
            left_out=[str(row.get(TEXT, "")) for row in self._rows],
            notes=[*self._problem.notes, *self.notes],
        )

    # ------------------------------------------------------------------------------- measuring

    def _measure(
        self, step: int, optimizer: Optimizer | None, parts: tuple[str, ...], *, all_blocks: bool = False
    ) -> dict[str, float]:
        self._pending = False
        clock, costs = self._budget.clock, {}
        with unseen(self._model.module):
            begun = clock()
            until = begun + self._budget.allowance()
            self._fit()
            look = Look(self._problem, self._memory, self._effort, self._calls)
            try:
                with look.H.steady():
                    for part in parts:
                        start = clock()
                        self._part(look, part, optimizer, math.inf if all_blocks else until)
                        costs[part] = clock() - start
            except CurvescopeError as error:
                if isinstance(error, UsageError):
                    raise
                self._note(f"step {step}: {error}")
            for note in look.notes:
                self._note(note)
            self._calls += 1
        row = self._keep(step, look, parts, clock() - begun, costs)
        return {name: float(row[name]) for name in COLUMNS if row[name] == row[name]}

    def _part(self, look: Look, part: str, optimizer: Optimizer | None, until: float) -> None:
        if part == "ends":
            look.ends()
        elif part == "sharpness":
            look.sharpness(optimizer)
        elif part == "trace":
            look.trace()
        elif part == "ggn":
            look.ggn()
        else:
            clock = self._budget.clock
            names = sorted(self._names(look), key=lambda name: self._seen_at.get(name, -1))
            for name in look.block_ends(names, lambda: clock() >= until):
                self._seen_at[name] = self._calls

    def _names(self, look: Look) -> list[str]:
        """Blocks that are measured one by one, among those that vary."""
        chosen = {b.name for glob in self._globs for b in self._problem.space(glob)}
        return [name for name in look.space.slices if name in chosen]

    def _fit(self) -> None:
        """A problem of the model as it is: parameters may have been frozen or thawed."""
        now = frozen(self._model)
        if now != self._frozen:
            self._problem, self._frozen = self._make(), now

    def _keep(
        self, step: int, look: Look, parts: tuple[str, ...], whole: float, costs: Mapping[str, float]
    ) -> Row:
        budget = self._budget
        budget.note(costs, whole)
        row: Row = dict.fromkeys(COLUMNS, math.nan)
        row |= look.numbers
        row |= {
            "step": step,
            "seconds": budget.elapsed,
            "cost_seconds": whole,
            "share": budget.share,
            "products": look.products,
            "converged": look.numbers.get("converged", 0.0),
            TEXT: " ".join(part for part in budget.parts if part not in parts),
        }
        empty = dict.fromkeys(BLOCK_COLUMNS, math.nan)
        rows = [{**empty, **n, "step": step, "block": name} for name, n in look.blocks.items()]
        self._rows.append(row)
        self._block_rows += rows
        self._write(row, rows)
        return row

    def _write(self, row: Row, rows: list[Row]) -> None:
        if self._files is not None:
            self._files.go_on()
            self._files.append(HISTORY, [row])
            self._files.append(BLOCKS, rows)
            self._files.keep({**self._budget.state(), "calls": self._calls, "seen_at": self._seen_at})
            if self._budget.clock() - self._vectors_at >= VECTORS_EVERY:
                self._memory.save(self._files.state)
                self._vectors_at = self._budget.clock()
        numbers = {name: float(row[name]) for name in COLUMNS if name != "step" and row[name] == row[name]}
        self._writers.write(int(row["step"]), numbers)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # ------------------------------------------------------------------------------- going on

    def _open(self, folder: Path) -> Files:
        problem, effort = self._problem, self._effort
        shapes = {name: tuple(p.shape) for name, p in self._model.parameters.items()}
        contents = fingerprint(problem.batches, repr(sorted(shapes.items())))
        settings = {
            "loss": problem.loss.name,
            "every": self.every,
            "budget": self._budget.limit,
            "blocks": list(self._globs),
            **effort._asdict(),
        }
        about = {"model": self._model.name, "data": problem.batches.name}
        files = Files(folder, settings, contents, about)
        self._rows, self._block_rows = files.read(HISTORY), files.read(BLOCKS)
        account = files.account()
        if account is not None:
            self._budget.resume(account)
            self._calls, self._seen_at = int(account["calls"]), dict(account["seen_at"])
        self._memory.load(files.state)
        return files

    def _rewind(self, step: int) -> None:
        """Drop what was measured at this step or later: the loop has gone back."""
        check_count("step", step, at_least=0)
        if not self._rows or self._rows[-1]["step"] < step:
            return
        if self._files is not None and self._files.finished:
            raise UsageError(
                f"{self._files.folder} is finished at step {self._rows[-1]['step']}, got step {step}",
                hint="choose another out, or remove it",
            )
        self._rows = [row for row in self._rows if row["step"] < step]
        self._block_rows = [row for row in self._block_rows if row["step"] < step]
        if self._files is not None:
            self._files.rewrite(HISTORY, self._rows)
            self._files.rewrite(BLOCKS, self._block_rows)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("expected a monitor that is open, got one that was closed")


def _globs(blocks: bool | str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(blocks, bool):
        return ("*",) if blocks else ()
    return (blocks,) if isinstance(blocks, str) else tuple(blocks)

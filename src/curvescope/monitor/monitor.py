"""`CurvatureMonitor`: the curvature of a model in training, two lines in any loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from curvescope.algorithms.checks import check_count, check_number
from curvescope.algorithms.recording import recording
from curvescope.core.errors import UsageError, near_misses, warn
from curvescope.core.threads import thread_slowdown
from curvescope.models.choice import Params, frozen
from curvescope.models.description import describe
from curvescope.models.running.calling import Output
from curvescope.monitor.budget import MARGIN, Budget, Clock
from curvescope.monitor.columns import COLUMNS, TEXT
from curvescope.monitor.files import Files
from curvescope.monitor.history import History
from curvescope.monitor.look import PARTS, Effort, Look
from curvescope.monitor.memory import Memory
from curvescope.monitor.progress import MeasurementProgress
from curvescope.monitor.quiet import settled, unseen
from curvescope.monitor.result import Monitored
from curvescope.monitor.telling import Notes, end_of, skipping
from curvescope.monitor.wrapped import load_inner
from curvescope.monitor.writers import Writer, open_writers
from curvescope.problem import Problem
from curvescope.runs.contents import fingerprint
from curvescope.runs.folder import write_models
from curvescope.runs.growing import HISTORY

if TYPE_CHECKING:
    import pandas as pd

Optimizer = torch.optim.Optimizer
VERIFY = 10  # measurements from one search for what was missed to the next
SLOW_THREADS = 5.0  # times that several threads are slower than one before a note says so
SAVING = "saving"  # the vectors: a part of the budget too
VECTORS_EVERY = 60.0  # seconds from one writing of the vectors to the next


@final
class CurvatureMonitor:
    """Measures the curvature of a model while it is trained, and leaves the training as it is.

        monitor = cs.CurvatureMonitor(model, batches, every=50, out="runs/mine")
        for step, batch in enumerate(loader):
            ...                                        # forward, backward, optimizer.step(), as always
            monitor.step(step, optimizer=optimizer)
        monitor.close()

    The Hessian is that of the mean loss on the probe batches, which stay the same, in eval mode and in the
    type of the parameters, without autocast. `monitor.columns` says what is measured, `monitor.look` in which
    parts, `monitor.budget` how the budget is kept.

    Args:
        model: An `nn.Module` or `cs.Model`; the module inside where it is compiled or data-parallel.
        batches: Probe batches, as `cs.Problem` takes them; read again at every measurement.
        loss: As `cs.Problem` takes it, like loss_fn, terms, output and params.
        every: A measurement is due at the steps that it divides.
        out: Folder to write to; a run that was killed there goes on. None keeps everything in memory.
        budget: Share of the time that measuring may take; 1 is no limit.
        seed: Of probes and random starts.
        blocks: Whether λ_max of single blocks is measured, or globs of those.
        top: Eigenvectors of the largest eigenvalues that are followed.
        tol: Error of λ_max and λ_min that is enough, relative to λ_max; twice that of other operators.
        num_probes: Of traces, at least 2. The 95 % intervals have num_probes − 1 degrees of freedom.
        max_products: Most products of one search.
        writers: "tensorboard", "wandb", or objects with `write(step, numbers)` and `close()`.
        clock: Of seconds.
        raise_errors: Raise what goes wrong in the loop, for debugging. Otherwise `step`, `measure` and
            `close` raise nothing: they warn once of each failure, note it, and measure the rest.
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
        num_probes: int = 8,
        max_products: int = 60,
        writers: str | Iterable[str | Writer] = (),
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        terms: Any = None,
        output: Output | None = None,
        params: Params | Mapping[str, Any] | None = None,
        clock: Clock = time.perf_counter,
        raise_errors: bool = False,
        **unknown: Any,
    ):
        check_settings(unknown)
        self._raise_errors, self._failures = raise_errors, set[str]()
        self.every = check_count("every", every, at_least=1)
        self._budget = Budget(check_share(budget), clock)
        self._effort = Effort(
            top=check_count("top", top, at_least=1),
            tol=check_number("tol", tol, above=0.0),
            num_probes=check_count("num_probes", num_probes, at_least=2),
            max_products=check_count("max_products", max_products, at_least=8),
            seed=check_count("seed", seed, at_least=0),
        )
        function = params if isinstance(params, Mapping) else None
        self._model, texts = load_inner(model, output, function)
        self._notes = Notes(texts)
        options = {"loss_fn": loss_fn, "terms": terms, "params": None if function else params}
        self._make = lambda: Problem(self._model, batches, loss, **options)
        with unseen(self._model.module):  # a DataLoader draws a number when it is read
            self._problem, self._frozen = self._make(), frozen(self._model)
        self._globs = _globs(blocks)
        self._block_names()  # raises where a glob matches nothing
        self._writers = open_writers(writers, None if out is None else Path(out))
        self._writers.raise_errors = raise_errors
        self._memory, self._calls, self._due, self._closed = Memory(), 0, False, False
        self._seen: dict[str, int] = {}  # block: number of the measurement that last saw its λ_max
        self._history = History(None if out is None else self._open(Path(out)))
        self._vectors_at = -math.inf
        self._told: int | None = None  # the last step of this process
        self._skipped = 0  # due and not made since the last measurement
        self._end: dict[str, float] = {}  # of a run that is closed

    # ------------------------------------------------------------------------------- the loop

    def step(self, step: int, optimizer: Optimizer | None = None) -> dict[str, float] | None:
        """Measure if it is due and affordable; the numbers measured, or None.

        A measurement that has to wait is made at the first later step at which it is affordable.
        """
        with self._guarded(f"step {step}"):
            self._arrive(step)
            if step % self.every == 0:
                self._skipped += self._due
                self._due = True
            parts = self._budget.affordable(self._parts()) if self._due else None
            return None if parts is None else self._measure(step, optimizer, parts)
        return None

    def measure(self, step: int, optimizer: Optimizer | None = None) -> dict[str, float]:
        """Measure everything now, whatever it costs and whether or not it is due; the numbers measured."""
        with self._guarded(f"step {step}"):
            self._arrive(step)
            return self._measure(step, optimizer, self._parts(everything=True), until=math.inf) or {}
        return {}

    def close(self) -> None:
        """Finish the run folder, and close the writers; the history stays.

        Warns where more measurements were skipped, to keep the budget, than made.
        """
        if self._closed:
            return
        with self._guarded("the end of the run"):
            self._end = self._ending()
        self._closed = True
        with self._guarded("the run folder"):
            if self._history.files is not None:
                self._history.files.finish(self.result())
        with self._guarded("the writers"):
            self._writers.close()
        if self._end.get("skipped", 0) > len(self._history.rows):
            with suppress(Warning):  # `python -W error`
                warn(skipping(self._end, len(self._history.rows), self._budget.limit))

    def reopen(self) -> None:
        """Go on after `close`; rows from the next step on are dropped and measured again."""
        self._closed, self._told, self._end = False, None, {}
        if self._history.files is not None:
            self._history.files.own()

    @contextmanager
    def _guarded(self, what: str, step: int | None = None) -> Iterator[None]:
        """Turn an exception into a note and a warning, once for each reason, unless `raise_errors`."""
        try:
            yield
        except Exception as error:
            if self._raise_errors:
                raise
            self.note_failure(what, error, step)

    def note_failure(self, what: str, error: Exception, step: int | None = None) -> None:
        """Note a failure, and warn of it, unless the same reason was noted before."""
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if reason in self._failures:
            return
        self._failures.add(reason)
        at = "" if step is None else f" at step {step}"
        text = f"{what} failed{at}: {reason}; training goes on (raise_errors=True raises it)"
        self._notes.add(text, step or 0)
        with suppress(Warning):  # `python -W error`
            warn(text)

    def __enter__(self) -> CurvatureMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _arrive(self, step: int) -> None:
        """The loop is at a step: the first may lie behind what an earlier process measured, no other may."""
        check_count("step", step, at_least=0)
        if self._closed:
            raise UsageError("expected a monitor that is open, got one that was closed")
        if self._told is None:
            self._told = step
            if not self._history.rewind(step):
                folder = self._history.leave_folder()
                error = UsageError(
                    f"the run in {folder} is finished, and this loop begins at step {step}, before all of "
                    "its rows: the folder stays as it is, and new rows are in memory only",
                    hint="choose another out, or remove it",
                )
                if self._raise_errors:
                    raise error
                self.note_failure("the run folder", error, step)
        elif step < self._told or step == self._history.last_step:
            raise UsageError(
                f"expected a step after {self._told}, got {step}",
                hint="steps count on over epochs, and each is measured once",
            )
        self._told = step

    # ------------------------------------------------------------------------------- what was seen

    @property
    def history(self) -> pd.DataFrame:
        """One row a measurement, see `monitor.columns`; what was not measured is nan."""
        return self._history.frame()

    @property
    def blocks(self) -> pd.DataFrame:
        """One row a block and measurement."""
        return self._history.block_frame()

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        return self._notes.all()

    def _ending(self) -> dict[str, float]:
        """Where the loop stands, see `monitor.ending`; empty before its first step."""
        if self._closed or self._told is None:
            return self._end
        waiting = self._skipped + self._due
        return end_of(self._told, self._history.rows, self._budget, waiting)

    def result(self) -> Monitored:
        """What was seen so far, as a result that can be saved and shown."""
        end, made = self._ending(), len(self._history.rows)
        skipped = [skipping(end, made, self._budget.limit)] if end.get("skipped") else []
        return Monitored(
            model=self._model.name,
            data=self._problem.batches.name,
            loss_name=self._problem.loss.name,
            num_terms=self._problem.num_terms,
            num_parameters=self._problem.space().size,
            every=self.every,
            budget=self._budget.limit,
            history=self._history.arrays(),
            blocks=self._history.block_arrays(),
            left_out=[str(row[TEXT]) for row in self._history.rows],
            end=end,
            notes=[*self._problem.notes, *self.notes, *skipped],
        )

    # ------------------------------------------------------------------------------- measuring

    def _parts(self, *, everything: bool = False) -> tuple[str, ...]:
        """The parts that are due: single blocks wait until the cost of the rest is known."""
        left = set() if self._globs else {"blocks"}
        if self._calls % VERIFY:
            left.add("verify")
        if not (everything or self._calls or self._budget.limit >= 1):
            left.add("blocks")
        return tuple(part for part in PARTS if part not in left)

    def _measure(
        self, step: int, optimizer: Optimizer | None, parts: tuple[str, ...], until: float | None = None
    ) -> dict[str, float] | None:
        due, clock, costs = self._parts(), self._budget.clock, {}
        look: Look | None = None
        self._due = False
        begun = clock()
        with self._guarded("the measurement", step):
            settled(self._model)
            begun = clock()
            if until is None:
                until = begun + self._budget.allowance() if self._budget.costs else math.inf
            with unseen(self._model.module):
                self._fit()
                look = Look(self._problem, self._memory, self._effort, self._calls, step=step)
                look.stop = None if until == math.inf else lambda: clock() > until
                with self._shown(look, parts), look.H.frozen():
                    for part in parts:
                        start = begun if part == parts[0] else clock()
                        if part == parts[0] or start + self._budget.upper(part) <= until:
                            dearest = None
                            with self._guarded(part, step):
                                dearest = self._part(look, part, optimizer, until)
                            costs[part] = clock() - start if dearest is None else dearest
        costs.setdefault(parts[0], clock() - begun)
        self._budget.note(due, costs, clock() - begun)
        self._calls += 1
        if look is None:
            return None
        look.rates()
        for note in look.notes:
            self._notes.add(note, step)
        measured = clock()
        row = self._keep(step, look, self._left_out(look, due, costs), measured - begun)
        self._budget.spent += clock() - measured
        return row

    @contextmanager
    def _shown(self, look: Look, parts: Sequence[str]) -> Iterator[None]:
        """Count the products inside for `curvescope watch`; the first time also look at the threads."""
        if not self._calls and (slowdown := thread_slowdown()) > SLOW_THREADS:
            count = torch.get_num_threads()
            note = f"{count} threads take {slowdown:.0f} times as long as one: the machine is busy"
            self._notes.add(f"{note}; set OMP_NUM_THREADS=1", look.step)
        files = self._history.files
        most = look.most_products(parts, len(self._block_names()))
        state = None if files is None else files.state
        progress = MeasurementProgress(look.step, most, state, announce=not self._calls)
        try:
            with recording(progress):
                yield
        finally:
            progress.close()

    def _left_out(self, look: Look, due: Sequence[str], measured: Iterable[str]) -> list[str]:
        """The parts that have no number for want of time; single blocks, where not one of them has."""
        wanted = {*due, *(["blocks"] if self._globs else [])}
        there = {*measured} - {"blocks"}
        if any("lambda_max" in found for found in look.blocks.values()):
            there.add("blocks")
        return [part for part in PARTS if part in wanted - there]

    def _part(self, look: Look, part: str, optimizer: Optimizer | None, until: float) -> float | None:
        """Measure a part; seconds of its dearest piece, where it is made of several."""
        if part == "blocks":
            return self._blocks(look, until)
        if part == "sharpness":
            look.sharpness(optimizer)
        else:
            {"ends": look.ends, "verify": look.verify, "trace": look.trace, "ggn": look.ggn}[part]()
        return None

    def _blocks(self, look: Look, until: float) -> float:
        """λ_max of single blocks, those first that were seen longest ago, while the dearest would fit."""
        clock, expected, dearest = self._budget.clock, self._budget.upper("blocks"), 0.0
        for name in sorted(self._block_names(), key=lambda name: self._seen.get(name, -1)):
            start = clock()
            if start + max(expected, MARGIN * dearest) > until or not look.block_end(name):
                break
            dearest = max(dearest, clock() - start)
            self._seen[name] = self._calls
        return dearest

    def _block_names(self) -> list[str]:
        return list(dict.fromkeys(b.name for glob in self._globs for b in self._problem.space(glob)))

    def _fit(self) -> None:
        """A problem of the model as it is: parameters may have been frozen or thawed."""
        now = frozen(self._model)
        if now != self._frozen:
            self._problem, self._frozen = self._make(), now

    def _keep(self, step: int, look: Look, left_out: Sequence[str], cost: float) -> dict[str, float]:
        own = {
            "step": step,
            "seconds": self._budget.elapsed,
            "cost_seconds": cost,
            "share": self._budget.share,
            "products": look.products,
            "skipped": self._skipped,
        }
        self._skipped = 0
        row = self._history.add(
            {"converged": 0.0, **look.numbers, **own, TEXT: " ".join(left_out)}, look.blocks
        )
        if self._history.files is not None:
            with self._guarded("the run folder", step):
                self._history.save()
            with self._guarded("the state of the run", step):
                self._save_state(self._history.files)
        measured = {name: float(row[name]) for name in COLUMNS if not math.isnan(row[name])}
        numbers = {name: value for name, value in measured.items() if name != "step"}
        self._writers.write(step, numbers)
        return measured

    # ------------------------------------------------------------------------------- going on

    def _open(self, folder: Path) -> Files:
        """The folder, and what a run that was killed left there."""
        problem = self._problem
        shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}
        settings = {
            "loss": problem.loss.name,
            "every": self.every,
            "budget": self._budget.limit,
            "blocks": list(self._globs),
            **self._effort._asdict(),
        }
        contents = fingerprint(problem.batches, repr(sorted(shapes.items())))
        files = Files(folder, settings, contents, {"model": self._model.name, "data": problem.batches.name})
        write_models(folder, [describe(self._model)])
        account = files.account()
        if account is None and (rows := files.read(HISTORY)):  # a finished run, whose state is gone
            seconds, share = (0.0 if math.isnan(x) else x for x in (rows[-1]["seconds"], rows[-1]["share"]))
            self._budget.resume({"elapsed": seconds, "spent": share * seconds, "costs": {}, "missed": {}})
        if account is not None:
            self._budget.resume(account)
            self._calls, self._seen = account["calls"], account["seen"]
            self._memory.load(files.state)
        return files

    def _save_state(self, files: Files) -> None:
        """The account of time at every measurement, vectors once a minute: old ones are as good a start."""
        clock, budget = self._budget.clock, self._budget
        fits = SAVING not in budget.costs or budget.upper(SAVING) <= budget.allowance()
        if fits and clock() - self._vectors_at >= VECTORS_EVERY:
            start = clock()
            self._memory.save(files.state)
            self._vectors_at = clock()
            budget.note((), {SAVING: self._vectors_at - start}, 0.0)
        files.keep({**budget.state(), "calls": self._calls, "seen": self._seen})


def check_settings(unknown: Mapping[str, Any]) -> None:
    """Raise for the first name that is not an option of `CurvatureMonitor`, and name the closest option."""
    own = ("model", "batches", "unknown")
    known = [name for name in signature(CurvatureMonitor).parameters if name not in own]
    for name in unknown:
        if name not in known:
            raise UsageError(f"unexpected setting {name!r}", hint=near_misses(name, known))


def check_share(budget: float) -> float:
    """A share of the time, above 0 and at most 1."""
    share = check_number("budget", budget, above=0.0)
    if share > 1:
        raise UsageError(f"expected a budget of at most 1, all of the time, got {budget!r}")
    return share


def _globs(blocks: bool | str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(blocks, bool):
        return ("*",) if blocks else ()
    return (blocks,) if isinstance(blocks, str) else tuple(blocks)

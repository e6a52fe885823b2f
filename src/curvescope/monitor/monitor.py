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
from torch import Tensor

from curvescope.algorithms.checks import check_count, check_number
from curvescope.algorithms.recorded_products import recording
from curvescope.core.errors import UsageError, near_misses, warn
from curvescope.core.ranks import gather_objects, in_step
from curvescope.core.ranks.shard_layout import sharded_over
from curvescope.core.threads import thread_slowdown
from curvescope.models.description import describe
from curvescope.models.parameter_selection import Params, frozen
from curvescope.models.running.module_calls import Output
from curvescope.monitor.budget import MARGIN, PACE_STEPS, Budget, Clock
from curvescope.monitor.columns import COLUMNS, TEXT
from curvescope.monitor.diagnosis import RunFinding, diagnose_run
from curvescope.monitor.files import Files
from curvescope.monitor.history import History
from curvescope.monitor.measurement import FIRST_PRODUCTS, PARTS, USUAL_PRODUCTS, Effort, Measurement
from curvescope.monitor.memory import Memory
from curvescope.monitor.memory_limit import MemoryPlan, peak_bytes, plan_memory
from curvescope.monitor.messages import Notes, end_of, schedule, skipping, waiting
from curvescope.monitor.preserve_state import preserve_state, synchronize
from curvescope.monitor.progress import MeasurementProgress
from curvescope.monitor.result import Monitored
from curvescope.monitor.run_history import RunHistory, StableRate, stable_rate
from curvescope.monitor.run_page import write_page
from curvescope.monitor.signals import read_signals
from curvescope.monitor.wrapped import load_inner, shared_clock
from curvescope.monitor.writers import Writer, open_writers
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.folder import write_models
from curvescope.runs.live_history import HISTORY

if TYPE_CHECKING:
    import pandas as pd

Optimizer = torch.optim.Optimizer
VERIFY = 10  # measurements from one search for what was missed to the next
SLOW_THREADS = 5.0  # times that several threads are slower than one before a note says so
SAVING = "saving"  # the vectors: a part of the budget too
OVERHEAD_PRODUCTS = 3  # that gradient, checks and graph of a measurement cost as much as
GRADIENTS_PER_PRODUCT = 3.0  # what a product takes, before one was timed
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
    type of the parameters, without autocast. `monitor.columns` says what is measured, `monitor.measurement`
    in which parts, `monitor.budget` how the budget is kept.

    Args:
        model: An `nn.Module` or `cs.Model`; the module inside where it is compiled or data-parallel.
        batches: Probe batches, as `cs.Problem` takes them; read again at every measurement.
        loss: As `cs.Problem` takes it, like loss_fn, terms, output and params.
        every: A measurement is due at the steps that it divides.
        out: Folder to write to; a run that was killed there resumes. None keeps everything in memory.
        budget: Share of the time that measuring may take; 1 means without a limit.
        memory: Most memory that measuring may take beside the training's own, such as "1 GiB" or a number of
            bytes. Then fewer sequences are differentiated at once, layers are recomputed, and fewer vectors
            and probes are kept; the numbers stay those of all probe batches.
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
        memory: str | int | None = None,
        seed: int = 0,
        blocks: bool | str | Sequence[str] = True,
        top: int = 3,
        tol: float = 0.01,
        num_probes: int = 8,
        max_products: int = 60,
        writers: str | Iterable[str | Writer] = (),
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
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
        share = check_share(budget)
        effort = Effort(
            top=check_count("top", top, at_least=1),
            tol=check_number("tol", tol, above=0.0),
            num_probes=check_count("num_probes", num_probes, at_least=2),
            max_products=check_count("max_products", max_products, at_least=8),
            seed=check_count("seed", seed, at_least=0),
        )
        function = params if isinstance(params, Mapping) else None
        self._model, texts, self._passive = load_inner(model, output, function)
        self._spread = self._model.spread
        self._own_clock = clock
        self._budget = Budget(share, shared_clock(clock, self._spread, self._model.device))
        self._notes = Notes(texts)
        options = {"loss_fn": loss_fn, "terms": terms, "params": None if function else params}
        with preserve_state(self._model.module):  # a DataLoader draws a number when it is read
            problem = Problem(self._model, batches, loss, **options)
            self._plan: MemoryPlan = plan_memory(problem, effort, memory)
        own = batches if self._plan.batches is None else self._plan.batches
        self._make = lambda: Problem(self._model, own, loss, **options)
        with preserve_state(self._model.module):
            self._problem = problem if self._plan.batches is None else self._make()
        self._frozen, self._effort = frozen(self._model), self._plan.effort
        self._notes.add(self._plan.sentence, 0)
        self._globs = _globs(blocks)
        self._block_names()  # raises where a glob matches nothing
        quiet = self._passive or (self._spread is not None and self._spread.rank > 0)
        folder = None if out is None or quiet else Path(out)
        self._writers = open_writers(() if quiet else writers, folder)
        self._writers.raise_errors = raise_errors
        self._memory, self._calls, self._due, self._closed = Memory(), 0, False, False
        self._seen: dict[str, int] = {}  # block: number of the measurement that last saw its λ_max
        self._history = History(None if folder is None else self._open(folder))
        self._share_account()
        self._vectors_at = -math.inf
        self._last_step: int | None = None  # of this process
        self._training: float | None = None  # since when the loop trains; None while it measures
        self._weights: tuple[int, dict[str, Tensor]] | None = None  # as they were behind a step
        self._skipped = 0  # due and not made since the last measurement
        self._scheduled = self._waits = False  # whether the schedule, and the wait for the first, was said
        self._end: dict[str, float] = {}  # of a run that is closed

    # ------------------------------------------------------------------------------- the loop

    def step(
        self, step: int, optimizer: Optimizer | None = None, loss: Tensor | float | None = None
    ) -> dict[str, float] | None:
        """Measure if it is due and affordable; the numbers measured, or None.

        A measurement that has to wait is made at the first later step at which it is affordable.

        Args:
            step: Of the training loop.
            optimizer: Whose learning rate, state and last step are measured.
            loss: Of this training step; it is kept for the history of the training loss.
        """
        if self._passive:
            return None
        with self._guarded(f"step {step}"):
            self._arrive(step, loss)
            if step % self.every == 0:
                self._skipped += self._due
                self._due = True
            parts = self._affordable(step)
            row = None if parts is None else self._measure(step, optimizer, parts)
            self._leave(step)
            return row
        return None

    def measure(self, step: int, optimizer: Optimizer | None = None) -> dict[str, float]:
        """Measure everything now, whatever it costs and whether or not it is due; the numbers measured."""
        if self._passive:
            return {}
        with self._guarded(f"step {step}"):
            self._arrive(step)
            row = self._measure(step, optimizer, self._parts(everything=True), until=math.inf) or {}
            self._leave(step)
            return row
        return {}

    def close(self) -> None:
        """Finish the run folder, and close the writers; the history stays."""
        if self._closed:
            return
        with self._guarded("the end of the run"):
            self._end = self._ending(closing=True)
        self._closed, self._weights = True, None
        with self._guarded("the run folder"):
            if self._history.files is not None:
                self._history.save()
                self._history.files.finish(self.result())
                self._write_page(self._history.files.folder, finished=True)
        with self._guarded("the writers"):
            self._writers.close()

    def reopen(self) -> None:
        """Continue after `close`; rows from the next step on are dropped and measured again."""
        self._closed, self._last_step, self._training, self._end = False, None, None, {}
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
            if self._spread is not None:  # the ranks may no longer be at the same place
                self._passive = True

    def note_failure(self, what: str, error: Exception, step: int | None = None) -> None:
        """Note a failure, and warn of it, unless the same reason was noted before."""
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if reason in self._failures:
            return
        self._failures.add(reason)
        at = "" if step is None else f" at step {step}"
        text = f"{what} failed{at}: {reason}; training continues (raise_errors=True raises it)"
        self._notes.add(text, step or 0)
        with suppress(Warning):  # `python -W error`
            warn(text)

    def __enter__(self) -> CurvatureMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _arrive(self, step: int, loss: Tensor | float | None = None) -> None:
        """The loop is at a step: the first may lie behind what an earlier process measured, no other may."""
        check_count("step", step, at_least=0)
        if self._closed:
            raise UsageError("expected a monitor that is open, got one that was closed")
        last = self._last_step
        if last is None:
            self._last_step = step
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
        elif step < last or step == self._history.last_row_step:
            raise UsageError(
                f"expected a step after {last}, got {step}",
                hint="steps count on over epochs, and each is measured once",
            )
        elif self._training is not None and step > last and self._looks(step):
            since, self._timed_step = self._timed_step, step
            self._budget.note_training(step - since, self._budget.clock() - self._training)
            self._training = None
        self._last_step = step
        if loss is not None:
            self._history.add_loss(step, loss)

    def _leave(self, step: int) -> None:
        """Let the loop train from now on, and keep the weights if the next step may be measured."""
        if self._training is None:
            self._training, self._timed_step = self._budget.clock(), step
        self._weights = None
        if not self._looks(step + 1):
            return
        due = (step + 1) % self.every == 0
        if due or (self._due and (not self._budget.costs or self._budget.wait(PARTS[0], self._usual()) <= 0)):
            self._weights = step, {n: p.detach().clone() for n, p in self._problem.named_parameters()}

    def _looks(self, step: int) -> bool:
        """Return True if this step reads the clock; all ranks of a sharded model do, so not in every step."""
        return self._spread is None or step % self.every == 0

    def _affordable(self, step: int) -> tuple[str, ...] | None:
        """The parts to measure at this step; None for none."""
        if not (self._due and self._looks(step)):
            return None
        budget, usual = self._budget, self._usual()
        if budget.limit < 1 and not budget.costs and not budget.product_seconds:
            if budget.steps < PACE_STEPS:
                return None
            self._time_gradient()
        following = self.every - step % self.every
        parts = budget.affordable(self._parts(), usual, every=following)
        if parts is None and budget.costs and not self._scheduled:
            self._scheduled = True
            self._say(schedule(budget, self.every, usual, self._parts(), step), step)
        elif parts is None and not budget.costs and budget.steps >= PACE_STEPS and not self._waits:
            self._waits = True
            self._say(waiting(budget, usual, step), step)
        return parts

    def _usual(self) -> dict[str, float]:
        """Products that each part usually takes; of the first part few are enough at first."""
        usual = self._effort.usual_products()
        return usual if self._budget.costs else {**usual, PARTS[0]: FIRST_PRODUCTS}

    def _time_gradient(self) -> None:
        """Guess what a product costs from a gradient, before the first measurement."""
        clock = self._budget.clock
        synchronize(self._model)
        start = clock()
        with preserve_state(self._model.module):
            self._problem.gradient()
            synchronize(self._model)
        seconds = clock() - start
        self._budget.spent += seconds
        self._budget.product_seconds = GRADIENTS_PER_PRODUCT * seconds

    def _say(self, text: str, step: int) -> None:
        """Add a note and warn of it, unless it is empty."""
        if text:
            self._notes.add(text, step)
            with suppress(Warning):  # `python -W error`
                warn(text)

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
        """Notes that a reader of the numbers should know."""
        return self._notes.all()

    @property
    def findings(self) -> list[RunFinding]:
        """Findings from the history, worst first: see `monitor.diagnosis`."""
        return diagnose_run(self._run_history())

    @property
    def max_learning_rate(self) -> StableRate | None:
        """The largest learning rate that is stable on the quadratic at the last measurement, with its error.

        It is the optimizer's threshold over the sharpness that it sees; None if that is not known, and in
        the first steps of Adam, whose preconditioner is not formed yet.
        """
        return stable_rate(self._run_history(), last=True)

    def _run_history(self) -> RunHistory:
        history = self._history
        return RunHistory(history.arrays(), history.block_arrays(), history.step_arrays())

    def _ending(self, *, closing: bool = False) -> dict[str, float]:
        """Numbers of the loop's last step, see `monitor.messages`; empty before its first step."""
        alone = self._spread is None or closing  # the time is that of the first rank, which all ask for
        if self._closed or self._last_step is None or not alone:
            return self._end
        waiting = self._skipped + self._due
        return end_of(self._last_step, self._history.rows, self._budget, waiting, self._usual())

    def result(self) -> Monitored:
        """Return the history so far as a result that can be saved and shown."""
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
            steps=self._history.step_arrays(),
            end=end,
            notes=[*self._problem.notes, *self.notes, *skipped],
        )

    # ------------------------------------------------------------------------------- measuring

    def _parts(self, *, everything: bool = False) -> tuple[str, ...]:
        """The parts that are due."""
        left = set() if self._globs else {"blocks"}
        if (everything or self._budget.limit >= 1) and self._calls % VERIFY:
            left.add("verify")
        return tuple(part for part in PARTS if part not in left)

    def _measure(
        self, step: int, optimizer: Optimizer | None, parts: tuple[str, ...], until: float | None = None
    ) -> dict[str, float] | None:
        due, clock = self._parts(), self._budget.clock
        costs, pieces = dict[str, float](), dict[str, float]()
        measurement: Measurement | None = None
        progress: MeasurementProgress | None = None
        self._due = False
        begun, peak = clock(), peak_bytes(self._model.device)
        with self._guarded("the measurement", step), self._in_step():
            synchronize(self._model)
            begun = clock()
            if until is None:
                until = begun + self._budget.allowance()
            with preserve_state(self._model.module):
                self._fit()
                measurement = Measurement(
                    self._problem, self._memory, self._effort, self._calls, step=step,
                    update=self._update(step), checkpoint=self._plan.checkpoint,
                )  # fmt: skip
                measurement.stop = None if until == math.inf else Deadline(clock, until)
                with self._shown(measurement, parts) as progress, measurement.H.frozen():
                    for part in parts:
                        start = begun if part == parts[0] else clock()
                        upper = self._budget.upper(part, self._usual())
                        if part == parts[0] or start + upper <= until:
                            with self._guarded(part, step):
                                self._measure_part(measurement, part, optimizer, until, pieces)
                            costs[part] = clock() - start
                synchronize(self._model)
        costs.setdefault(parts[0], clock() - begun)
        seconds = 0.0 if progress is None else progress.product_seconds
        if not self._budget.costs and seconds:  # what is done once for a model does not come again
            usual = USUAL_PRODUCTS[parts[0]] + OVERHEAD_PRODUCTS
            pieces[parts[0]] = min(costs[parts[0]], usual * seconds)
        self._budget.note(costs, clock() - begun, seconds, pieces)
        self._calls += 1
        if measurement is None:
            return None
        with self._guarded("the loss and the moments", step), preserve_state(self._model.module):
            measurement.numbers |= read_signals(self._problem, optimizer)
        measurement.rates()
        measurement.numbers["memory_over_training"] = peak_bytes(self._model.device) - peak
        for note in measurement.notes:
            self._notes.add(note, step)
        measured = clock()
        row = self._keep(step, measurement, self._left_out(measurement, due, costs), measured - begun)
        self._budget.spent += clock() - measured
        return row

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Inside, the ranks of a sharded model take the same steps, and sums are over all of them."""
        if self._spread is None:
            yield
            return
        with in_step(self._spread.group), sharded_over(self._spread):
            yield

    def _update(self, step: int) -> dict[str, Tensor] | None:
        """The last step of the optimizer, θ_t − θ_(t−1), if the weights before it were kept."""
        if self._weights is None or self._weights[0] >= step:
            return None
        before, self._weights = self._weights[1], None
        now = dict(self._problem.named_parameters())
        alike = {
            n for n, p in before.items() if n in now and p.shape == now[n].shape and p.dtype == now[n].dtype
        }
        return {n: now[n].detach() - before[n] for n in alike}

    @contextmanager
    def _shown(self, measurement: Measurement, parts: Sequence[str]) -> Iterator[MeasurementProgress]:
        """Count the products inside for `curvescope watch`; the first time also look at the threads."""
        if not self._calls and (slowdown := thread_slowdown()) > SLOW_THREADS:
            count = torch.get_num_threads()
            note = f"{count} threads take {slowdown:.0f} times as long as one: the machine is busy"
            self._notes.add(f"{note}; set OMP_NUM_THREADS=1", measurement.step)
        files = self._history.files
        usual = self._effort.usual_products()
        usual["blocks"] *= len(self._block_names())
        if not self._calls:  # nothing to follow yet
            usual["top"] = usual["bound"]
        likely = round(sum(usual[part] for part in parts))
        state = None if files is None else files.state
        progress = MeasurementProgress(
            measurement.step, likely, state, announce=not self._calls, clock=self._own_clock
        )
        try:
            with recording(progress):
                yield progress
        finally:
            progress.close()

    def _left_out(self, measurement: Measurement, due: Sequence[str], measured: Iterable[str]) -> list[str]:
        """The parts that have no number for want of time; single blocks, where not one of them has."""
        wanted = {*due, *(["blocks"] if self._globs else [])}
        with_numbers = {*measured} - {"blocks"}
        if any("lambda_max" in numbers for numbers in measurement.blocks.values()):
            with_numbers.add("blocks")
        if measurement.numbers.get("bounded"):
            with_numbers.add("bound")
        return [part for part in PARTS if part in wanted - with_numbers]

    def _measure_part(
        self,
        measurement: Measurement,
        part: str,
        optimizer: Optimizer | None,
        until: float,
        pieces: dict[str, float],
    ) -> None:
        """Measure a part; `pieces` gets the seconds of the dearest piece of one that is made of several."""
        if part == "top":
            measurement.top(optimizer, track=self._budget.limit < 1)
        elif part == "blocks":
            pieces[part] = self._measure_blocks(measurement, until)
        else:
            {
                "bound": measurement.bound,
                "along": measurement.along,
                "ends": measurement.ends,
                "trace": measurement.trace,
                "ggn": measurement.ggn,
                "verify": measurement.verify,
            }[part]()

    def _measure_blocks(self, measurement: Measurement, until: float) -> float:
        """λ_max of single blocks, those first that were seen longest ago, while the dearest would fit."""
        clock, expected, dearest = self._budget.clock, self._budget.upper("blocks", self._usual()), 0.0
        for name in sorted(self._block_names(), key=lambda name: self._seen.get(name, -1)):
            start = clock()
            if start + max(expected, MARGIN * dearest) > until or not measurement.block(name):
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

    def _keep(
        self, step: int, measurement: Measurement, left_out: Sequence[str], cost: float
    ) -> dict[str, float]:
        own = {
            "step": step,
            "seconds": self._budget.elapsed,
            "cost_seconds": cost,
            "share": self._budget.share,
            "products": measurement.products,
            "train_loss": self._history.last_loss(step),
            "skipped": self._skipped,
        }
        self._skipped = 0
        row = self._history.add(
            {"converged": 0.0, **measurement.numbers, **own, TEXT: " ".join(left_out)}, measurement.blocks
        )
        account = self._budget.state()
        if self._history.files is not None:
            with self._guarded("the run folder", step):
                self._history.save()
            with self._guarded("the state of the run", step):
                self._save_state(self._history.files, account)
            with self._guarded("the page of the run", step):
                self._write_page(self._history.files.folder, finished=False)
        measured = {name: float(row[name]) for name in COLUMNS if not math.isnan(row[name])}
        numbers = {name: value for name, value in measured.items() if name != "step"}
        self._writers.write(step, numbers)
        return measured

    # ------------------------------------------------------------------------------- resuming

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
            spent = {"elapsed": seconds, "spent": share * seconds, "costs": {}, "used": {}}
            self._budget.resume({**spent, "product_seconds": 0.0})
        if account is not None:
            self._budget.resume(account)
            self._calls, self._seen = account["calls"], account["seen"]
            self._memory.load(files.state)
        return files

    def _write_page(self, folder: Path, *, finished: bool) -> None:
        about = {"model": self._model.name, "data": self._problem.batches.name}
        write_page(folder, about, self._run_history(), finished=finished)

    def _save_state(self, files: Files, account: dict[str, Any]) -> None:
        """The account of time at every measurement, vectors once a minute: old ones are as good a start."""
        files.keep({**account, "calls": self._calls, "seen": self._seen})
        if self._spread is not None:
            return
        clock, budget = self._budget.clock, self._budget
        fits = SAVING not in budget.costs or budget.upper(SAVING, {}) <= budget.allowance()
        if fits and clock() - self._vectors_at >= VECTORS_EVERY:
            start = clock()
            self._memory.save(files.state)
            self._vectors_at = clock()
            budget.note({SAVING: self._vectors_at - start}, 0.0)

    def _share_account(self) -> None:
        """All ranks of a sharded model continue with the account that the first one has read."""
        if self._spread is None:
            return
        with in_step(self._spread.group):
            account, self._calls, self._seen, rows, blocks = gather_objects(
                (self._budget.state(), self._calls, self._seen, self._history.rows, self._history.block_rows)
            )[0]
        self._budget.resume(account)
        self._history.rows, self._history.block_rows = list(rows), list(blocks)


@final
class Deadline:
    """Tells a search to stop if another product, as long as the last one, would end too late."""

    def __init__(self, clock: Clock, until: float):
        self._clock, self._until = clock, until
        self._asked: float | None = None

    def __call__(self) -> bool:
        now = self._clock()
        last = 0.0 if self._asked is None else now - self._asked
        self._asked = now
        return now + last > self._until


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

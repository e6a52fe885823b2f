"""Writers of the monitor: the numbers arrive, once each, and nothing that fails stops a training run."""

from __future__ import annotations

import math
import sys

import pytest

from curvescope.core.errors import MissingExtra, UsageError
from curvescope.monitor.writers import TensorBoard, WandB, Writer, open_writers

NUMBERS = {"lambda_max": 3.5, "loss": 2.0, "lambda_min": math.nan, "converged": True}


class Kept:
    """A writer of one's own."""

    def __init__(self, fails: bool = False):
        self.rows, self.closed, self.fails = [], 0, fails

    def write(self, step, numbers):
        if self.fails:
            raise OSError("no space left\non this device")
        self.rows.append((step, dict(numbers)))

    def close(self):
        self.closed += 1


def scalars(folder):
    """Everything that TensorBoard reads of a folder: (step, value) by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_the_numbers_back(tmp_path):
    pytest.importorskip("tensorboard")
    writers = open_writers("tensorboard", tmp_path)
    assert not list(tmp_path.iterdir())  # nothing is made before there is a number
    writers.write(0, NUMBERS)
    writers.write(50, {"loss": 1.0})
    found = scalars(tmp_path / "tensorboard")  # while the run goes on
    writers.close()
    assert found == {
        "curvature/lambda_max": [(0, 3.5)],
        "curvature/loss": [(0, 2.0), (50, 1.0)],
        "curvature/converged": [(0, 1.0)],
    }


def test_a_resumed_run_takes_the_place_of_what_was_lost(tmp_path):
    pytest.importorskip("tensorboard")
    for steps in ([0, 50, 100], [50, 100]):  # killed behind 100, its last checkpoint before 50
        writer = TensorBoard(tmp_path)
        for step in steps:
            writer.write(step, {"loss": float(len(steps))})
        writer.close()
    assert scalars(tmp_path) == {"curvature/loss": [(0, 3.0), (50, 2.0), (100, 2.0)]}


def test_a_summary_writer_of_ones_own_stays_open(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard.writer import SummaryWriter

    mine = SummaryWriter(str(tmp_path))
    writer = TensorBoard(mine)
    writer.write(1, {"loss": 2.0})
    writer.close()
    mine.add_scalar("mine", 1.0, global_step=2)
    mine.close()
    assert scalars(tmp_path) == {"curvature/loss": [(1, 2.0)], "mine": [(2, 1.0)]}


def test_weights_and_biases_has_a_run_of_its_own(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    import wandb_files

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert wandb.run is None
    writers = open_writers(["wandb"], tmp_path)
    writers.write(0, NUMBERS)
    writers.write(50, {"loss": 1.0})
    assert wandb.run is None  # the process's own run, if it makes one, is not ours
    writers.close()
    wandb.teardown()  # its service writes to the end, and goes
    assert len(writers) == 1
    assert wandb_files.rows(tmp_path) == [
        {"curvature/step": 0, "curvature/lambda_max": 3.5, "curvature/loss": 2.0, "curvature/converged": 1.0},
        {"curvature/step": 50, "curvature/loss": 1.0},
    ]
    (name,) = (path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert name.endswith((tmp_path / "wandb" / "id").read_text(encoding="utf-8"))


class Run:
    """Rows as Weights & Biases counts them: a step that is past is dropped, an unfinished row is filled."""

    def __init__(self):
        self.step, self.row, self.rows, self.metrics, self.finished = 0, {}, [], {}, False

    def define_metric(self, name, **options):
        self.metrics[name] = options

    def log(self, data, step=None, commit=None):
        if step is not None and step < self.step:
            raise AssertionError("a row of the training loop was dropped")
        if step is not None and step > self.step:
            self._commit()
            self.step = step
        self.row |= data
        if commit if commit is not None else step is None:
            self._commit()

    def _commit(self):
        self.rows.append(self.row)
        self.row, self.step = {}, self.step + 1

    def finish(self):
        self.finished = True


@pytest.mark.parametrize("steps", [True, False])
def test_a_training_loop_with_a_run_keeps_its_rows(steps):
    pytest.importorskip("wandb")
    run = Run()
    writer = WandB(run=run)
    for step in range(4):
        run.log({"a": step}, **({"step": step} if steps else {}))
        writer.write(step, {"loss": float(step)})
        run.log({"b": step}, **({"step": step} if steps else {}))
    run.log({})
    writer.close()
    assert not run.finished
    assert run.metrics["curvature/*"] == {"step_metric": "curvature/step"}
    for name in ("a", "b"):
        assert [row[name] for row in run.rows if name in row] == [0, 1, 2, 3]
    assert [row["curvature/loss"] for row in run.rows if "curvature/loss" in row] == [0, 1, 2, 3]


def test_measurements_between_two_rows_of_the_loop_are_all_kept():
    pytest.importorskip("wandb")
    run = Run()
    writer = WandB(run=run)
    for step in range(3):
        writer.write(step, {"loss": float(step)})
    run.log({})
    assert [row["curvature/step"] for row in run.rows] == [0, 1, 2]


def test_a_writer_that_fails_is_told_goodbye():
    broken, fine = Kept(fails=True), Kept()
    writers = open_writers([broken, fine], None)
    with pytest.warns(UserWarning, match="Kept .*no space left"):
        writers.write(0, NUMBERS)
    writers.write(1, NUMBERS)
    writers.close()
    assert [step for step, _ in fine.rows] == [0, 1]
    assert (fine.closed, broken.closed) == (1, 0)


def test_an_object_with_write_and_close_is_a_writer():
    assert isinstance(Kept(), Writer)
    assert not isinstance(object(), Writer)


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (
            "tensorbord",
            "expected a writer, tensorboard or wandb, got 'tensorbord'.*did you mean 'tensorboard'",
        ),
        ("csv", "history.csv is written without it"),
        ([print], "expected a writer, got builtin_function_or_method"),
        (["tensorboard"], "'tensorboard' needs a folder"),
    ],
)
def test_bad_choices_are_one_sentence(chosen, sentence):
    with pytest.raises(UsageError, match=sentence):
        open_writers(chosen, None)


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "torch.utils.tensorboard.writer"), ("wandb", "wandb")]
)
def test_a_missing_package_is_one_sentence(name, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"'{name}' needs the package {name}.*pip install '?{name}"):
        open_writers(name, tmp_path)

"""What changes in a training run while it is watched."""

from __future__ import annotations

import math
import re

import pytest
import torch
from monitor_loops import IDS, LABELS, PROBE, TARGETS, X, fit, seed_everything, states, tiny

import curvescope as cs
from curvescope.core.operator import FunctionOperator
from curvescope.monitor.measurement import PARTS
from curvescope.monitor.progress import MeasurementProgress
from curvescope.runs.live_history import LiveHistory
from histories import begin
from histories import row as line


def watched(module, probe=PROBE, **options):
    return cs.CurvatureMonitor(module, probe, **{"budget": 1.0, "blocks": False, "num_probes": 2, **options})


def converged(module, blocks="*"):
    return cs.eigsh(cs.Hessian(cs.Problem(module, PROBE), blocks), 1).values[0]


def test_the_learning_rate_is_that_of_the_step():
    module = tiny()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    monitor = watched(module)
    first = monitor.measure(0, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    second = monitor.measure(1, optimizer)
    assert (first["lr"], second["lr"]) == (0.5, 0.05)
    assert second["lr_lambda_max"] == pytest.approx(0.1 * first["lr_lambda_max"], rel=0.02)


def test_what_is_frozen_is_left_out_and_comes_back():
    module = tiny()
    monitor = watched(module, blocks="L0.W_Q")
    whole = monitor.measure(0)["lambda_max"]
    module.get_parameter("E").requires_grad_(False)
    assert monitor.measure(1)["lambda_max"] == pytest.approx(converged(module), rel=0.01)
    assert "E" not in set(monitor.blocks.query("step == 1")["block"])
    module.get_parameter("E").requires_grad_(True)
    assert monitor.measure(2)["lambda_max"] == pytest.approx(whole, rel=0.01)
    assert "E" in set(monitor.blocks.query("step == 2")["block"])


def test_a_model_may_move_to_another_type():
    module = tiny()
    monitor = watched(module)
    before = monitor.measure(0)["lambda_max"]
    module.float()
    assert monitor.measure(1)["lambda_max"] == pytest.approx(before, rel=0.01)


def test_several_groups_have_rates_and_decays_of_their_own():
    module = tiny()
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "lr": 0.01}, {"params": vectors, "lr": 0.002, "weight_decay": 0.0}]
    )
    fit(module, optimizer, steps=range(4))
    row = watched(module).measure(0, optimizer)
    expected = cs.preconditioned_sharpness(cs.Hessian(cs.Problem(module, PROBE)), optimizer)
    assert row["lr"] == 0.01
    assert row["sharpness"] == pytest.approx(expected.value, rel=0.01)


def test_an_optimizer_inside_another_is_found():
    module = tiny()
    inner = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)

    class Wrapped(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

    assert watched(module).measure(0, Wrapped(inner))["threshold"] == 3


def test_an_optimizer_that_is_not_known_is_said():
    module = tiny()
    monitor = watched(module)
    row = monitor.measure(0, torch.optim.Adagrad(module.parameters(), lr=0.1))
    assert row["lr"] == 0.1
    assert "sharpness" not in row
    assert any("Adagrad" in note for note in monitor.notes)


def test_adam_before_its_first_step_has_no_diagonal():
    module = tiny()
    monitor = watched(module)
    assert "sharpness" not in monitor.measure(0, torch.optim.Adam(module.parameters()))
    assert any("no state" in note for note in monitor.notes)


def test_a_run_that_has_diverged_goes_on():
    module = tiny()
    monitor = watched(module)
    monitor.measure(0)
    with torch.no_grad():
        module.get_parameter("E").fill_(math.nan)
    row = monitor.measure(1)
    assert "lambda_max" not in row
    assert monitor.history["converged"].tolist() == [1, 0]


def test_what_fails_later_does_not_stop_the_run():
    module = tiny()
    monitor = watched(module)
    monitor.measure(0)
    hook = module.register_forward_pre_hook(_fail)
    with pytest.warns(UserWarning, match="at step 1.*no more"):
        monitor.measure(1)
    hook.remove()
    assert monitor.measure(2)["lambda_max"] == pytest.approx(monitor.history["lambda_max"][0], rel=0.01)
    assert any("step 1" in note for note in monitor.notes)


def test_what_fails_at_once_is_raised_on_request():
    module = tiny()
    monitor = watched(module, raise_errors=True)
    module.register_forward_pre_hook(_fail)
    with pytest.raises(cs.CurvescopeError, match="no more"):
        monitor.measure(0)


def _fail(module, inputs):
    raise RuntimeError("no more")


def test_a_loss_of_ones_own():
    module = tiny()

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    row = watched(module, [(IDS[:3], TARGETS[:3])], loss_fn=loss_fn).measure(0)
    assert row["lambda_max"] == pytest.approx(converged(module), rel=0.01)
    assert "ggn_lambda_max" not in row


def test_a_hugging_face_model_in_training():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=4, n_head=1, n_positions=4, vocab_size=5)
    module = transformers.GPT2LMHeadModel(config).double().train()
    monitor = watched(module, [{"input_ids": IDS[:3], "labels": IDS[:3]}], blocks="L0.W_Q")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    fit(module, optimizer, steps=range(2))
    row = monitor.measure(0, optimizer)
    assert module.training
    problem = cs.Problem(module.eval(), [{"input_ids": IDS[:3], "labels": IDS[:3]}])
    assert row["lambda_max"] == pytest.approx(cs.eigsh(cs.Hessian(problem), 1).values[0], rel=0.01)


LOOK = [f"measurement.Measurement.{name}" for name in (*PARTS[:5], "block", "rates", "__init__")]
FILES = ["files.Files.append", "files.Files.keep", "files.Files.finish", "memory.Memory.save"]
OTHERS = ["monitor.preserve_state", "monitor.synchronize", "budget.Budget.note", "history.History.add"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [*LOOK, *FILES, *OTHERS])
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("planted"), KeyboardInterrupt()], ids=["fault", "ctrl-c"]
)
def test_no_fault_stops_training(place, error, tmp_path, monkeypatch, undrawn):
    def fail(*args, **options):
        raise error

    def training(*, monitored):
        seed_everything()
        module = tiny()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        monitor = watched(module, every=2, blocks="L0.W_Q", out=tmp_path / "run") if monitored else None
        if monitor is not None:
            monkeypatch.setattr(f"curvescope.monitor.{place}", fail)
        fit(module, optimizer, monitor, steps=range(5))
        if monitor is not None:
            monitor.close()
        return monitor, torch.nn.utils.parameters_to_vector(module.parameters()), states()

    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            training(monitored=True)
        return
    _, weights, drawn = training(monitored=False)
    monitor, watched_weights, watched_drawn = training(monitored=True)
    assert torch.equal(weights, watched_weights)
    assert drawn == watched_drawn
    assert sum("planted" in note for note in monitor.notes) == 1
    if place == "measurement.Measurement.trace" or place in FILES:
        assert monitor.history["lambda_max"].notna().tolist() == [True] * 3


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -g


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_first_derivative_is_no_number():
    module = tiny()
    module.register_forward_hook(lambda module, inputs, output: Reversed.apply(output))
    monitor = watched(module)
    monitor.step(0)
    (row,) = monitor.history.to_dict("records")
    assert math.isnan(row["grad_norm"])
    assert math.isnan(row["lambda_max"])
    assert any("Reversed" in note for note in monitor.notes)


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.aux = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 3).double()

    def forward(self, x):
        return self.body(x)


def zero_head():
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5)).double()
    torch.nn.init.zeros_(net[2].weight)
    return net


@pytest.mark.parametrize("make", [Unused, zero_head])
def test_blocks_with_a_gradient_of_zero_are_measured(make):
    module, batch = make(), (X[:8], LABELS[:8])
    monitor = cs.CurvatureMonitor(module, [batch], every=1, budget=1.0, raise_errors=True)
    monitor.step(0)
    problem = cs.Problem(module, [batch])
    H = cs.Hessian(problem).to_dense()
    found = monitor.blocks.set_index("block")["lambda_max"]
    for name, rows in problem.space().slices.items():
        top = float(torch.linalg.eigvalsh(H[rows, rows])[-1])
        assert found[name] == pytest.approx(top, rel=0.02, abs=1e-9)


def test_a_misspelled_option_names_the_closest():
    with pytest.raises(cs.UsageError, match=r"'evry'.*'every'"):
        watched(tiny(), evry=5)


@pytest.mark.parametrize("options", [{"blocks": "nothing"}, {"every": 0}, {"top": 0}, {"num_probes": 1}])
def test_bad_settings_are_said_before_the_loop(options):
    with pytest.raises(cs.UsageError):
        watched(tiny(), **options)


def test_products_of_a_measurement_are_counted_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("curvescope.monitor.progress.WRITE_SECONDS", 0.0)
    begin(tmp_path, line(0))
    (tmp_path / "state").mkdir()
    run, op = LiveHistory(tmp_path), FunctionOperator(lambda V: 2 * V, (3, 3), dtype=torch.float64)
    progress = MeasurementProgress(50, 390, tmp_path / "state", announce=False)
    assert torch.equal(progress.product(op, torch.ones(3, 2, dtype=torch.float64)), 2 * torch.ones(3, 2))
    assert run.measuring() == {"step": 50, "products": 2, "expected": 390}
    progress.close()
    assert not run.measuring()


def test_the_first_measurement_says_what_it_takes(tmp_path, monkeypatch, capsys, undrawn):
    monkeypatch.setattr("curvescope.monitor.progress.LONG_SECONDS", 0.0)
    monitor = watched(tiny(), out=tmp_path / "run")
    row = monitor.step(0)
    said = re.search(r"(\d+) products", capsys.readouterr().err)
    assert int(said[1]) / 5 < row["products"] < 5 * int(said[1])
    monitor.step(50)
    assert not capsys.readouterr().err
    assert not LiveHistory(tmp_path / "run").measuring()


def test_threads_that_wait_for_each_other_are_noted(monkeypatch):
    monkeypatch.setattr("curvescope.monitor.monitor.thread_slowdown", lambda: 50.0)
    monitor = watched(tiny())
    monitor.step(0)
    assert any("50 times" in note and "OMP_NUM_THREADS=1" in note for note in monitor.notes)

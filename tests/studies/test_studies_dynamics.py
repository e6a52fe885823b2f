"""The study `dynamics`: steps are those of descent, planted runs are judged rightly, checkpoints sorted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import curvescope as cs
import oracles
import saved_models
from curvescope.cli.arguments.settings_parsing import split
from curvescope.core.errors import UsageError
from curvescope.data.tasks import task_data
from curvescope.models.zoo.folder import save
from curvescope.monitor.columns import BLOCK_COLUMNS, COLUMNS
from curvescope.monitor.result import Monitored
from curvescope.runs.study_result import FAILS, HOLDS, OPEN
from curvescope.studies import dynamics, find
from curvescope.studies.dynamics import analysis
from curvescope.studies.dynamics.analysis import (
    Recipe,
    accumulate,
    alarms,
    approach,
    change,
    false_alarms,
    find_points,
    follow,
    later_loss,
    make_optimizer,
    onset,
    phases,
    problem_of,
    warned,
)
from scenes import checked

READS_PAIRS = {"d_model": 2, "n_heads": 1, "d_ff": 3, "n_ctx": 3, "vocab_size": 24}
SHORT = dynamics.Config(experiments=("edge",), steps=2, every=2, num_sequences=4, num_probes=2)
PAIRS = replace(SHORT, data="task:modular_addition", batch_size=1000, dtype="float64", blocks=("L0.W_V",))


def problem(cuts: list[int] | None = None) -> cs.Problem:
    module = oracles.transformer(d_model=2, n_heads=1, d_ff=3, n_ctx=4, vocab_size=3)
    tokens = torch.randint(0, 3, (3, 5), generator=torch.Generator().manual_seed(0))
    parts = tokens.split(cuts or [3])
    return cs.Problem(module, [(part[:, :-1], part[:, 1:]) for part in parts])


def course(name: str = "edge-1", loss=(1.0, 0.5), **columns) -> dynamics.Course:
    """A run with these columns of the monitor; the others are nan."""
    length = len(next(iter(columns.values())))
    history = {key: np.full(length, np.nan) for key in COLUMNS}
    history["step"] = np.arange(length) * 10.0
    history |= {key: np.asarray(value, float) for key, value in columns.items()}
    nothing = {key: np.zeros(0) for key in BLOCK_COLUMNS}
    seen = Monitored("m", "d", "mse", 1.0, 1, 10, 1.0, history, nothing, [""] * length)
    return dynamics.Course(name, 0, "gd", np.ones(len(loss)), np.asarray(loss, float), seen)


def against(ratio, threshold: float = 2.0, **more) -> dynamics.Course:
    """A run whose η λ over its threshold is this."""
    r = np.asarray(ratio, float)
    return course(
        lr=np.ones(len(r)), sharpness=threshold * r, lr_sharpness=threshold * r,
        sharpness_threshold=np.full(len(r), threshold), sharpness_error=np.full(len(r), 1e-3),
        lambda_max=threshold * r, lambda_max_error=np.full(len(r), 1e-3),
        loss=np.linspace(1, 0.1, 10 * len(r)) + 0.05 * (np.arange(10 * len(r)) % 2), **more,
    )  # fmt: skip


def shown(*courses: dynamics.Course) -> dynamics.Dynamics:
    return dynamics.Dynamics("m", "d", [], {c.name: c for c in courses})


def verdicts(*courses: dynamics.Course) -> list[str]:
    return [claim.verdict for claim in shown(*courses).claims()]


@pytest.mark.parametrize("cuts", [[3], [1, 2]])
def test_the_gradient_is_that_of_the_whole_problem(cuts):
    whole = problem()
    part = problem(cuts)
    loss = accumulate(part, torch.optim.SGD(part.model.module.parameters(), lr=1.0))
    assert loss == pytest.approx(whole.loss_value(), rel=1e-12)
    found = part.space().gather({name: p.grad for name, p in part.model.named_parameters()})
    torch.testing.assert_close(found, whole.gradient())


def test_a_run_is_gradient_descent_and_its_sharpness_the_dense_one():
    start = problem()
    before = start.space().gather(dict(start.named_parameters())).clone()
    seen = follow(start, Recipe("gd", 0.3, 2), every=2, num_probes=2)
    theta = before
    for step in range(2):
        at = start.at(theta)
        assert seen.loss[step] == pytest.approx(at.loss_value(), rel=1e-12)
        theta = theta - 0.3 * at.gradient()
    assert seen.loss[2] == pytest.approx(start.at(theta).loss_value(), rel=1e-12)
    dense = torch.linalg.eigvalsh(cs.Hessian(start.at(theta)).to_dense())
    assert seen.column("lambda_max")[-1] == pytest.approx(float(dense[-1]), rel=0.02)
    assert seen.column("lr_lambda_max")[-1] == pytest.approx(0.3 * float(dense[-1]), rel=0.02)
    assert list(seen.measured) == [0, 2]
    torch.testing.assert_close(
        start.space().gather(dict(start.named_parameters())), before
    )  # the model is a copy's


def test_the_rate_rises_over_the_warm_up():
    recipe = Recipe("adam", 0.1, 10, warmup=4)
    assert [recipe.rate(step) for step in (0, 1, 3, 9)] == pytest.approx([0.025, 0.05, 0.1, 0.1])
    assert Recipe("gd", 0.1, 10).rate(0) == 0.1
    assert isinstance(make_optimizer(problem().model, Recipe("adamw", 0.1, 1)), torch.optim.AdamW)


def test_a_run_at_the_edge_is_seen_there():
    one = against([1.5, 0.8, 0.7, 0.9, 1.05, 1.1, 0.95, 1.05, 1.1])
    way = approach(one)
    assert (way.steps[way.lowest], way.steps[way.reached]) == (20, 40)
    assert way.near == 1.0
    ratio, up = later_loss(one, 40)
    assert ratio < 0.5
    assert 0.3 < up < 0.7
    assert verdicts(one) == [HOLDS, HOLDS, HOLDS]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ([0.5, 0.6, 0.7], [OPEN, OPEN, OPEN]),  # on its way
        (np.linspace(0.9, 0.3, 25), [FAILS, OPEN, OPEN]),  # it only falls
        ([0.5, 1.05, 2.0, 2.2, 2.5, 3.0], [HOLDS, FAILS, HOLDS]),  # it goes through
    ],
)
def test_other_runs_are_not(ratio, expected):
    assert verdicts(against(ratio)) == expected


def test_adam_is_compared_with_its_own_threshold():
    one = replace(against([0.2, 0.6, 1.05, 0.95, 1.0, 1.02], 38.0), name="adam", optimizer="adam")
    claims = shown(one).claims()
    assert "38/η" in claims[0].claim
    assert [claim.verdict for claim in claims] == [HOLDS, HOLDS, FAILS]  # λ_max itself does not rise


def spiking(quiet: bool = False) -> dynamics.Course:
    """Measured at 0, 10, …; the loss is three times its lowest at step 35."""
    loss = np.full(60, 0.5)
    loss[0] = 1.0
    loss[35:] = 0.5 if quiet else 1.6
    ratio = np.array([0.2, 0.8, 1.1, 1.4, 0.5, 0.4])
    name = f"spikes-{'below' if quiet else 'above'}-0"
    one = course(
        name, loss, lr=np.ones(6), lr_sharpness=2 * ratio, sharpness_threshold=np.full(6, 2.0),
        sharpness_error=np.zeros(6), threshold=np.full(6, 2.0), curvature_along_gradient=np.zeros(6),
        grad_share=np.array([0.9, 0, 0, 0.9, 0, 0]), grad_norm=np.ones(6),
    )  # fmt: skip
    one.seen.history["loss"] = loss[::10]
    return one


def test_leads_are_counted_from_the_first_unbroken_alarm():
    one = spiking()
    assert onset(one) == 35
    leads = {found.signal: found.lead for found in warned(one)}
    assert leads == {"sharpness": 15, "along_gradient": 0, "grad_share": 5, "grad_norm": 0, "loss": 0}
    assert list(alarms(one)["sharpness"]) == [False, False, True, True, False, False]


def test_alarms_without_a_spike_are_false():
    quiet = spiking(quiet=True)
    assert onset(quiet) is None
    assert false_alarms([quiet])["sharpness"] == (2, 6)
    assert verdicts(spiking(), quiet) == [HOLDS, FAILS]
    assert onset(replace(quiet, loss=np.array([1.0, 0.9, np.nan]))) == 2


def grokked(factor: float) -> dynamics.Course:
    held_out = np.array([0.1, 0.2, 0.3, 0.97, 1.0, 1.0])
    top = np.array([1.0, 8.0, 8.0, 8.0 * factor, 8.0 * factor, 8.0 * factor])
    one = course("grokking-0", (1.0, 0.5), lambda_max=top, lr_sharpness=np.full(6, np.nan))
    one.seen.history["loss"] = np.where(np.arange(6) < 3, 1.0, 0.1)
    steps = np.arange(6) * 10.0
    accuracy = np.array([0.2, 1.0, 1, 1, 1, 1])
    return replace(
        one, evaluated=steps, accuracy=accuracy, held_out_accuracy=held_out, held_out_loss=1 - held_out
    )


def test_curvature_before_and_after_grokking():
    one = grokked(0.25)
    assert (phases(one).memorized, phases(one).generalized) == (1, 3)
    assert change(one, "lambda_max").value == pytest.approx(0.25)
    assert change(one, "lambda_max", per_loss=True).value == pytest.approx(2.5)
    assert verdicts(one) == [HOLDS, HOLDS, FAILS]
    never = replace(one, held_out_accuracy=np.full(6, 0.2))
    assert verdicts(never) == [OPEN, OPEN, OPEN]


def test_warm_up_is_judged_by_counts():
    rough = [replace(spiking(), name=f"warmup-without-{i}") for i in range(5)]
    calm = [replace(spiking(quiet=True), name=f"warmup-with-{i}") for i in range(5)]
    assert verdicts(*rough, *calm) == [HOLDS, HOLDS]
    assert verdicts(*rough[:1], *calm[:1]) == [OPEN, OPEN]


class Stop(Exception):
    """In the middle."""


def test_a_run_goes_on_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch):
    for name in ("WIDTH", "HIDDEN"):
        monkeypatch.setattr(analysis, name, 4)

    def stop(what: str, number: int, total: int) -> None:
        if number == 2:
            raise Stop

    whole, state = dynamics.run(SHORT), {}
    with pytest.raises(Stop):
        dynamics.run(SHORT, progress=stop, state=state)
    assert list(state) == ["edge-0.6"]
    resumed = dynamics.run(SHORT, state=state)
    assert list(resumed.courses) == ["edge-0.6", "edge-0.9"]
    for name, one in whole.courses.items():
        np.testing.assert_array_equal(resumed.courses[name].loss, one.loss)
        np.testing.assert_array_equal(resumed.courses[name].column("lambda_max"), one.column("lambda_max"))
    first = whole.courses["edge-0.6"].seen.history
    assert first["lr_lambda_max"][0] == pytest.approx(2 / 0.6, rel=0.01)
    assert {*whole.tables(), *whole.figures()} <= set(whole.captions())


def test_the_small_model_fits_tasks_of_all_kinds():
    for name in ("sorting", "gaussian_regression"):
        found = problem_of(replace(SHORT, data=f"task:{name}", num_sequences=2))
        assert np.isfinite(found.loss_value())
    with pytest.raises(UsageError, match="a task for the small model"):
        problem_of(replace(SHORT, data="sample"))
    with pytest.raises(UsageError, match="expected some of edge"):
        dynamics.Config(experiments=("egde",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one shape, whose numbers do not sort as words, and a folder that is none."""
    root = tmp_path_factory.mktemp("run")
    for step, seed in ((1000, 1), (500, 2)):
        save(oracles.transformer(**READS_PAIRS, seed=seed), root / f"checkpoint-{step}")
    (root / "logs").mkdir()
    return root


def test_a_folder_of_checkpoints_is_a_sequence(folder: Path):
    cfg = replace(PAIRS, checkpoints=(str(folder),))
    assert [point.name for point in find_points(cfg)] == ["checkpoint-500", "checkpoint-1000"]
    result = dynamics.run(cfg)
    sequence = result.sequence
    assert sequence is not None
    assert list(sequence.steps) == [500, 1000]
    for i, name in enumerate(sequence.names):
        model = cs.load(str(folder / name), dtype="float64")
        dense = cs.Hessian(cs.Problem(model, task_data("modular_addition"))).to_dense()
        values = torch.linalg.eigvalsh(dense)
        assert sequence.column("lambda_max")[i] == pytest.approx(float(values[-1]), rel=0.02)
        assert sequence.column("lambda_min")[i] == pytest.approx(float(values[0]), rel=0.1)
        assert (
            abs(sequence.column("trace")[i] - float(dense.trace())) < 5 * sequence.column("trace_stderr")[i]
        )
    blocks, values = sequence.block_map()
    assert blocks == ["L0.W_V"]
    assert values.shape == (1, 2)
    words = next(words for label, _, words in result.summary() if label == "sharpest block")
    followed = f"the 1 block that was followed (of {len(dict(model.named_parameters()))})"
    assert words.endswith(f", the largest of {followed}")
    assert all(followed in result.captions()[name] for name in ("blocks", "block_map"))
    assert {*result.tables(), *result.figures()} <= set(result.captions())
    (line,) = checked(result)["over_checkpoints"]["variants"]["λ_min"]["data"]
    np.testing.assert_allclose(line["y"], sequence.column("lambda_min"), rtol=1e-5)
    assert result.claims() == []


def test_checkpoints_one_by_one_and_by_revision(folder: Path):
    both = tuple(str(folder / f"checkpoint-{step}") for step in (1000, 500))
    assert [point.step for point in find_points(replace(PAIRS, checkpoints=both))] == [500, 1000]
    bundled = find_points(replace(SHORT, checkpoints=("final", "initial")))
    assert [(point.name, point.revision, point.step) for point in bundled] == [
        ("initial", "initial", 0),
        ("final", "final", 12000),
    ]
    pythia = replace(SHORT, model="EleutherAI/pythia-70m", checkpoints=("step1000", "step512", "step64"))
    found = find_points(pythia)
    assert [(point.model, point.revision) for point in found] == [
        ("EleutherAI/pythia-70m", f"step{step}") for step in (64, 512, 1000)
    ]


def test_what_is_no_checkpoint_is_refused(folder: Path):
    with pytest.raises(UsageError, match="expected a model"):
        find_points(replace(PAIRS, checkpoints=(str(folder / "logs"),)))
    with pytest.raises(UsageError, match="a revision of the model"):
        find_points(replace(PAIRS, checkpoints=("step1000",)))
    other = folder.parent / "other-9"
    save(oracles.transformer(**{**READS_PAIRS, "d_ff": 4}), other)
    wrong = replace(PAIRS, checkpoints=(str(folder), str(other)))
    with pytest.raises(UsageError, match="a different model"):
        dynamics.run(wrong)


@pytest.mark.slow
def test_checkpoints_as_the_trainer_of_hugging_face_writes_them(tmp_path: Path):
    pytest.importorskip("transformers")
    for step in (10, 9):
        saved_models.save_family(tmp_path / f"checkpoint-{step}", "gpt2")
    cfg = replace(PAIRS, data="auto", tokens=8, seq_len=8, dtype="float32", blocks=("L0.W_V",))
    sequence = dynamics.run(replace(cfg, checkpoints=(str(tmp_path),))).sequence
    assert sequence is not None
    assert sequence.names == ["checkpoint-9", "checkpoint-10"]
    assert sequence.column("lambda_max")[0] == sequence.column("lambda_max")[1] > 0  # one model, twice
    trained = replace(cfg, model=str(tmp_path / "checkpoint-9"), experiments=("adam",), steps=2, every=2)
    assert np.isfinite(dynamics.run(trained).courses["adam"].loss).all()


def test_the_study_and_its_options_are_known():
    assert find("dynamics").Config is dynamics.Config
    assert split(["a,b", "c"]) == ["a", "b", "c"]
    assert split(None) == []

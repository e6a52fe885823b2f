"""The study `taylor`: its numbers against dense ones, descent as predicted, its ceiling, its run folder."""

from __future__ import annotations

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh

import curvescope as cs
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.result import Result
from curvescope.studies import taylor
from curvescope.studies.problem_config import make_problem
from curvescope.studies.taylor import analysis
from scenes import checked

TOML = """
n_layers = 1
d_model = 8
n_heads = 2
d_ff = 16
vocab_size = 3
n_ctx = 11
init = "scaled"
"""


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small.toml"
    path.write_text(TOML, encoding="utf-8")
    return taylor.Config.from_dict(
        {
            "model": str(path),
            "data": "task:sorting",
            "batch_size": 512,
            "num_top": 1,
            "num_points": 5,
            "plane_points": 3,
            "num_steps": 50,
            "fit_steps": 80,
            "fit_rate": 0.02,
        }
    )


@pytest.fixture(scope="module")
def measured(cfg):
    state = {}
    return taylor.run(cfg, state=state), state, make_problem(cfg)


def test_directions_are_what_they_are_called(measured):
    found, _, problem = measured
    assert list(found.lines) == ["gradient", "Adam's update", "eigenvector 1", "random"]
    H, g = cs.Hessian(problem), problem.gradient()
    top = float(eigsh(H.to_scipy(), 1, which="LA", return_eigenvectors=False)[0])
    assert found.sharpest[0] == pytest.approx(top)
    assert found.lines["eigenvector 1"].expansion.curvature == pytest.approx(top)
    assert found.lines["gradient"].expansion.curvature == pytest.approx(float(g @ (H @ g)))
    assert found.lines["random"].length == pytest.approx(1.0)
    gradients = cs.per_sample(problem).gradients()
    shares = torch.as_tensor(cs.per_sample(problem).shares)
    update = -(shares @ gradients) / ((shares @ gradients**2).sqrt() + 1e-8)
    assert found.lines["Adam's update"].expansion.slope == pytest.approx(float(g @ update))
    assert found.plane.curvature[0, 0] == pytest.approx(top)


def test_eigenvectors_point_downhill(cfg, monkeypatch):
    """Whichever sign the eigensolver gives."""
    problem, own = make_problem(cfg), analysis.eigsh
    g = problem.gradient()
    found = [analysis.top_pairs(problem, 2, 0).vectors]
    monkeypatch.setattr(
        analysis, "eigsh", lambda *given, **how: replace(pairs := own(*given, **how), vectors=-pairs.vectors)
    )
    found.append(analysis.top_pairs(problem, 2, 0).vectors)
    assert (g @ found[0] < 0).all()
    np.testing.assert_array_equal(found[0], found[1])


def test_descent_is_plain_gradient_descent(measured):
    found, _, problem = measured
    theta = problem.space().gather({k: p.detach() for k, p in problem.named_parameters()})
    one = found.descents[1]
    assert one.learning_rate == pytest.approx(0.95 * 2 / found.sharpest[0])
    for k in range(3):
        here = problem.at(theta)
        assert found.loss + one.change[k] == pytest.approx(here.loss_value())
        assert one.gradient_norm[k] == pytest.approx(float(here.gradient().norm()))
        theta = theta - one.learning_rate * here.gradient()
    assert found.predicted.gradient_norm[1, 0] == pytest.approx(one.gradient_norm[0])


def test_the_trajectory_is_predicted_within_five_per_cent_over_fifty_steps(measured):
    found = measured[0].settled
    assert len(found.descents[0].change) == 51
    for i, share in enumerate((0.1, 0.95)):
        one = found.descents[i]
        assert one.share == share
        assert one.steps_within(found.predicted.change[i], 0.05) == 50
        largest = np.maximum.accumulate(one.gradient_norm)
        np.testing.assert_array_less(
            np.abs(one.gradient_norm - found.predicted.gradient_norm[i]), 0.05 * largest
        )


def test_just_below_the_ceiling_converges_and_just_above_diverges(measured):
    found = measured[0].settled
    below, above = (np.abs(one.along / one.along[0]) for one in found.descents[1:])
    assert below[-1] == pytest.approx(0.9**50, rel=0.2)
    assert above[-1] == pytest.approx(1.1**50, rel=0.2)
    assert (np.diff(above) > 0).all()


def test_a_state_is_used_and_batches_change_nothing(cfg, measured):
    found, state, _ = measured
    begun = []
    again = taylor.run(cfg, state=dict(state), progress=lambda what, *_: begun.append(what))
    assert not begun
    assert again.summary() == found.summary()
    other = taylor.run(replace(cfg, batch_size=37, plane_points=0, shares=(), update=False, num_random=0))
    assert other.plane is None
    assert not other.descents
    assert other.settled is None
    line, own = other.lines["gradient"], found.lines["gradient"]
    assert line.radius(2) == pytest.approx(own.radius(2), rel=1e-6)


def test_it_is_shown(measured, tmp_path):
    mpl.use("Agg")
    found, *_ = measured
    again = Result.load(found.save(tmp_path))
    figures, tables = again.figures(), again.tables()
    scenes = checked(again)
    assert set(again.captions()) == {*figures, *tables, *scenes}
    line = again.lines["gradient"]
    (loss, *_) = scenes["slices"]["variants"]["gradient"]["data"]
    np.testing.assert_allclose(loss["y"], line.loss, rtol=1e-5)
    (plane, _) = scenes["plane"]["data"]
    np.testing.assert_allclose(plane["z"], again.plane.loss.T, rtol=1e-5)
    assert {"reach", "plane", "trajectories", "critical", "line_gradient", "line_adam_update"} <= set(figures)
    assert len(tables["radii"]) == 4 * 2 * 2
    assert len(tables["ceiling"]) == 6
    labels = [label for label, _, _ in again.summary()]
    assert "settled, 1.05" in labels
    import matplotlib.pyplot as plt

    plt.close("all")


def test_the_way_to_a_checkpoint_ends_there():
    cfg = taylor.Config(tokens=32, seq_len=16)
    model = make_problem(cfg).model
    other = taylor.study.other_point(cfg, model)
    middle = cs.load("tiny-gpt", revision="middle", dtype="float64")
    assert all(torch.equal(p, middle.get_parameter(name)) for name, p in other.named_parameters())
    assert taylor.study.other_point(replace(cfg, towards="none"), model) is None
    early = taylor.study.other_point(replace(cfg, revision="middle"), model)
    assert not torch.equal(early.get_parameter("E"), middle.get_parameter("E"))


def test_no_ceiling_is_one_sentence():
    flat = cs.eigsh(cs.Matrix(-torch.eye(3, dtype=torch.float64)), 1)
    with pytest.raises(CurvescopeError, match="λ_max is -1,"):
        analysis.ceiling(flat)


def test_descent_that_leaves_the_numbers_ends_there():
    class Power(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    batch = (torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    problem = cs.Problem(Power(), [batch], loss_fn=lambda model, batch: (model.w**6).sum())
    pairs = cs.eigsh(cs.Hessian(problem), 1)
    start = torch.tensor([4.0], dtype=torch.float64)
    found = analysis.descend(problem, start, pairs, 1.05, 30)
    assert found.diverged
    assert 1 < found.num_finite < 31
    assert np.isnan(found.change[-1])
    assert found.steps_within(np.zeros(31)) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shares": [0.0]}, "expected numbers above 0"),
        ({"plane_points": 1}, "expected 0 or at least 2"),
        ({"tolerance": 0.0}, "tolerance and fit_rate above 0"),
        ({"settle": 1.0}, "settle at least 0 and below 1"),
        ({"num_points": 1}, "at least 2"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(UsageError, match=words):
        taylor.Config.from_dict(settings)

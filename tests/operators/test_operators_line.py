"""Losses along lines: polynomials with known radii, networks against autograd, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from polynomials import problem_of
from torch import nn
from torch.func import functional_call

import curvescope as cs
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.result import Result
from curvescope.operators.taylor.expansion import Expansion, Radius, noise

ONE = torch.ones(1, dtype=torch.float64)


def around(radius: Radius, value: float) -> bool:
    """Whether the bracket holds a value, and is as narrow as it says."""
    return radius.low <= value <= radius.high <= 1.021 * radius.low


def test_a_quadratic_is_predicted_everywhere():
    A = torch.tensor([[3.0, 1.0, 0.0], [1.0, -2.0, 0.5], [0.0, 0.5, 1.0]], dtype=torch.float64)
    a = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    problem = problem_of(lambda w: 2.0 + a @ w + w @ A @ w / 2, size=3)
    d = torch.tensor([0.3, 1.0, -0.7], dtype=torch.float64)
    found = cs.loss_line(problem, d)
    assert found.expansion.loss == 2.0
    assert found.expansion.slope == pytest.approx(float(a @ d))
    assert found.expansion.curvature == pytest.approx(float(d @ A @ d))
    assert found.expansion.third == pytest.approx(0.0, abs=1e-12)
    assert found.length == pytest.approx(float(d.norm()))
    assert found.theta_length == 0
    for sides in found.radii.values():
        for side in sides.values():
            assert side.high == math.inf
            assert side.low == side.limit == pytest.approx(found.t.max())
            assert side.words() == f"beyond {side.low:.3g}"


@pytest.mark.parametrize("tolerance", [0.02, 0.1])
def test_the_radius_of_a_cubic(tolerance):
    problem = problem_of(lambda w: (1 + w**2 / 2 + 0.7 * w**3 / 6).sum())
    found = cs.loss_line(problem, ONE, tolerance=tolerance)
    assert found.expansion.third == pytest.approx(0.7)
    for side in found.radii["quadratic"].values():  # 0.7 r³/6 = tolerance r²/2
        assert around(side, 3 * tolerance / 0.7)
    assert {side.high for side in found.radii["cubic"].values()} == {math.inf}
    assert found.radius(2) == pytest.approx(3 * tolerance / 0.7, rel=0.02)


def test_the_radius_of_a_quartic_is_in_units_of_t_and_of_distance():
    problem = problem_of(lambda w: (1 + w**2 / 2 + w**4 / 24).sum())
    for length in (1.0, 5.0):
        found = cs.loss_line(problem, length * ONE)
        for sides in found.radii.values():
            assert all(around(side, math.sqrt(1.2) / length) for side in sides.values())
        assert found.distance(3) == pytest.approx(math.sqrt(1.2), rel=0.02)


def test_sides_differ():
    problem = problem_of(lambda w: w.exp().sum() - w.sum())  # t²/2 + t³/6 + …
    found = cs.loss_line(problem, ONE)
    r = {name: side.value for name, side in found.radii["quadratic"].items()}
    assert r["ahead"] < r["behind"]
    assert found.radius() == r["ahead"]


def test_a_radius_far_below_the_grid_is_found():
    problem = problem_of(lambda w: (1 + w**2 / 2 + 1e4 * w**3 / 6).sum())
    found = cs.loss_line(problem, ONE, span=(-1.0, 1.0))
    assert around(found.radii["quadratic"]["ahead"], 0.3e-4)


def test_without_lower_terms_a_prediction_holds_nowhere():
    found = cs.loss_line(problem_of(lambda w: (w**3).sum()), ONE, span=(-1.0, 1.0))
    side = found.radii["quadratic"]["ahead"]
    assert side.low == 0
    assert side.high < 1e-6
    assert side.words().startswith("below")
    hidden = cs.loss_line(problem_of(lambda w: (1 + w**5).sum()), ONE, span=(-1.0, 1.0)).radii["cubic"][
        "ahead"
    ]
    assert hidden.low == 0
    assert hidden.high < 2e-3  # nearer to θ the difference is below a rounding of the loss


def test_a_constant_loss_says_that_rounding_hides_the_answer():
    found = cs.loss_line(problem_of(lambda w: 1 + 0 * w.sum()), ONE)
    assert {side.words() for sides in found.radii.values() for side in sides.values()} == {
        "hidden by rounding"
    }
    assert math.isnan(found.radius())


def test_one_sided_and_other_ranges():
    problem = problem_of(lambda w: (1 + w**2 / 2 + 0.7 * w**3 / 6).sum())
    found = cs.loss_line(problem, ONE, span=(0.0, 1.0), num_points=5, cubic=False)
    assert found.radii["quadratic"]["behind"].words() == "not evaluated"
    assert found.orders == [2]
    assert math.isnan(found.expansion.third)
    assert "cubic" not in found.to_frame()
    assert found.radius() == pytest.approx(0.3 / 0.7, rel=0.02)


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_where_predictions_end(what):
    def function(w):
        wall = {"nan": (1 - w).sqrt() * 0, "inf": 0 * w}[what].sum()
        end = torch.full((), float(what), dtype=w.dtype)
        return (1 + w**2 / 2).sum() + torch.where(w.sum() < 1, wall, end)

    found = cs.loss_line(problem_of(function), ONE, span=(-2.0, 2.0), num_points=9)
    side = found.radii["quadratic"]["ahead"]
    assert around(side, 1.0)
    assert found.radii["quadratic"]["behind"].high == math.inf
    assert not np.isfinite(found.loss).all()
    assert found.plot() is not None


@pytest.mark.parametrize("end", [math.nan, math.inf])
def test_a_loss_that_is_no_number_here_is_one_sentence(end):
    problem = problem_of(lambda w: w.sum() + torch.tensor(end, dtype=w.dtype))
    with pytest.raises(CurvescopeError, match=f"the loss at θ is {end}, so it has no expansion there"):
        cs.loss_line(problem, ONE)


def mlp(dtype=torch.float64, cuts=(12,)):
    """A small network on twelve points, in batches of these sizes, and the points."""
    source = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=source, dtype=torch.float64))
    x, y = (torch.randn(12, n, generator=source, dtype=torch.float64).to(dtype) for n in (3, 2))
    data = list(zip(x.split(list(cuts)), y.split(list(cuts)), strict=True))
    return cs.Problem(module, data, loss="mse_mean"), x, y


def drawn(problem, seed=1):
    found = torch.randn(
        problem.space().size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return found.to(problem.dtype)


def test_losses_and_derivatives_are_those_of_autograd():
    problem, x, y = mlp()
    d = drawn(problem)
    found, tree = cs.loss_line(problem, d, num_points=5), problem.space().scatter(d)

    def loss(t):
        point = {name: p.detach() + t * tree[name] for name, p in problem.named_parameters()}
        return (functional_call(problem.model.module, point, (x,)) - y).square().mean()

    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    derivative, wanted = loss(t), []
    for _ in range(3):
        (derivative,) = torch.autograd.grad(derivative, t, create_graph=True)
        wanted.append(float(derivative.detach()))
    e = found.expansion
    np.testing.assert_allclose([e.slope, e.curvature, e.third], wanted, rtol=1e-10)
    np.testing.assert_allclose(found.loss, [float(loss(float(t))) for t in found.t], rtol=1e-12)
    near = np.array([float(loss(k * 1e-3)) for k in (-2, -1, 0, 1, 2)])
    assert e.third == pytest.approx(near @ [-1, 2, 0, -2, 1] / 2e-9, rel=1e-3)


def test_batches_change_nothing():
    found = [cs.loss_line(mlp(cuts=cuts)[0], "gradient") for cuts in ((12,), (10, 2), (1, 4, 7))]
    for other in found[1:]:
        np.testing.assert_allclose(other.loss, found[0].loss, rtol=1e-9)
        assert other.radius(2) == pytest.approx(found[0].radius(2), rel=1e-6)
        assert other.radius(3) == pytest.approx(found[0].radius(3), rel=1e-6)


def test_single_precision_finds_the_same_radii_and_measures_its_rounding():
    exact, single = (cs.loss_line(mlp(dtype)[0], "gradient") for dtype in (torch.float64, torch.float32))
    assert 1e-17 < exact.agreement.rounding < 1e-13
    assert 1e-8 < single.agreement.rounding < 1e-5
    for order in (2, 3):
        assert single.radius(order) == pytest.approx(exact.radius(order), rel=0.03)
    near = cs.loss_line(mlp(torch.float32)[0], "gradient", span=(-1e-6, 1e-6), num_points=11)
    assert set(near.to_frame()["quadratic_holds"]) == {"below rounding"}
    assert {side.words() for side in near.radii["quadratic"].values()} == {"hidden by rounding"}


def test_words_dictionaries_and_vectors_are_one():
    problem, *_ = mlp()
    space, g = problem.space(), problem.gradient()
    by_word = cs.loss_line(problem, "gradient", num_points=3)
    assert by_word.expansion.slope == pytest.approx(-float(g @ g))
    for given in (-g, space.scatter(-g)):
        np.testing.assert_allclose(cs.loss_line(problem, given, num_points=3).loss, by_word.loss, rtol=1e-12)
    one = cs.loss_line(problem, "random", seed=3, num_points=3)
    assert one.length == pytest.approx(1.0)
    assert one.expansion.slope != cs.loss_line(problem, "random", seed=4, num_points=3).expansion.slope


def test_a_radius_counts_every_point_that_was_looked_at():
    def bumpy(w):  # a quadratic with a dent that only some of the points see
        return (1 + w**2 / 2 + 0.3 * w**2 * torch.exp(-((w - 0.33) ** 2) / 2e-4) + 0.4 * w**3).sum()

    found = cs.loss_line(problem_of(bumpy), ONE, span=(-1.0, 1.0), num_points=11)
    for order, name in ((2, "quadratic"), (3, "cubic")):
        for side, radius in found.radii[name].items():
            t = found.t if side == "ahead" else -found.t
            before = found.verdicts(order)[(t > 0) & (t < radius.high)]
            assert (before >= 0).all()


def test_a_block_alone():
    problem, *_ = mlp()
    block = problem.space().blocks[0].name
    found = cs.loss_line(problem, "gradient", block, num_points=3)
    g = problem.gradient(block)
    assert found.expansion.slope == pytest.approx(-float(g @ g))
    tree = problem.space(block).scatter(-g)
    whole = cs.loss_line(problem, tree, num_points=3)
    assert whole.expansion.third == pytest.approx(found.expansion.third)


def test_another_point_is_at_one():
    problem, *_ = mlp()
    space = problem.space()
    theta = space.gather({k: p.detach() for k, p in problem.named_parameters()})
    there = theta + drawn(problem)
    points = [there, space.scatter(there), problem.at(there)]
    found = [cs.loss_line(problem, to=point, num_points=7) for point in points]
    assert 1.0 in cs.loss_line(problem, to=there, num_points=4).t
    for one in found:
        assert float(one.loss[np.argmin(np.abs(one.t - 1.0))]) == pytest.approx(
            problem.at(there).loss_value()
        )
        assert one.length == pytest.approx(float((there - theta).norm()))
        assert (one.t.min(), one.t.max()) == (-0.25, 1.25)
        assert one.theta_length == pytest.approx(float(theta.norm()))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"direction": torch.zeros(32, dtype=torch.float64)}, "expected a direction that is not zero"),
        ({"direction": torch.ones(7, dtype=torch.float64)}, r"32 entries, got a tensor of \(7,\)"),
        ({"direction": torch.ones(32, 2)}, r"expected a vector of 32 entries, got a tensor of \(32, 2\)"),
        ({"direction": 3}, "expected a vector of 32 entries, got int"),
        ({"direction": "gradent"}, "did you mean 'gradient'"),
        ({"direction": torch.full((32,), math.nan)}, "finite numbers"),
        ({"direction": {"0.weigt": torch.ones(5, 3)}}, "no parameter '0.weigt'"),
        ({"direction": {"0.weight": torch.ones(3, 5)}}, r"expected a tensor of \(5, 3\), got \(3, 5\)"),
        ({"to": {"0.weight": torch.ones(5, 3)}}, "got one without"),
        ({}, "got neither"),
        ({"direction": "random", "to": torch.ones(32)}, "got both"),
        ({"direction": "random", "tolerance": 0.0}, "expected a tolerance above 0"),
        ({"direction": "random", "num_points": 1}, "expected num_points of at least 2"),
        ({"direction": "random", "span": (1.0, 1.0)}, "low below high"),
        ({"direction": "random", "span": 3}, "low below high"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(given, words):
    problem, *_ = mlp()
    with pytest.raises(UsageError, match=words):
        cs.loss_line(problem, **given)


def test_the_way_to_where_one_is_is_refused():
    problem, *_ = mlp()
    with pytest.raises(UsageError, match="that is not zero"):
        cs.loss_line(problem, to=problem)
    with pytest.raises(UsageError, match=r"expected a cs\.Problem"):
        cs.loss_line(problem.model, "gradient")


def test_the_frame_and_the_folder(tmp_path):
    problem, *_ = mlp()
    found = cs.loss_line(problem, "gradient")
    frame = found.to_frame()
    assert list(frame["t"]) == sorted(found.t)
    np.testing.assert_allclose(frame["quadratic_error"], frame["loss"] - frame["quadratic"])
    allowed = 0.1 * (
        np.abs(found.t * found.expansion.slope) + found.t**2 * abs(found.expansion.curvature) / 2
    )
    np.testing.assert_allclose(frame["allowed"], allowed)
    r = found.radii["quadratic"]["ahead"]
    inside = frame[(frame["t"] > 0.05 * r.low) & (frame["t"] <= r.low)]
    assert set(inside["quadratic_holds"]) == {"holds"}
    again = Result.load(found.save(tmp_path))
    assert isinstance(again, cs.operators.LossLine)
    assert again.radii["quadratic"]["ahead"].words() == r.words()
    assert again.plot().get_title(loc="left") == found.direction


def test_the_model_is_left_as_it_was():
    problem, *_ = mlp()
    before = {name: p.clone() for name, p in problem.named_parameters()}
    cs.loss_line(problem, "random")
    assert all(torch.equal(before[name], p) for name, p in problem.named_parameters())


def test_noise_is_that_of_the_function():
    draw = np.random.default_rng(0)
    found = [noise(lambda t: 1 + t + t**2 + 1e-6 * draw.normal(), 1e-3, 1.0, 1e-16) for _ in range(40)]
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(4e-6, rel=0.2)
    assert noise(lambda t: 1 + t, 1e-3, 1.0, 1e-7) == 1e-7


def test_reach_is_where_the_terms_add_up():
    e = Expansion(3.0, -2.0, 5.0, -7.0)
    t = e.reach(3.0)
    assert 2 * t + 2.5 * t**2 + 7 / 6 * t**3 == pytest.approx(3.0)
    assert Expansion(3.0, 0.0, 0.0, 0.0).reach(3.0) == 1.0
    assert Expansion(3.0, 0.0, 8.0, math.nan).reach(4.0) == pytest.approx(1.0)

"""The study `factors`: matrices and distances against dense ones, steps, tuning, verdicts; its run."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.runs.study_result import FAILS, HOLDS, OPEN
from curvescope.studies import factors
from curvescope.studies.common.statistics import mean_interval
from curvescope.studies.factors import analysis
from curvescope.studies.factors.study import make_problem

CFG = factors.Config(
    width=4, sequences=2, seeds=2, checkpoints=(0, 4), steps=2, every=2, trials=2, dampings=(1.0,), draws=50,
)  # fmt: skip
BLOCKS = ["E", "L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_O", "L0.W_1", "L0.W_2", "U"]


@pytest.fixture(scope="module")
def problem():
    return make_problem(CFG, 1)


@pytest.fixture(scope="module")
def exact(problem):
    """The GGN and the Hessian, from products."""
    return cs.GGN(problem).in_blocks().to_dense(), cs.Hessian(problem).in_blocks().to_dense()


def own_vector(problem):
    """The parameters, one block after the other as everywhere in this study."""
    return problem.space(*BLOCKS).gather({name: p.detach() for name, p in problem.named_parameters()})


def at(problem, theta):
    return problem.at(problem.space(*BLOCKS).scatter(theta))


def test_the_full_profile_is_a_larger_network():
    cfg = factors.Config.from_dict(factors.STUDY.full)
    assert make_problem(cfg, 0).space().size == 2592 > 2 * make_problem(factors.Config(), 0).space().size


def dense(A: analysis.Blocked) -> torch.Tensor:
    return torch.block_diag(*A.parts)


def test_every_parameter_has_factors(problem):
    K = cs.KFAC(problem, kind="ggn")
    assert [layer.name for layer in K.layers] == list(analysis.places(problem)) == BLOCKS
    assert K.left_out == {}
    assert K.space.size == problem.space().size == sum(p.numel() for p in problem.parameters())


def test_exact_matrices_are_those_of_the_operators(problem, exact):
    rows, loss = analysis.ggn_rows(problem), analysis.VectorLoss(problem)
    theta = own_vector(problem)
    torch.testing.assert_close(rows.T @ rows, exact[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss.hessian(theta), exact[1], rtol=1e-9, atol=1e-12)
    value, g = loss.gradient(theta)
    torch.testing.assert_close(g, problem.gradient(*BLOCKS))
    assert value == pytest.approx(problem.loss_value()) == loss.value(theta)


def test_approximations_are_those_of_the_operators(problem, exact):
    G, slices = exact[0], analysis.places(problem).values()
    cut = torch.block_diag(*(G[s, s] for s in slices))
    mean = G.trace() / len(G)
    expected = {
        "identity": mean * torch.eye(len(G), dtype=G.dtype),
        "diagonal": G.diagonal().diag(),
        "kfac": cs.KFAC(problem, kind="ggn").in_blocks().to_dense(),
        "ekfac": cs.EKFAC(problem, kind="ggn").in_blocks().to_dense(),
        "shampoo": cs.Shampoo(problem, kind="ggn").in_blocks().to_dense(),
        "shampoo-squared": cs.Shampoo(problem, kind="ggn", exponent=1.0).in_blocks().to_dense(),
        "block-diagonal": cut,
        "ggn": G,
    }
    assert list(expected) == list(analysis.APPROXIMATIONS)
    rows = analysis.ggn_rows(problem)
    for name, wanted in expected.items():
        for known in (None, rows):
            A = analysis.approximation(name, problem, known)
            torch.testing.assert_close(dense(A), wanted, rtol=1e-8, atol=1e-11)
        assert float(A.mean_diagonal) == pytest.approx(float(wanted.trace()) / len(G))
        one = list(slices)[3]
        torch.testing.assert_close(A.block(one).parts[0], wanted[one, one], rtol=1e-8, atol=1e-11)


def random_matrices(seed: int = 0) -> tuple[analysis.Blocked, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A block-diagonal A, a positive B, any symmetric H, and a vector."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    parts = [X @ X.T for X in (draw(3, 3), draw(4, 2))]
    X, Y = draw(7, 7), draw(7, 7)
    return analysis.Blocked([slice(0, 3), slice(3, 7)], parts), X @ X.T, Y + Y.T, draw(7)


def test_distances_are_those_of_brute_force():
    A, B, H, g = random_matrices()
    whole, d = dense(A), 0.3
    eye = torch.eye(7, dtype=torch.float64)
    alpha, beta = d * whole.trace() / 7, d * B.trace() / 7
    M = torch.linalg.solve(whole + alpha * eye, B + beta * eye)
    values = torch.linalg.eigvals(M).real
    C, step = B + beta * eye, torch.linalg.solve(whole + alpha * eye, g)
    lengths = np.linspace(0, 40, 400_001)
    decreases = lengths * float(g @ step) - lengths**2 * float(step @ C @ step) / 2
    best = float(g @ torch.linalg.solve(C, g)) / 2

    def degrees(X):
        return math.degrees(math.acos(float((whole * X).sum() / (whole.norm() * X.norm()))))

    expected = [
        float((whole - B).norm() / B.norm()),
        degrees(B),
        float(values.mean().log() - values.log().mean()),
        1 - decreases.max() / best,
        float((whole - H).norm() / H.norm()),
        degrees(H),
    ]
    found = analysis.distances(A, analysis.target(B, d), H, g, d)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(found) == len(analysis.MEASURES)
    inside = float(B[:3, :3].norm() ** 2 + B[3:, 3:].norm() ** 2)
    assert analysis.between(B, A.slices) == pytest.approx(1 - inside / float(B.norm() ** 2))


def test_a_matrix_is_no_distance_from_itself_and_scale_is_not_seen():
    A, B, H, g = random_matrices(1)
    own = analysis.distances(analysis.whole(B), analysis.target(B, 0.1), H, g, 0.1)
    np.testing.assert_allclose(own[:4], 0, atol=1e-5)
    large = analysis.Blocked(A.slices, [100 * part for part in A.parts])
    one, other = (analysis.distances(X, analysis.target(B, 0.1), H, g, 0.1) for X in (A, large))
    np.testing.assert_allclose(one[[1, 2, 3, 5]], other[[1, 2, 3, 5]], rtol=1e-9)
    assert other[0] > 2 * one[0]


def test_a_step_is_that_of_a_dense_solve(problem, exact):
    theta = own_vector(problem)
    found = analysis.descend(problem, "kfac", rate=0.1, damping=0.5, steps=1, every=1)
    K = cs.KFAC(problem, kind="ggn").in_blocks()
    alpha = 0.5 * K.trace() / len(theta)
    moved = theta - 0.1 * torch.linalg.solve(
        K.to_dense() + alpha * torch.eye(len(theta), dtype=theta.dtype), problem.gradient(*BLOCKS)
    )
    assert found.loss == pytest.approx([problem.loss_value(), at(problem, moved).loss_value()])
    plain = analysis.descend(problem, "identity", rate=0.1, damping=0.5, steps=1, every=1)
    assert plain.final == pytest.approx(at(problem, theta - 0.1 * problem.gradient(*BLOCKS)).loss_value())


def test_curvature_is_made_anew_every_few_steps(problem, monkeypatch):
    made = []
    original = analysis.approximation
    monkeypatch.setattr(
        analysis, "approximation", lambda name, at: made.append(at.loss_value()) or original(name, at)
    )
    found = analysis.descend(problem, "diagonal", rate=0.1, damping=1.0, steps=5, every=2)
    assert made == pytest.approx(found.loss[[0, 2, 4]])
    lost = analysis.descend(problem, "identity", rate=1e9, damping=1.0, steps=3, every=2)
    assert math.isinf(lost.final)


def test_the_best_step_is_the_best_of_its_lengths(problem, exact):
    loss, g = analysis.VectorLoss(problem), problem.gradient(*BLOCKS)
    theta = own_vector(problem)
    A = analysis.approximation("diagonal", problem)
    found = analysis.best_step(loss, theta, A, exact[0], g, (1.0, 0.1))
    least = math.inf
    for damping in (1.0, 0.1):
        D = dense(A).diagonal()
        d = g / (D + damping * D.mean())
        unit = g @ d / (d @ exact[0] @ d)
        least = min(least, *(at(problem, theta - t * unit * d).loss_value() for t in analysis.LENGTHS))
    assert found == pytest.approx(problem.loss_value() - least)
    assert found > 0


def test_the_search_goes_down_to_where_no_neighbor_is_better():
    def bowl(cell):
        return (cell[0] - 2) ** 2 + (cell[1] + 1) ** 2

    tried, settled = analysis.search(bowl, 30, both=True)
    assert (analysis.lowest(tried), settled) == ((2, -1), True)
    assert all(
        cell in tried for cell in ((1, -1), (3, -1), (2, 0), (2, -2))
    )  # looked at on all sides of the best
    tried, settled = analysis.search(bowl, 4, both=True)
    assert (len(tried), settled) == (4, False)
    tried, settled = analysis.search(lambda cell: -cell[0], 100, both=False)
    assert (analysis.lowest(tried), settled) == ((analysis.FARTHEST[0], 0), False)
    assert all(cell[1] == 0 for cell in tried)
    tried, settled = analysis.search(
        lambda cell: math.inf if cell[0] > -3 else float(cell[0] ** 2), 40, both=False
    )
    assert (analysis.lowest(tried), settled) == ((-3, 0), True)


def test_correlations_know_planted_orders():
    source = np.random.default_rng(0)
    y = source.normal(size=(3, 4, 8))
    same = analysis.over_methods(y**3, y, draws=60, seed=0)
    assert (same.value, same.low, same.high) == pytest.approx((1, 1, 1))
    noise = source.normal(size=y.shape)
    nothing = analysis.over_methods(noise, y, draws=60, seed=0)
    assert nothing.low < 0 < nothing.high
    assert analysis.gain(y, noise, y, draws=60, seed=0).low > 0
    one = analysis.over_methods(y[:, :1], y[:, :1], draws=60, seed=0)
    assert one.value == pytest.approx(1)


@pytest.fixture(scope="module")
def measured():
    """The study for little, stopped once on the way."""
    state, begun = {}, []

    def stop(what, number, total):
        begun.append(what)
        if number == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        factors.run(CFG, state=state, progress=stop)
    found = factors.run(CFG, state=state, progress=lambda what, *_: begun.append(what))
    return found, begun, state


def test_a_run_goes_on_where_it_was_stopped(measured):
    found, begun, _ = measured
    assert len(begun) == 2 + 4 + 8 + 16 + 1
    assert found.whole.shape == (2, 2, 6, 8)
    assert found.parts.shape == (2, 2, 6, 8, 8)
    assert found.courses.shape == (2, 8, 3)
    np.testing.assert_allclose(found.courses[:, :, 0], found.loss[:, :1].repeat(8, axis=1))
    assert (found.decrease > 0).all()
    assert all(len(one.loss) <= 2 for one in found.tuned)
    assert [one.method for one in found.tuned] == found.approximations
    assert all(f"{one.method}: " in " ".join(found.notes) for one in found.tuned if not one.settled)


def test_theorems_are_found(measured):
    """EK-FAC is the nearest in its basis; the GGN's own blocks are the nearest block-diagonal matrix."""
    found, *_ = measured
    assert found.claims()[0].verdict == HOLDS
    np.testing.assert_allclose(found.of("frobenius", "ggn"), 0, atol=1e-9)
    np.testing.assert_allclose(
        found.of("frobenius", "block-diagonal"), np.sqrt(found.between[..., 0]), rtol=1e-6
    )
    others = found.distance("frobenius")[..., :-2]
    assert (others >= found.of("frobenius", "block-diagonal")[..., None] - 1e-9).all()


def verdict(result: factors.Factors, words: str) -> str:
    (one,) = [claim for claim in result.claims() if claim.claim == words]
    return one.verdict


def test_verdicts_follow_the_numbers(measured):
    found, *_ = measured
    distance = np.broadcast_to(np.linspace(0, 1, 8), (5, 3, 6, 8)) + 0.0
    distance[:, -1] += 0.5  # all move away, and by the same
    noise = np.random.default_rng(2).normal(size=(5, 1)) / 100
    distance[:, -1] += noise[..., None]
    parts = np.ones((5, 3, 6, 8, 8)) + noise[..., None, None, None]
    parts[:, :, :, 2, 1:3] += 1 + 0.1 * noise[:, :, None, None]  # kfac's queries and keys are further
    parts[:, :, :, 5, 1:3] -= 1 + 0.1 * noise[:, :, None, None]
    right = replace(
        found, loss=np.ones((5, 3)), whole=distance, parts=parts, decrease=1 - distance[:, :, 0],
        between=np.full((5, 3, 2), 0.7) + noise[..., None], courses=distance[:, 0, 0, :, None],
    )  # fmt: skip
    assert verdict(right, "the angle from the GGN predicts the optimizer's loss") == HOLDS
    assert verdict(right, "the lost decrease predicts the best single step") == HOLDS
    better = "the lost decrease predicts the best single step better than the relative error from the GGN"
    assert verdict(right, better) == OPEN
    assert verdict(right, "most of the GGN lies between blocks") == HOLDS
    assert verdict(right, "the distance of ekfac from the GGN grows in training") == HOLDS
    further = "is further from the GGN in queries and keys than in values and feed-forward"
    assert verdict(right, f"kfac {further}") == HOLDS
    assert verdict(right, f"shampoo-squared {further}") == FAILS
    assert right.opening().startswith("Over 8 approximations, the best single step increases with the angle")
    wrong = replace(right, decrease=-right.decrease, courses=-right.courses, between=1 - right.between)
    assert verdict(wrong, "the angle from the GGN predicts the optimizer's loss") == FAILS
    assert verdict(wrong, "the lost decrease predicts the best single step") == FAILS
    assert "the optimizer's loss decreases with the angle from the GGN (ρ = -1.00" in wrong.opening()
    assert verdict(wrong, "most of the GGN lies between blocks") == FAILS
    mixed = np.random.default_rng(0).normal(size=right.courses.shape)
    assert (
        verdict(replace(right, courses=mixed), "the angle from the GGN predicts the optimizer's loss") == OPEN
    )
    assert math.isnan(mean_interval(np.array([1.0, math.inf])).high)


def test_it_is_shown(measured, tmp_path):
    mpl.use("Agg")
    found = Result.load(measured[0].save(tmp_path))
    figures, tables = found.figures(), found.tables()
    assert set(found.captions()) == set(figures) | set(tables)
    assert len(tables["whole"]) == 2 * 2 * 8
    assert len(tables["parts"]) == 2 * 8 * 8
    assert len(tables["correlations"]) == 6 * 2
    assert list(tables["optimizers"]["approximation"]) == found.approximations
    assert tables["trials"]["chosen"].sum() == 8
    assert {claim.verdict for claim in found.claims()} <= {HOLDS, FAILS, OPEN}
    assert len(found.summary()) == 1 + 8 + 8 + len(found.notes) + len(found.claims())
    import matplotlib.pyplot as plt

    plt.close("all")


def test_without_optimizers_single_steps_are_left(measured):
    mpl.use("Agg")
    state = {name: one for name, one in measured[2].items() if "descent" not in name and "tuning" not in name}
    found = factors.run(replace(CFG, steps=0), state=state)
    assert found.tuned == []
    assert "optimizers" not in found.tables()
    assert set(found.captions()) == set(found.figures()) | set(found.tables())
    assert not any("optimizer" in claim.claim for claim in found.claims())
    import matplotlib.pyplot as plt

    plt.close("all")


def test_what_comes_behind_is_begun_ahead(monkeypatch):
    """In a thread here, for a process takes seconds to start."""
    asked = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count, method, **_):
            asked.append((count, method.get_start_method()))
            super().__init__(1)

    monkeypatch.setattr(analysis, "ProcessPoolExecutor", Pool)
    done = []
    with analysis.Workers(2) as workers:
        calls = analysis.Ahead(
            lambda item, *needed: done.append(item) or (item, needed), [1, 2, 3, 4], workers
        )
        assert calls.take(2, "x") == (2, ("x",))
        assert calls.take(3, "x") == (3, ("x",))
        assert calls.take(4, "x") == (4, ("x",))
    assert (done, asked) == ([2, 3, 4], [(2, "spawn")])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"width": 6}, "width: expected a multiple of 4, got 6"),
        ({"checkpoints": (0, 5, 5)}, "checkpoints from 0 on that grow"),
        ({"checkpoints": (3,)}, "checkpoints from 0 on that grow"),
        ({"damping": 0.0}, "lr, damping and dampings above 0"),
        ({"approximations": ("kfac", "ekfac", "kfca")}, "expected an approximation, got 'kfca'"),
        ({"approximations": ("kfac", "ekfac")}, "three approximations or more"),
        ({"seeds": 1}, "seeds: expected at least 2, got 1"),
        ({"workers": 0}, "workers: expected at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(settings, words):
    with pytest.raises(UsageError, match=words):
        factors.Config(**settings)

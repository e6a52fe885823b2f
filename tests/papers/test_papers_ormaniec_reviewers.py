"""What the reviewers asked: known curves, derivatives of every network, every verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.result import Result
from curvescope.papers import find_figure
from curvescope.papers.ormaniec2025.reviewers import Config, Reviewers, answers, orders, run, softmax
from curvescope.papers.ormaniec2025.reviewers import networks as setting
from curvescope.papers.ormaniec2025.reviewers.answers import (
    Regime,
    exponents,
    local_slopes,
)
from curvescope.papers.ormaniec2025.reviewers.answers import regimes as find_regimes
from curvescope.papers.ormaniec2025.reviewers.networks import (
    ARCHITECTURES,
    PARTS,
    NormSweep,
    block_norms,
    loss_slope,
)
from curvescope.papers.ormaniec2025.reviewers.softmax import train_together
from curvescope.studies.common.statistics import mean_interval

ANSWERS = {question.number: question.answers for question in (*orders.QUESTIONS, *softmax.QUESTIONS)}
SIGMA = np.logspace(-4, 2, 19)


def power(p: float, sigma: np.ndarray = SIGMA) -> np.ndarray:
    """Curves c σ^p of three seeds."""
    return np.array([[0.5], [1.0], [3.0]]) * sigma**p


Q, V = (3, 6, 5, 5), (1, 2, 3, 2)  # powers of the parts, in the order of PARTS
HEAD = {"L0.W_Q": Q, "L0.W_K": Q, "L0.W_V": V, "L0.W_O": V}


def made_up(blocks: dict[str, tuple[int, ...]], *, sigma: np.ndarray = SIGMA, drop: float = 0.0) -> NormSweep:
    """A sweep whose blocks have these powers, and ∂ℓ/∂F the power `drop`."""
    norms = [np.stack([power(powers[p], sigma) for powers in blocks.values()], -1) for p in range(len(PARTS))]
    return NormSweep(
        list(blocks), [4] * len(blocks), sigma, np.stack(norms, axis=2), 0.1 * power(drop, sigma)
    )


@pytest.mark.parametrize("p", [-2.0, 0.0, 5.0])
def test_the_exponent_of_a_power_law_is_found(p):
    found = mean_interval(exponents(SIGMA, power(p), high=1.0))
    assert found == pytest.approx((p, p, p), abs=1e-10)
    assert local_slopes(SIGMA, power(p)[0]) == pytest.approx(np.full(18, p), abs=1e-10)
    assert math.isnan(exponents(SIGMA, 0 * power(p))[0])


def test_regimes_of_a_broken_power_law():
    """σ⁵/(1 + σ⁴): slopes 5 and 1, with the bend at 1; no regime where the curve is zero."""
    curve = SIGMA**5 / (1 + SIGMA**4)
    first, second = find_regimes(SIGMA, curve)
    assert (first.slope, second.slope) == pytest.approx((5, 1), abs=0.05)
    assert first.low == SIGMA[0]
    assert second.high == SIGMA[-1]
    assert 0.2 < first.high <= 1 <= second.low < 3
    assert find_regimes(SIGMA, SIGMA**2) == [Regime(SIGMA[0], SIGMA[-1], pytest.approx(2))]
    zero = find_regimes(SIGMA, np.where(SIGMA < 1, SIGMA**2, 0.0))
    assert len(zero) == 1
    assert zero[0].high < 1
    assert find_regimes(SIGMA, np.exp(-(SIGMA**2)))[0].slope == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hessians_agree_with_differences_of_the_gradient(name):
    """Of every network; and what it says before a token does not depend on that token."""
    module, batch = ARCHITECTURES[name](0), setting.addition_batch(2)
    X = setting.embedded(batch, 0)
    problem = setting.problem(module, X, batch.targets)
    H, theta = (
        cs.Hessian(problem, engine="autograd"),
        problem.space().gather(dict(problem.named_parameters())).detach(),
    )
    v = torch.randn(len(theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = 1e-5
    ends = [problem.at(theta + s * step * v).gradient() for s in (1, -1)]
    torch.testing.assert_close(H @ v, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-8)
    outer, functional = (op(problem, engine="autograd") @ v for op in (cs.GGN, cs.FunctionalHessian))
    torch.testing.assert_close(outer + functional, H @ v, rtol=1e-10, atol=1e-12)
    changed = X.clone()
    changed[:, 5:] += 1.0
    torch.testing.assert_close(module(changed)[:, :5], module(X)[:, :5], rtol=0, atol=1e-12)


def test_networks_are_of_equal_size():
    sizes = {name: sum(p.numel() for p in make(0).parameters()) for name, make in ARCHITECTURES.items()}
    assert all(abs(size / sizes["Transformer"] - 1) <= 0.1 for size in sizes.values())
    assert (min(sizes.values()), max(sizes.values())) == (144, 161)


def test_norms_are_those_of_the_operators_and_the_loss():
    problem = orders.with_targets("one-hot targets", 2, 0, 0.5)
    found, space = block_norms(problem, "L0.W_[QV]"), problem.space()
    H, cut = cs.Hessian(problem).to_dense(), space.slices["L0.W_V"]
    assert found.shape == (4, 2)
    assert found[3, 1] == pytest.approx(float(H[cut, cut].norm()))
    assert found[0, 1] == pytest.approx(float(problem.gradient("L0.W_V").norm()))
    batch = next(iter(problem.batches))
    counted = batch.weights.bool()
    rest = (problem.model.module(batch.inputs) - batch.targets)[counted].detach()
    assert loss_slope(problem) == pytest.approx(2 * float(rest.square().sum(-1).mean().sqrt()))


def test_two_matrices_and_one_are_the_same_function():
    two, one = softmax.pair(3)
    X = setting.embedded(setting.addition_batch(2), 3)
    torch.testing.assert_close(one(X), two(X), rtol=1e-12, atol=1e-12)
    assert [sum(p.numel() for p in module.parameters()) for module in (one, two)] == [
        120,
        120,
    ]  # the caption's


@pytest.mark.parametrize(("how", "kind"), [("gradient descent", torch.optim.SGD), ("Adam", torch.optim.Adam)])
def test_training_side_by_side_is_training(how, kind):
    batch = setting.addition_batch(3)
    X, modules = setting.embedded(batch, 0), [setting.transformer(seed) for seed in (0, 1)]
    rates = torch.tensor([0.1, 0.02], dtype=torch.float64)
    found = train_together(modules, torch.stack([X, 2 * X]), batch.targets, rates=rates, steps=4, how=how)
    alone, inputs = setting.transformer(1), 2 * X
    optimizer = kind(alone.parameters(), lr=0.02)
    for step in range(5):
        loss = torch.nn.functional.cross_entropy(alone(inputs).flatten(0, 1), batch.targets.flatten())
        assert float(found[1, step]) == pytest.approx(loss.item(), rel=1e-10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_temperature_in_closed_form_agrees_with_automatic_differentiation():
    """The norm of H(Q, Q) of every kind, from the loss written out."""
    X, tau = setting.embedded(setting.addition_batch(2), 0), 0.7
    source = cs.core.seeds.generator(0, 3)
    W_Q, W_K, W_V = (0.4 * torch.randn(4, 4, generator=source).double() for _ in range(3))
    Y, seen = torch.randn(X.shape, generator=source).double(), torch.ones(9, 9).tril().bool()

    def loss(W, how):
        t = X @ W @ (X @ W_K).mT / (tau * 2)
        A = t.masked_fill(~seen, -torch.inf).softmax(-1) if how == "softmax" else t.masked_fill(~seen, 0.0)
        A = A / seen.sum(-1, keepdim=True) if how == "mean" else A
        return (A @ X @ W_V - Y).square().mean()

    for how in ("softmax", "linear", "mean"):
        H = torch.autograd.functional.hessian(lambda W, how=how: loss(W, how), W_Q)
        found = softmax.head_norms(0, 2, tau, how)[softmax.NAMES.index("QQ")]
        assert found == pytest.approx(float(torch.as_tensor(H).norm()), rel=1e-10)


def test_orders_hold_fail_or_hold_with_exceptions():
    values = {p: exponents(SIGMA, power(p)) for p in (2.0, 3.0)}
    cases = {"holds": (2, 3), "fails": (5, 5), "holds with exceptions: 1 of 2": (2, 5)}
    for verdict, claimed in cases.items():
        slopes = {f"σ^{p}": (v, c) for (p, v), c in zip(values.items(), claimed, strict=True)}
        assert answers.same_orders(slopes)[2] == verdict
    assert (
        answers.holds_where({"a": mean_interval(values[2.0]), "b": mean_interval(values[3.0])}, 2)
        == "holds with a"
    )
    assert answers.holds_where({"a": mean_interval(values[2.0])}, 2) == "holds"
    assert answers.holds_where({"a": mean_interval(values[2.0])}, 3) == "fails"


def test_regimes_give_every_verdict():
    whole, part = [[Regime(1e-4, 1e2, 5.0)]] * 3, [[Regime(1e-4, 0.1, 5.0), Regime(1, 1e2, 1.0)]] * 3
    judge = [
        orders.judge_law("H", p, "paper", SIGMA, c) for p, c in ((5, whole), (5, part), (3, part), (5, [[]]))
    ]
    assert [row.verdict for row in judge] == [
        "holds", "holds with σ from 0.0001 to 0.1", "fails", "not decided",
    ]  # fmt: skip
    assert "after it 1.00" in judge[1].measured
    assert "before it 5.00" in orders.judge_law("H", 1, "paper", SIGMA, part).measured


def test_temperatures_give_every_verdict():
    where = {"0.1": "fails", "1": "holds", "10": "holds"}
    assert softmax._where(where) == "holds with τ = 1, 10"
    assert softmax._where(dict.fromkeys(where, "fails")) == "fails"
    assert softmax._where({"0.1": "fails", "1": "not decided"}) == "not decided"
    tail = [made_up({"L0.W_Q": (p,) * 4}) for p in (-1, 0)]
    assert [orders.judge_tail(one, "L0.W_Q", -1).verdict for one in tail] == ["holds", "fails"]


def test_other_networks_give_every_verdict():
    of = {"Transformer": "holds", "MLP": "fails", "RNN": "fails"}
    assert orders.only_first(of) == "holds"
    assert orders.only_first(of | {"RNN": "holds"}) == "holds with exceptions: RNN"
    assert orders.only_first(dict.fromkeys(of, "holds")) == "fails"
    assert orders.only_first(of | {"Transformer": "not decided"}) == "not decided"


def verdicts(rows: list[answers.Answer]) -> dict[str, str]:
    return {row.claim: row.verdict for row in rows}


def test_answers_on_depth_follow_the_sweeps():
    right = {f"depth.{case}": made_up(HEAD) for case in orders.DEPTH_CASES}
    assert set(verdicts(ANSWERS[1](right)).values()) == {"holds"}
    collapsed = made_up(HEAD | {"L1.W_Q": (7, 14, 11, 11)})
    found = verdicts(ANSWERS[1](right | {"depth.2 heads": collapsed}))
    assert found["they survive several heads"] == "holds with exceptions: 2 of 14"


def test_answers_on_the_dropped_term_follow_the_sweeps():
    right = {f"dropped.{case}": made_up(HEAD, sigma=orders.DROPPED_SIGMA) for case in orders.TARGETS}
    found = verdicts(ANSWERS[2](right))
    assert list(found.values()) == ["holds", "holds", "holds", "holds", "fails"]
    moved = right | {"dropped.no target": made_up(HEAD, sigma=orders.DROPPED_SIGMA, drop=1.0)}
    first, _, third, *_ = verdicts(ANSWERS[2](moved)).values()
    assert first.startswith("holds with cross-entropy, one-hot")
    assert third == "fails"
    unbounded = right | {"dropped.cross-entropy": made_up(HEAD, sigma=orders.DROPPED_SIGMA, drop=2.0)}
    assert list(verdicts(ANSWERS[2](unbounded)).values())[3] == "fails"


def test_answers_on_networks_and_the_gradient_follow_the_sweeps():
    sigma = orders.ARCHITECTURE_SIGMA
    found = {f"architecture.{name}": made_up({"W": V}, sigma=sigma) for name in ARCHITECTURES}
    found["architecture.Transformer"] = made_up(HEAD, sigma=sigma)
    said = verdicts(ANSWERS[3](found))
    (special,) = (claim for claim in said if claim.startswith("blocks of H of "))
    assert said[special] == "holds"
    assert said["Transformer: all blocks of H grow with one order"] == "fails"
    assert said["RNN: all blocks of H grow with one order"] == "holds"
    sweeps = {"regime.softmax": made_up(HEAD), "regime.linear attention": made_up(dict.fromkeys(HEAD, Q))}
    said = verdicts(ANSWERS[6](sweeps))
    assert list(said.values()) == ["holds", "holds", "holds", "holds with W_V, W_O", "holds"]


def test_training_is_compared_with_the_best_rate():
    """Two rates; the second diverges. One matrix ends lower, and is there in half the steps."""
    steps = np.arange(9.0)
    two, one = (np.stack([np.exp(-r * steps) + 0.1 * s for s in range(3)]) for r in (0.1, 0.2))
    losses = np.stack([np.stack([way, np.where(steps < 8, way, np.nan)], 1) for way in (two, one)])
    found = softmax.TrainingLosses(np.array([0.1, 1.0]), losses)
    assert np.array_equal(found.best(), np.stack([two, one]))
    assert found.steps_to().tolist() == [[9] * 3, [5] * 3]
    rows = verdicts(softmax._training("Adam", found))
    assert list(rows.values()) == ["holds", "holds"]


def everything(cfg: Config) -> dict[str, Result]:
    """Pieces of the whole figure, made up."""
    found: dict[str, Result] = {
        f"depth.{case}": made_up(HEAD, sigma=SIGMA[3:6]) for case in orders.DEPTH_CASES
    }
    found |= {f"dropped.{case}": made_up(HEAD, sigma=orders.DROPPED_SIGMA) for case in orders.TARGETS}
    networks = {name: HEAD if name == "Transformer" else {"W": V, "U": V} for name in ARCHITECTURES}
    found |= {f"architecture.{n}": made_up(b, sigma=orders.ARCHITECTURE_SIGMA) for n, b in networks.items()}
    found |= {f"regime.{c}": made_up({"W_1": V, "U": V} if c == "MLP" else HEAD) for c in orders.SETTINGS}
    found["merged.curvature"] = softmax.Curved(softmax.MERGED_SIGMA, np.ones((3, 3, 2)), np.ones((3, 3, 2)))
    losses = np.random.default_rng(0).uniform(1, 2, (2, 3, 2, cfg.steps + 1))
    found |= {f"merged.{how}": softmax.TrainingLosses(np.ones(2), losses) for how in softmax.RATES}
    norms = np.random.default_rng(1).uniform(1, 2, (3, 3, len(softmax.TEMPERATURES), len(softmax.NAMES)))
    return found | {"softmax": softmax.HeadBlockNorms(np.array(softmax.TEMPERATURES), *norms)}


@pytest.mark.usefixtures("unrendered")
def test_every_question_has_claims_a_caption_and_a_panel(tmp_path):
    cfg = Config(seeds=2, sequences=1, steps=2, scales=4)
    state = everything(cfg)
    del state["depth.one layer"]  # what is not there is measured
    result = run(cfg, state=state)
    loaded = Result.load(result.save(tmp_path))
    assert isinstance(loaded, Reviewers)
    assert loaded.claims() == result.claims()
    assert {row.question for row in loaded.answers()} == set(range(1, 8))
    assert len(loaded.claims()) >= 8
    figures, captions = loaded.figures(), loaded.captions()
    assert set(captions) == {*loaded.tables(), *figures}
    for name in figures:
        assert "addition" in captions[name]
        assert any(word in captions[name] for word in ("Network", "head"))
    assert len(loaded.summary()) == 7
    assert find_figure("ormaniec2025", "reviewers").Config is Config

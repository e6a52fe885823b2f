"""The study `gap`: exact numbers are dense matrices', other targets do what theory says, runs go on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import curvescope as cs
import oracles
from curvescope.studies import find, gap
from curvescope.studies.gap.analysis import ALL, ProbeEffort, measure_draws, measure_pair, with_targets
from curvescope.studies.gap.study import chosen_blocks
from curvescope.studies.gap.view import off, whole
from curvescope.studies.problem_config import checkpoint_names, load_checkpoints
from scenes import checked

WRITTEN = gap.Config(max_exact=500, num_draws=4, num_density_probes=2, blocks=("L*.W_V",))
QUICK = gap.Config(
    blocks=("L*.W_V", "L*.W_2"), max_exact=0, num_probes=2, num_steps=2, num_density_probes=0, num_draws=0
)


def problem(**settings: object) -> cs.Problem:
    small = {"d_model": 2, "norm_kind": "rmsnorm", "n_heads": 1, "d_ff": 3, "n_ctx": 4, "vocab_size": 3}
    module = oracles.transformer(**{**small, **settings})
    tokens = torch.randint(0, 3, (3, 5), generator=torch.Generator().manual_seed(0))
    return cs.Problem(module, (tokens[:, :-1], tokens[:, 1:]))


@pytest.fixture(scope="module")
def case() -> cs.Problem:
    return problem()


@pytest.fixture(scope="module")
def written(case: cs.Problem) -> gap.Gap:
    points = {"one": case.model, "other": problem(seed=5).model}
    return gap.measure(case, points, WRITTEN, ["a note"])


def test_small_blocks_are_written_out(case: cs.Problem, written: gap.Gap):
    for block in (ALL, "L*.W_V"):
        patterns = () if block == ALL else (block,)
        H, G = (kind(case, *patterns).to_dense().numpy() for kind in (cs.Hessian, cs.GGN))
        pair, n = written.pair("one", block), len(H)
        h, g = (np.linalg.eigvalsh((A + A.T) / 2) for A in (H, G))
        assert math.isclose(pair.gap().value, 1 - g[-1] / h[-1], abs_tol=1e-10)
        assert pair.gap().error < 1e-12
        assert math.isclose(pair.share().value, np.linalg.norm(H - G) / np.linalg.norm(H), rel_tol=1e-10)
        assert math.isclose(pair.trace_gap().value, np.trace(H - G) / np.trace(H), rel_tol=1e-8)
        unit = np.linalg.norm(H) / math.sqrt(n)
        assert math.isclose(pair.wasserstein().value, np.abs(h - g).mean() / unit, rel_tol=1e-9)
        assert pair.wasserstein().error == 0
        assert pair.wasserstein().value <= pair.share().value


def test_checkpoints_are_measured_at_their_own_parameters(written: gap.Gap):
    other = problem(seed=5)
    H, G = cs.Hessian(other).to_dense(), cs.GGN(other).to_dense()
    assert math.isclose(written.pair("other").loss, other.loss_value(), rel_tol=1e-12)
    assert written.pair("one").loss != written.pair("other").loss
    assert math.isclose(written.pair("other").share().value, float((H - G).norm() / H.norm()), rel_tol=1e-9)


def test_estimates_hold_the_written_out_truth(case: cs.Problem, written: gap.Gap):
    cfg = gap.Config(
        max_exact=0, num_probes=20, num_steps=8, num_density_probes=8, num_draws=0, blocks=("E",)
    )
    found = gap.measure(case, {"one": case.model}, cfg, []).pair("one")
    truth = written.pair("one")
    assert not found.hessian.exact
    for name in ("share", "trace_gap"):
        number = getattr(found, name)()
        assert abs(number.value - getattr(truth, name)().value) < 4 * number.error, name
    low, high = found.gap_interval()
    assert low - 1e-9 <= truth.gap().value <= high + 1e-9
    distance = found.wasserstein()
    assert found.distance is not None
    rest = found.distance.unresolved / found.scale
    assert abs(distance.value - truth.wasserstein().value) < 4 * distance.error + rest


def test_targets_make_the_loss_small_and_large(case: cs.Problem, written: gap.Gap):
    losses = {kind: pair.loss for kind, pair in written.targets.items()}
    assert losses["predicted"] < min(written.pair("other").loss, losses["random"])
    other, G = with_targets(case, "random", seed=0), cs.GGN(case).to_dense()
    torch.testing.assert_close(cs.GGN(other).to_dense(), G)  # the GGN does not see targets
    assert not torch.allclose(cs.Hessian(other).to_dense(), cs.Hessian(case).to_dense())


def test_no_functional_part_is_left_where_a_regression_is_exact():
    module = oracles.transformer(
        d_model=2, n_heads=1, d_ff=3, n_ctx=4, inputs="continuous", outputs="regression", n_out=2
    )
    x, y = torch.randn(2, 3, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    case = cs.Problem(module, (x, y), loss="mse")
    exact = with_targets(case, "predicted", seed=0)
    assert exact.loss_value() == 0
    assert float(cs.operators.FunctionalHessian(exact).to_dense().abs().max()) < 1e-15
    assert with_targets(case, "random", seed=0).loss_value() > 0


def test_ignored_targets_stay_ignored(case: cs.Problem):
    batch = case.batches[0]
    hidden = batch.targets.clone()
    hidden[0] = -100
    some = cs.Problem(case.model, (batch.inputs, hidden))
    for kind in ("predicted", "drawn", "random"):
        assert with_targets(some, kind, seed=0).num_terms == some.num_terms


def test_the_functional_part_of_drawn_targets_averages_out(case: cs.Problem):
    draws = measure_draws(case, num_draws=16, num_probes=4, seed=0)
    value, error = draws.expectation()
    assert abs(value) < 3 * error < 0.5
    counts, norms = draws.shrinking()
    assert list(counts) == [1, 2, 4, 8, 16]
    np.testing.assert_allclose(norms, counts**-0.5, rtol=0.4)
    same = gap.Draws(np.ones((1, 4, 4)))  # draws that do not differ have an expectation
    assert same.expectation()[0] == 1
    np.testing.assert_allclose(same.shrinking()[1], 1)


def test_a_gap_is_told_by_the_interval_that_holds_it(case: cs.Problem):
    effort = ProbeEffort(
        num_probes=2, num_steps=3, num_density_probes=0, num_density_steps=0, max_exact=0, seed=0
    )
    pair = measure_pair(case, ALL, effort)
    tops = [float(torch.linalg.eigvalsh(kind(case).to_dense())[-1]) for kind in (cs.Hessian, cs.GGN)]
    ((_, told, words), *_) = whole(pair)
    low, high = (float(end) for end in told.removesuffix(" %").split(" to "))
    assert "±" not in told + words
    assert low <= 100 * (1 - tops[1] / tops[0]) <= high


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.251, 0.276, "25.1 to 27.6 % below"),
        (-0.276, -0.251, "25.1 to 27.6 % above"),
        (-0.01, 0.02, "between 1.00 % above and 2.00 % below"),
    ],
)
def test_which_way_the_ggn_is_off_is_told_only_where_it_is_known(low: float, high: float, said: str):
    assert off(low, high) == said


@pytest.mark.usefixtures("unrendered")
def test_tables_words_and_figures_are_complete(written: gap.Gap):
    tables = written.tables()
    promised = {"checkpoint", "block", "loss", "lambda_max_H", "lambda_max_H_error", "lambda_max_H_o"}
    promised |= {"trace_H", "trace_H_o", "wasserstein", "wasserstein_error", "functional_share"}
    assert promised <= set(tables["gap"])
    assert len(tables["gap"]) == 2 * len(written.blocks)
    assert list(tables["training"]["checkpoint"]) == ["one", "other"]
    assert len(tables["targets"]) == 4
    assert set(written.captions()) == {*tables, *written.figures()}
    pairs = [written.pair(name) for name in written.checkpoints]
    for i, part in enumerate(("hessian", "ggn")):
        drawn = checked(written)["over_training"]["variants"]["λ_max"]["data"][i]["y"]
        np.testing.assert_allclose(drawn, [pair.top(part).value for pair in pairs], rtol=1e-5)
    assert ("note", "", "a note") in written.summary()


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_numbers(case: cs.Problem):
    state, calls = {}, []

    def stop(what: str, number: int, total: int) -> None:
        calls.append(what)
        if number == 3:
            raise KeyboardInterrupt

    points = {"now": case.model}
    with pytest.raises(KeyboardInterrupt):
        gap.measure(case, points, QUICK, [], progress=stop, state=state)
    again = gap.measure(case, points, QUICK, [], progress=lambda what, *_: calls.append(what), state=state)
    assert calls[3] == calls[2]  # the piece that was begun
    fresh = gap.measure(case, points, QUICK, [])
    assert again.pair("now", "L*.W_2").share() == fresh.pair("now", "L*.W_2").share()
    assert again.targets == {}


def test_blocks_and_checkpoints_are_those_asked_for(case: cs.Problem):
    both = problem(n_layers=2)
    assert chosen_blocks(gap.Config(), both) == [f"L*.W_{role}" for role in "QKVO12"]
    assert chosen_blocks(gap.Config(blocks=("L*.W_Q",), apart=True), both) == ["L0.W_Q", "L1.W_Q"]
    assert chosen_blocks(gap.Config(blocks=("L*.W_Q",)), both) == ["L*.W_Q"]
    with pytest.raises(cs.UsageError):
        chosen_blocks(gap.Config(blocks=("L9.*",)), case)
    cfg = gap.Config()
    assert checkpoint_names(cfg, ()) == ("initial", "early", "middle", "final")
    model = cs.load("tiny-gpt")
    assert list(load_checkpoints(gap.Config(revision="middle"), (), model)) == ["middle"]
    assert checkpoint_names(gap.Config(model="elsewhere"), ()) == ("now",)
    early = load_checkpoints(cfg, ("early",), model)["early"]
    assert not torch.equal(early.get_parameter("E"), model.get_parameter("E"))
    assert find("gap").Config is gap.Config


@pytest.mark.parametrize("study", ["gap", "weight_norms"])
def test_checkpoints_of_another_model_are_refused_before_the_work(study: str, tmp_path: Path):
    other = cs.save(cs.load(oracles.transformer(n_layers=1)), tmp_path / "other")
    begun: list[str] = []
    cfg = find(study).Config.from_dict({"tokens": 64, "checkpoints": [str(other)]})
    with pytest.raises(cs.UsageError, match=r"expected checkpoints of 'tiny-gpt', got .* E is"):
        find(study).run(cfg, progress=lambda what, *_: begun.append(what))
    assert not begun


@pytest.mark.usefixtures("unrendered")
def test_targets_of_any_number_are_told_apart(written: gap.Gap):
    own = written.pair("one")
    figure = replace(written, targets={f"target {i}": own for i in range(7)}).figures()["other_targets"]
    looks = {(str(c[0].get_color()), c[0].get_marker()) for c in figure.axes[0].containers}
    assert len(looks) == 8

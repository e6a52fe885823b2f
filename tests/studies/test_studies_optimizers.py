"""The study `optimizers`: all are tuned and run alike, verdicts are those of intervals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.runs.study_result import FAILS, HOLDS, OPEN
from curvescope.studies import find, optimizers
from curvescope.studies.common.training import rate_of, rung_of
from curvescope.studies.optimizers.analysis import (
    ARENAS,
    CONTENDERS,
    RateSearch,
    TrainingRun,
    band,
    begin,
    gap,
    go_on,
    lowest,
    neighbors,
    run_course,
    work_of,
)
from curvescope.studies.optimizers.study import FULL, merge
from curvescope.studies.optimizers.view import COLORS
from curvescope.studies.run_study import Limit, fitted

CFG = optimizers.Config(
    optimizers=("sgd", "adamw", "newton_cg", "kfac_descent"),
    arenas=("addition",),
    rates=(0.001, 0.1),
    max_trials=3,
    seeds=2,
    budget=0.04,
    looks=3,
    batch_size=4,
)


def course(losses, *, steps=None, seconds=None, rate=0.1) -> TrainingRun:
    K = len(losses)
    x = np.arange(K, dtype=float)
    return TrainingRun(
        "sgd", rate, 1, x if steps is None else np.array(steps, dtype=float), x, 0 * x,
        x if seconds is None else np.array(seconds, dtype=float), x, np.array(losses, dtype=float), False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def done():
    state: dict[str, Result] = {}
    return optimizers.run(CFG, state=state), state


def test_all_are_tuned_alike_and_run_on_the_same_seeds(done):
    result, state = done
    assert set(result.trials) == set(result.searches) == {f"addition/{name}" for name in CFG.optimizers}
    assert all(len(losses) == 2 for losses in result.trials.values())
    for name in CFG.optimizers:
        courses, search = result.of("addition", name), result.searches[f"addition/{name}"]
        assert [c.seed for c in courses] == [1, 2]
        assert search.rates[0] == CFG.rates[int(np.argmin(result.trials[f"addition/{name}"]))]  # half of two
        assert courses[0].rate == lowest(search.rates, search.losses)
        assert [c.loss[0] for c in courses] == [c.loss[0] for c in result.of("addition", "sgd")]
    assert len(state) == 4 * (2 + 3 + 2)


def test_work_reaches_the_budget_and_little_more(done):
    for name in CFG.optimizers:
        for one in done[0].of("addition", name):
            assert 6 <= one.end("work") < 6 + work_of({"losses": 3, "gradients": 2, "products": 10})
            assert (np.diff(one.seconds) > 0).all()
    newton, sgd = (done[0].of("addition", name)[0] for name in ("newton_cg", "sgd"))
    assert newton.products[-1] > 0 == sgd.products[-1]
    assert sgd.end("steps") == 6


def test_what_is_kept_is_not_done_again(done):
    result, state = done
    kept = dict(list(state.items())[:-3])
    again = optimizers.run(CFG, state=kept)
    for name in CFG.optimizers:
        for a, b in zip(result.of("addition", name), again.of("addition", name), strict=True):
            np.testing.assert_array_equal(a.loss, b.loss)


def test_it_can_be_shown(done):
    result, _ = done
    assert len(result.summary()) == 4
    tables = result.tables()
    assert set(tables) == set(result.captions())
    assert len(tables["ends"]) == 4
    assert len(tables["trials"]) == 4 * (2 + 3)
    assert tables["trials"].groupby("optimizer").chosen.sum().eq(1).all()
    assert len(result.claims()) == 3 * 3
    assert set(result.figures()) <= set(result.captions())
    assert set(COLORS) == set(CONTENDERS)


def test_a_run_is_saved_and_loaded(done, tmp_path):
    done[0].save(tmp_path)
    again = optimizers.OptimizerComparison.load(tmp_path)
    assert again.claims() == done[0].claims()


@pytest.mark.parametrize(
    ("shift", "verdict"), [((-0.5, -0.6, -0.55), HOLDS), ((0.5, 0.6, 0.55), FAILS), ((-0.5, 0.4, 0.1), OPEN)]
)
def test_verdicts_are_those_of_the_interval(shift, verdict):
    base = [course([3.0, 2.0, 1.0 + 0.1 * i]) for i in range(3)]
    other = [course([3.0, 2.0 + d, 1.0 + 0.1 * i + d]) for i, d in enumerate(shift)]
    found = gap(other, base, "work")
    assert found.verdict == verdict
    assert found.mean == pytest.approx(np.mean(shift))
    assert (found.high - found.mean) == pytest.approx(4.3027 * np.std(shift, ddof=1) / math.sqrt(3), rel=1e-4)


def test_axes_are_compared_as_far_as_both_go():
    fast, slow = course([3.0, 2.0, 1.0], seconds=[0, 1, 2]), course([3.0, 1.0, 0.0], seconds=[0, 4, 8])
    assert gap([slow, slow], [fast, fast], "seconds").at == 2
    assert gap([slow, slow], [fast, fast], "seconds").mean == pytest.approx(2.0 - 1.0)
    assert gap([slow, slow], [fast, fast], "steps").mean == pytest.approx(-1.0)
    x, mean, *_ = band([fast, slow], "seconds", num=3)
    np.testing.assert_allclose((x, mean), ([0, 1, 2], [3.0, 2.25, 1.5]))


def test_divergence_is_no_victory():
    lost = course([3.0, 2.0, math.inf])
    found = gap([lost, course([3.0, 0.5, 0.1])], [course([3.0, 2.0, 1.0])] * 2, "work")
    assert (found.verdict, found.words) == (OPEN, "diverged")


def test_divergence_on_every_seed_decides():
    lost, fine = course([3.0, 2.0, math.inf]), course([3.0, 2.0, 1.0])
    assert gap([lost] * 3, [fine] * 3, "work").verdict == FAILS
    assert gap([fine] * 3, [lost] * 3, "work").verdict == HOLDS
    assert gap([lost] * 3, [lost] * 3, "work").verdict == OPEN


@pytest.mark.parametrize(("top", "inside"), [(0.01, True), (3e-5, True), (1e3, False)])
def test_rates_are_tried_beyond_the_first_until_the_best_is_no_end(top, inside):
    """A loss with its least value at a rate that may lie beyond those tried first, and too far beyond."""
    tried = []

    def trial(rate: float) -> float:
        tried.append(rate)
        return abs(math.log(rate / top))

    search = begin((0.001, 0.1), [abs(math.log(rate / top)) for rate in (0.001, 0.1)], trial)
    for _ in range(6):
        search = go_on(search, trial)
    assert (search.best == top) == search.inside == inside
    assert len(set(tried)) == len(tried) <= 7


def test_of_two_valleys_the_one_that_is_deeper_in_the_end_is_found():
    """At a part of the budget 0.01 was ahead of 0.001; at all of it the valley around 0.001 is deeper."""
    deep = {3e-4: 5.2, 1e-3: 4.9, 3e-3: 5.15, 1e-2: 5.09, 3e-2: 5.06, 1e-1: 5.11}
    search = begin((0.001, 0.01, 0.1, 1.0), [5.6, 5.3, 6.8, math.inf], deep.__getitem__)
    assert search.rates.tolist() == [0.01, 0.001]
    for _ in range(4):
        search = go_on(search, deep.__getitem__)
    assert (search.best, search.inside) == (0.001, True)


def test_rates_that_diverge_lead_to_smaller_ones():
    search = begin((0.1, 1.0), [math.inf, math.inf], lambda rate: math.inf if rate > 0.02 else rate)
    assert search.best == 0.1
    for _ in range(9):
        search = go_on(search, lambda rate: math.inf if rate > 0.02 else 1 + rate)
    assert search.best < 0.02
    assert not RateSearch(np.array([0.1, 0.3, 0.03]), np.full(3, math.inf)).inside


def test_the_ladder_has_ones_and_threes():
    nearest = {0.001: 0.001, 0.0029: 0.003, 0.02: 0.03, 1.0: 1.0, 20.0: 30.0}
    assert {rate: rate_of(rung_of(rate)) for rate in nearest} == nearest
    assert neighbors(0.003) == (0.01, 0.001)
    assert neighbors(1.0) == (3.0, 0.3)


def test_no_verdict_is_given_where_a_better_rate_may_lie_beyond(done):
    """One that is ahead by far on every seed, and whose search found no end."""
    base = [course([3.0, 2.0, 1.0 + 0.1 * i]) for i in range(2)]
    ahead = [course([3.0, 1.0, 0.5 + 0.11 * i]) for i in range(2)]
    found = {}
    for last in (0.03, 0.3):
        rates, losses = np.array([0.1, 0.3, last]), np.array([1.0, 2.0, 2.0])
        result = replace(
            done[0],
            optimizers=["sgd", "adamw"],
            courses={"addition/sgd": ahead, "addition/adamw": base},
            searches={
                "addition/adamw": RateSearch(np.array([0.1, 0.3, 0.03]), losses),
                "addition/sgd": RateSearch(rates, losses),
            },
        )
        found[last] = result.claims()[0].verdict
        assert ("edge" in result.claims()[0].measured) == (last == 0.3)
        gaps = result.tables()["gaps"]
        assert gaps[gaps.against == "adamw"].lower.iloc[0] == found[last]
    assert found == {0.03: HOLDS, 0.3: OPEN}


def test_parts_of_a_comparison_are_put_together(done):
    whole = done[0]
    parts = [
        replace(
            whole,
            optimizers=[name],
            **{kind: {f"addition/{name}": getattr(whole, kind)[f"addition/{name}"]} for kind in
               ("trials", "courses", "searches")},
        )
        for name in whole.optimizers
    ]  # fmt: skip
    assert merge(parts).claims() == whole.claims()
    with pytest.raises(UsageError, match="same rates"):
        merge([parts[0], replace(parts[1], seeds=7)])


def test_a_result_of_one_grid_is_still_judged(done):
    """Saved without searches: an end of the grid is an end."""
    one_grid = replace(done[0], searches={})
    assert one_grid.at_edge("addition", "sgd") == (one_grid.rate("addition", "sgd") in CFG.rates)
    assert len(one_grid.claims()) == 9
    assert set(one_grid.tables()["trials"].budget) == {1.0}


def test_a_rate_that_is_too_large_ends_a_run():
    found = run_course(ARENAS["addition"](1, 4, "cpu"), "sgd", 1e12, 1, 6.0, 3)
    assert found.diverged
    assert math.isinf(found.final)
    assert found.end("work") >= 6


@pytest.mark.parametrize("name", list(ARENAS))
def test_seeds_change_weights_and_batches_and_not_the_task(name):
    one, same, other = (ARENAS[name](seed, 2, "cpu") for seed in (1, 1, 2))
    for a, b in ((one, same), (one, other)):
        alike = all(torch.equal(p, q) for p, q in zip(
            a.model.parameters(), b.model.parameters(), strict=True))  # fmt: skip
        assert alike == torch.equal(a.batch(0).inputs, b.batch(0).inputs) == (b is same)
    seen = {tuple(row.tolist()) for i in range(4) for row in one.batch(i).inputs}
    if name == "tiny-gpt":  # of a few thousand sums some are drawn twice
        assert not seen & {tuple(row.tolist()) for batch in one.held_out.batches for row in batch.inputs}


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="did you mean 'adamw'"):
        replace(CFG, optimizers=("adam_w",))
    with pytest.raises(UsageError, match="only once"):
        replace(CFG, arenas=("addition", "addition"))
    with pytest.raises(UsageError, match="above 0"):
        replace(CFG, rates=(0.0,))
    with pytest.raises(UsageError, match="seeds"):
        replace(CFG, seeds=1)


def test_the_full_profile_is_more_and_what_is_given_is_kept():
    study = find("optimizers")
    cfg = fitted(study, {"seeds": 3, "arenas": None}, Limit(profile="full")).cfg
    assert cfg == optimizers.Config(**{**FULL, "seeds": 3})
    assert all(value > getattr(optimizers.Config(), name) for name, value in FULL.items())
    with pytest.raises(UsageError, match="--budget"):
        fitted(study, {}, Limit(budget="1min"))


def test_bands_are_of_positive_losses_and_few_seeds_are_single_runs(done):
    x, mean, low, high = band([course([3.0, 2.1, 0.01]), course([3.2, 1.9, 1.0])], "steps", num=3)
    assert (low > 0).all()
    np.testing.assert_allclose((x, mean), ([0, 1, 2], [3.1, 2.0, 0.505]))
    np.testing.assert_allclose(low * high, mean**2)
    result = done[0]
    assert result.seeds < 4
    ax = result.figures()["courses"].axes[0]
    assert len(ax.lines) == result.seeds * len(result.optimizers)
    assert not ax.collections
    assert len(ax.get_legend_handles_labels()[1]) == len(result.optimizers)

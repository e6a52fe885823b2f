"""The study `weight_norms`: ranks against scipy, planted correlations are found, models as promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import curvescope as cs
from curvescope.algorithms.estimates.ranks import difference, mean_within, rank_correlation, spearman
from curvescope.studies import find, weight_norms
from curvescope.studies.weight_norms import study
from curvescope.studies.weight_norms.study import TrainedBlocks, WeightNorms, correlate

BLOCKS = [f"L{i}.{role}" for i in range(4) for role in study.ROLES]


def planted(power: float, *, over_time: float = 1.0, count: int = 60) -> WeightNorms:
    """λ_max of random models that goes with ‖W_Q‖₂ and ‖W_K‖₂ by a power, and of blocks with their norm."""
    source = np.random.default_rng(0)
    random = {}
    for norm in ("pre", "none"):
        spectral = np.exp(source.normal(size=(count, 6)))
        top = (spectral[:, 0] * spectral[:, 1]) ** power * np.exp(0.1 * source.normal(size=count))
        frobenius = spectral * np.exp(source.normal(size=spectral.shape))
        zero = np.zeros(count)
        random[norm] = weight_norms.RandomModels(norm, top, zero, zero, spectral, frobenius)
    trained = {}
    for step, name in enumerate(("a", "b", "c", "d")):
        size = np.exp(np.linspace(0, 3, 24)) * 1.1**step
        zero = np.zeros(24)
        trained[name] = TrainedBlocks(1.0, size[::-1] * 1.3 ** (over_time * step), zero, size, size)
    found = correlate(BLOCKS, trained, random, draws=200, seed=0)
    return WeightNorms("m", "d", BLOCKS, trained, random, found, notes=["a note"])


def verdicts(result: WeightNorms) -> list[str]:
    return [claim.verdict for claim in result.claims()]


def test_ranks_are_those_of_scipy():
    source = np.random.default_rng(1)
    x, y = source.normal(size=30), np.round(source.normal(size=30), 1)  # some are equal
    assert math.isclose(spearman(x, y), spearmanr(x, y).statistic, rel_tol=1e-12)
    found = rank_correlation(x, np.exp(x), draws=100)
    assert (round(found.value, 12), found.count, found.groups) == (1.0, 30, 30)
    assert math.isnan(spearman(x[:2], y[:2]))
    assert math.isnan(spearman(np.ones(5), y[:5]))


def test_intervals_hold_zero_for_what_is_independent_and_groups_make_them_wider():
    source = np.random.default_rng(2)
    held = 0
    for seed in range(40):
        x, y = source.normal(size=(2, 20))
        found = rank_correlation(x, y, draws=100, seed=seed)
        held += found.low <= 0 <= found.high
    assert held >= 34
    group = np.repeat(np.arange(6), 5)  # rows of a group are one row
    x, y = source.normal(size=(2, 6)).repeat(5, axis=1)
    alone, together = rank_correlation(x, y, draws=200), rank_correlation(x, y, groups=group, draws=200)
    assert together.high - together.low > 1.3 * (alone.high - alone.low)


def test_differences_between_groups_do_not_count_within_them():
    group = np.tile(np.arange(5), 4)
    step = np.repeat(np.arange(4), 5)
    x, y = step + 10.0 * group, step - 10.0 * group
    assert mean_within(x, y, groups=group).value == pytest.approx(1)
    assert rank_correlation(x, y, groups=group, draws=50).value < 0
    assert difference(x, -x, x, draws=50).value == pytest.approx(2)


def test_verdicts_follow_the_numbers():
    one, other = verdicts(planted(1.0)), verdicts(planted(-1.0, over_time=-1.0))
    assert len(one) == 2 * 4 + 2
    assert (one[0], other[0]) == ("holds", "fails")  # queries and keys
    assert one[1] != "holds"  # values have nothing to do with it
    assert one[3] == "holds"  # the spectral norm was planted
    assert (one[-2], other[-2]) == ("holds", "fails")  # over training
    assert one[-1] == "fails"  # between blocks it goes the other way


def test_random_models_have_independent_norms_of_their_own():
    found = study.measure_random("pre", count=4, num_steps=10, seed=0)
    ratio = found.frobenius / found.spectral
    assert ((ratio >= 1 - 1e-9) & (ratio <= math.sqrt(8) + 1e-9)).all()
    assert ratio.std() > 0.2  # they are not each other in another unit
    problem = study.random_problem("pre", seed=0, index=3)
    W = dict(problem.model.module.named_parameters())["L0.W_K"].detach()
    assert math.isclose(found.spectral[3, 1], float(torch.linalg.svdvals(W)[0]), rel_tol=1e-10)
    values = torch.linalg.eigvalsh(cs.Hessian(problem).to_dense())
    assert abs(found.lambda_max[3] - float(values[-1])) <= found.error[3] + 1e-8 * float(values[-1])


def test_blocks_at_a_checkpoint_are_measured_there():
    asked = {"revision": "early", "blocks": ("L0.W_Q", "L0.b_Q"), "tokens": 8, "seq_len": 8}
    cfg = weight_norms.Config(**asked, num_models=0, num_steps=6, draws=50)
    result = weight_norms.run(cfg)
    assert result.blocks == ["L0.W_Q"]  # a bias is no matrix
    W = cs.load("tiny-gpt", revision="early").get_parameter("L0.W_Q").detach()
    assert math.isclose(
        result.trained["early"].spectral[0], float(torch.linalg.matrix_norm(W, 2)), rel_tol=1e-5
    )
    assert result.random == {}


@pytest.mark.usefixtures("unrendered")
def test_words_tables_and_figures_are_complete():
    result = planted(1.0)
    tables = result.tables()
    assert set(result.captions()) == {*tables, *result.figures()}
    assert len(tables["training"]) == 4 * 24
    assert len(tables["random"]) == 2 * 60
    assert {"over", "role", "norm", "spearman", "spearman_low", "spearman_high"} <= set(tables["norms"])
    assert ("note", "", "a note") in result.summary()
    assert find("weight_norms").Config is weight_norms.Config

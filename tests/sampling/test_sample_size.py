"""How much data a number needs: the formula, and a simulation on a task of which there are unlimited data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.data.tasks.random_sequences import markov
from curvescope.sampling import check_sample_sizes, sample_sizes, size_from
from curvescope.sampling.statistics import Sampled
from curvescope.studies.preflight.sizes import precision_of
from curvescope.train import TrainConfig, train

QUANTITIES = ("trace", "norm", "largest")


def pilot(sampling, trend=None, numerical=0.0):
    """A pilot of 16 sequences of 10 terms, with the value 100."""
    trend = np.array([math.nan, math.nan, 100.0]) if trend is None else np.array(trend)
    return Sampled("trace", 100.0, numerical, sampling, 90.0, 111.0, 16, 1, 160.0, trend, np.zeros(16))


def test_the_size_falls_with_the_square_of_the_error():
    tight, loose = (size_from(pilot(20.0), precision=p, num_sequences=16) for p in (0.05, 0.1))
    half = {p: math.sqrt(1 + 2 * math.log1p(p)) - 1 for p in (0.05, 0.1)}  # h + h²/2 = log(1 + p)
    wanted = (half[0.1] / half[0.05]) ** 2
    assert tight.num_terms / loose.num_terms == pytest.approx(wanted, rel=0.01)
    assert loose.low < loose.num_terms < loose.high
    expected, low, high = loose.error_at(loose.num_terms)
    assert expected == pytest.approx(0.1, rel=0.01)
    assert low < expected < high


def test_a_number_that_still_falls_needs_more_data():
    steady, falling = (
        size_from(pilot(5.0, trend), precision=0.1, num_sequences=16)
        for trend in ([100.0, 100.0, 100.0], [240.0, 150.0, 100.0])
    )
    assert falling.num_terms > 2 * steady.num_terms
    assert falling.high > 4 * falling.low


def test_probes_are_asked_for_where_their_error_is_in_the_way():
    few = size_from(pilot(5.0, numerical=1.0), num_sequences=16, num_probes=8)
    many = size_from(pilot(5.0, numerical=10.0), num_sequences=16, num_probes=8)
    assert few.num_probes == 8
    assert many.num_probes > 50
    assert np.isfinite(many.num_terms)


def test_quarters_of_the_data_are_the_least():
    found = size_from(pilot(1e-9), precision=0.5, num_sequences=16)
    assert found.num_sequences == 4


def test_a_pilot_of_one_sequence_predicts_nothing():
    with pytest.raises(UsageError, match="at least two sequences, got 1"):
        size_from(pilot(math.nan), num_sequences=1)


@pytest.mark.parametrize(("text", "value"), [("10%", 0.1), ("5 %", 0.05), ("0.2", 0.2)])
def test_precisions(text, value):
    assert precision_of(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "10", "0%", "-5%", "soon"])
def test_what_is_no_precision(text):
    with pytest.raises(UsageError, match="expected a precision such as"):
        precision_of(text)


@pytest.fixture(scope="module")
def model():
    shape = cs.TransformerConfig(n_layers=1, d_model=4, n_heads=1, d_ff=0, n_ctx=8, vocab_size=5)
    torch.manual_seed(0)
    data = markov(num_sequences=256, length=8, vocab=5, seed=0, sample_seed=999)
    return train(cs.load(cs.Transformer(shape).double()), data, TrainConfig(steps=60, lr=1e-2))[0]


def ggn(model, count, seed):
    """The GGN on so many sequences of a Markov chain."""
    return cs.GGN(cs.Problem(model, markov(num_sequences=count, length=8, vocab=5, seed=0, sample_seed=seed)))


@pytest.mark.slow
def test_the_predicted_size_reaches_the_precision_on_other_data(model):
    held = dict.fromkeys(QUANTITIES, 0)
    for seed in range(10):
        sizes = sample_sizes(ggn(model, 48, seed), QUANTITIES, precision=0.2, seed=seed)
        for quantity, size in sizes.items():
            others = ggn(model, int(size.num_sequences), 1000 + seed)
            check = check_sample_sizes({quantity: size}, others, seed=seed + 100)[quantity]
            assert check.predicted == pytest.approx(0.2, rel=0.05) or size.num_sequences == 4
            held[quantity] += check.held
    assert min(held.values()) >= 8


def test_one_number_of_a_problem_and_several_agree(model):
    problem = ggn(model, 16, 3).problem
    alone = cs.sample_size(problem, "trace", precision=0.1, num_probes=4)
    together = sample_sizes(problem, ("trace", "largest"), precision=0.1, num_probes=4)
    assert together["trace"].num_terms == pytest.approx(alone.num_terms)
    assert together["largest"].pilot.quantity == "λ_max"
    assert "to 10 %" in alone.words

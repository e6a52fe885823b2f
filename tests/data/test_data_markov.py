"""The Markov task: its statistics and its entropy rate."""

import math

import pytest
import torch

from curvescope.core.errors import UsageError
from curvescope.data.tasks import task_data
from curvescope.data.tasks.random_sequences import (
    markov_entropy_rate,
    markov_transitions,
    stationary_distribution,
)


def test_entropy_rate_of_chains_whose_rate_is_known():
    uniform = torch.full((5, 5), 0.2, dtype=torch.float64)
    assert markov_entropy_rate(uniform) == pytest.approx(math.log(5), rel=1e-14)
    cycle = torch.eye(4, dtype=torch.float64).roll(1, 0)
    assert markov_entropy_rate(cycle) == pytest.approx(0, abs=1e-15)
    a, b = 0.3, 0.1  # leave state 0 with a, state 1 with b: π = (b, a) / (a + b)
    two = torch.tensor([[1 - a, a], [b, 1 - b]], dtype=torch.float64)
    h = [-p * math.log(p) - (1 - p) * math.log(1 - p) for p in (a, b)]
    assert markov_entropy_rate(two) == pytest.approx((b * h[0] + a * h[1]) / (a + b), rel=1e-13)


@pytest.mark.parametrize("concentration", [0.05, 0.5, 10.0])
def test_stationary_distribution_stays(concentration):
    P = markov_transitions(6, concentration=concentration, seed=2)
    torch.testing.assert_close(P.sum(1), torch.ones(6, dtype=torch.float64))
    pi = stationary_distribution(P)
    torch.testing.assert_close(pi @ P, pi)
    assert float(pi.sum()) == pytest.approx(1, abs=1e-12)
    assert float(pi.min()) >= 0


def test_a_chain_in_two_pieces_is_refused():
    with pytest.raises(UsageError, match="reducible"):
        stationary_distribution(torch.eye(3, dtype=torch.float64))


def test_losses_approach_the_entropy_rate():
    options = {"vocab": 5, "concentration": 0.4, "seed": 3, "num_sequences": 500, "length": 40}
    P = markov_transitions(5, concentration=0.4, seed=3)
    rate = markov_entropy_rate(P)
    (train,) = task_data("markov", **options)
    (held,) = task_data("markov", **options, sample_seed=11)
    assert torch.equal(train.inputs[:, 1:], train.targets[:, :-1])
    losses = -P[held.inputs, held.targets].log()
    stderr = losses.mean(1).std() / math.sqrt(500)  # sequences are independent, their steps are not
    assert abs(losses.mean() - rate) < 4 * stderr
    counts = torch.ones(5, 5, dtype=torch.float64).index_put_(
        (train.inputs.flatten(), train.targets.flatten()),
        torch.tensor(1.0, dtype=torch.float64),
        accumulate=True,
    )
    bigram = -(counts / counts.sum(1, keepdim=True))[held.inputs, held.targets].log().mean()
    assert (
        0 < bigram - losses.mean() < 0.005
    )  # estimated from 20 000 pairs: about V(V − 1) / 2N = 0.0005 more
    assert abs(bigram - rate) < 4 * stderr + 0.005
    unigram = -stationary_distribution(P)[held.targets].log().mean()
    assert unigram > rate + 0.2


def test_first_letters_are_stationary():
    (batch,) = task_data("markov", num_sequences=20000, length=1, vocab=4, seed=1)
    pi = stationary_distribution(markov_transitions(4, seed=1))
    for letters in (batch.inputs[:, 0], batch.targets[:, 0]):
        found = letters.bincount(minlength=4) / 20000
        assert bool(((found - pi).abs() < 4 * (pi * (1 - pi) / 20000).sqrt() + 1e-12).all())

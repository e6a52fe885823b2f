"""Changes of weights: predictions against dense matrices, losses against the problem itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import UsageError
from curvescope.data.batches import Batches
from curvescope.studies.common.statistics import mean_interval
from curvescope.studies.common.weight_changes import (
    Effects,
    Halves,
    effects,
    head_block,
    make_halves,
    moved_parameters,
    weights,
)
from curvescope.studies.prune import Config

SMALL = cs.TransformerConfig(n_layers=1, d_model=6, n_heads=2, d_ff=8, n_ctx=4, vocab_size=7, seed=3)


def halves() -> Halves:
    """A small Transformer on random tokens, of which some do not count."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (7, 5), generator=source)
    targets = ids[:, 1:].clone()
    targets[0, :2] = -100  # sequences of different weights
    model = cs.load(cs.Transformer(SMALL).double())
    parts = [(ids[i:j, :-1], targets[i:j]) for i, j in ((0, 4), (4, 7))]
    return Halves(*(cs.Problem(model, [part]) for part in parts))


def test_effects_are_those_of_the_problem():
    both, block = halves(), "L0.W_O"
    source = torch.Generator().manual_seed(1)
    deltas = [0.1 * torch.randn(36, generator=source, dtype=torch.float64) for _ in range(2)]
    before = weights(both.problem, "*")
    found = effects(both, block, deltas)
    g, H = both.problem.gradient(block), cs.Hessian(both.problem, block).to_dense()
    for k, delta in enumerate(deltas):
        assert found.first[k].mean() == pytest.approx(float(g @ delta), rel=1e-9)
        assert found.second[k].mean() == pytest.approx(float(delta @ H @ delta) / 2, rel=1e-9)
        for problem, values in ((both.problem, found.measured), (both.held_out, found.held_out)):
            moved = problem.at(moved_parameters(problem, block, delta)).loss_value() - problem.loss_value()
            assert values[k].mean() == pytest.approx(moved, rel=1e-9)
    np.testing.assert_allclose(found.predicted, found.first + found.second)
    assert found.some(slice(1, 2)).held_out.shape == (1, 3)
    torch.testing.assert_close(weights(both.problem, "*"), before, rtol=0, atol=0)


def _inputs(batches: Batches) -> torch.Tensor:
    return torch.cat([batch.tensors()[0] for batch in batches])


def test_data_are_cut_by_sequences_and_none_is_in_both_parts():
    found = make_halves(Config(tokens=80, seq_len=8, batch_size=3, held_out=0.3), 0.3)
    kept, others = (_inputs(p.batches) for p in found)
    assert (len(kept), len(others)) == (7, 3)
    whole = cs.text_data("sample", found.problem.model, tokens=80, seq_len=8)
    torch.testing.assert_close(torch.cat([kept, others]), _inputs(whole))
    with pytest.raises(UsageError, match="held_out"):
        make_halves(Config(), 1.0)
    with pytest.raises(UsageError, match="two sequences"):
        make_halves(Config(tokens=8, seq_len=8), 0.5)


def test_a_head_is_chosen_where_there_are_heads():
    both = halves()
    assert head_block(both.problem.model, 1) == "L0.h1.W_O"
    assert head_block(both.problem.model, 2) == "L0.W_O"
    net = cs.load(cs.MLP(cs.MLPConfig(d_in=3, d_hidden=4, d_out=2)))
    assert len(net.blocks[head_block(net, 0)].shape) == 2


def test_effects_keep_the_shares_of_their_sequences(tmp_path):
    both = halves()
    found = effects(both, "L0.b_O", [torch.full((6,), 0.1, dtype=torch.float64)] * 2)
    assert found.shares is not None
    assert found.held_shares is not None
    np.testing.assert_allclose(found.shares, [4 * n / 14 for n in (2, 4, 4, 4)])
    np.testing.assert_allclose(found.held_shares, [1, 1, 1])
    one = found.some(slice(1, 2))
    assert one.interval("measured", 0) == mean_interval(found.measured[1], found.shares)
    assert one.interval("held_out", 0) == mean_interval(found.held_out[1])
    Effects(found.first, found.second, found.measured, found.held_out).save(tmp_path / "equal")
    assert Effects.load(tmp_path / "equal").interval("measured", 0) == mean_interval(found.measured[0])

"""Errors over samples: against written-out matrices, the ratio estimator, and their own coverage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Matrix
from curvescope.sampling import (
    Split,
    eigenvalue_error,
    extremes,
    log_ratio,
    norm_of,
    rank,
    split_sample,
    trace_of,
)
from curvescope.sampling.errors import Measured
from curvescope.sampling.groups import groups_of
from curvescope.sampling.statistics import Sampled, degrees_of, interval

WIDE = torch.float64


def problem(lengths=(6, 6, 6, 6, 6, 6, 6, 6)):
    """A small network on sequences with so many counted targets each."""
    source = torch.Generator().manual_seed(0)
    shape = cs.TransformerConfig(n_layers=1, d_model=4, n_heads=1, d_ff=4, n_ctx=6, vocab_size=5)
    torch.manual_seed(0)
    model = cs.load(cs.Transformer(shape).double())
    inputs = torch.randint(5, (len(lengths), 6), generator=source)
    targets = torch.randint(5, (len(lengths), 6), generator=source)
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = -100
    return cs.Problem(model, cs.Batches.from_tensors(inputs, targets, batch_size=3))


def pool(count, n, seed, spread=0.5):
    """Matrices of single sequences: a common one and noise."""
    source = torch.Generator().manual_seed(seed)
    common = torch.diag(torch.linspace(1, 4, n, dtype=WIDE))
    noise = torch.randn(count, n, n, generator=source, dtype=WIDE)
    return common + spread * (noise + noise.mT) / 2


def split_of(matrices, weights=None):
    """A sample of matrices, each a group."""
    w = np.ones(len(matrices)) if weights is None else np.asarray(weights, dtype=float)

    def unite(chosen):
        own = torch.as_tensor(w[list(chosen)] / w[list(chosen)].sum())
        return Matrix(torch.einsum("g,gij->ij", own, matrices[list(chosen)]), symmetric=True)

    groups = [Matrix(A, symmetric=True) for A in matrices]
    return Split(unite(range(len(matrices))), groups, w, unite, num_terms=float(w.sum()))


@pytest.mark.parametrize("make", [cs.Hessian, cs.GGN, cs.FunctionalHessian])
def test_groups_add_up_to_the_operator_of_sequences_of_unequal_length(make):
    op = make(problem((6, 1, 3, 6, 2, 6, 5)), "L0.W_Q")
    split = split_sample(op, most=4)
    total = sum(w * C.to_dense() for w, C in zip(split.weights, split.groups, strict=True))
    assert torch.allclose(total, op.to_dense(), atol=1e-12)
    assert split.num_terms == 29
    assert len(split) == 4


def test_groups_do_not_cut_units():
    groups = groups_of(problem(), unit=3)
    assert [len(g) for g in groups] == [3, 5]  # what is left over goes to the last unit
    assert np.array_equal(np.concatenate(groups), np.arange(8))
    assert [len(g) for g in groups_of(problem((6, 0, 6, 0, 6, 6)), unit=1)] == [1, 1, 1, 1]


def test_the_error_of_a_form_is_the_jackknife_of_a_ratio():
    p = problem((6, 1, 3, 6, 2, 6, 5, 4))
    H = cs.Hessian(p)
    v = torch.linspace(-1, 1, H.shape[0], dtype=WIDE)
    found = cs.sampling_error(H, "form", vector=v)
    samples = cs.per_sample(p)
    forms, shares = samples.forms(v[:, None])[:, 0], samples.shares
    value = float(forms @ shares)
    without = (value - shares * forms) / (1 - shares)
    jackknife = math.sqrt(7 / 8 * float(((without - without.mean()) ** 2).sum()))
    assert found.value == pytest.approx(value, rel=1e-10)
    assert found.sampling == pytest.approx(jackknife, rel=1e-10)
    assert found.numerical == 0.0


def test_sequences_that_are_alike_have_no_sampling_error():
    p = problem()
    batch = p.batches[0]
    same = cs.Batches.from_tensors(batch.inputs[:1].expand(6, -1), batch.targets[:1].expand(6, -1))
    H = cs.Hessian(cs.Problem(p.model, same))
    for quantity in ("trace", "norm", "largest", "smallest"):
        found = cs.sampling_error(H, quantity, num_probes=4)
        assert found.sampling == pytest.approx(0.0, abs=1e-6 * abs(found.value))
    assert cs.sampling_error(H, "largest").settled()


@pytest.mark.parametrize("end", ["largest", "smallest"])
def test_an_extreme_eigenvalue_and_its_trend_are_those_of_written_out_parts(end):
    H = cs.Hessian(problem())
    found = cs.sampling_error(H, end)
    at = -1 if end == "largest" else 0
    split = split_sample(H)

    def mean(parts):
        values = [torch.linalg.eigvalsh(split.union(part).to_dense())[at] for part in split.cuts(parts)]
        return float(torch.stack(values).mean())

    expected = np.array([mean(4), mean(2), mean(1)])
    assert np.allclose(found.trend, expected, rtol=2e-2)
    assert found.value == pytest.approx(expected[2], rel=1e-6)
    assert found.sampling > 0


def test_the_error_of_an_eigenvalue_is_that_without_each_group():
    matrices = pool(8, 6, seed=1)
    split = split_of(matrices)
    values, vectors = torch.linalg.eigh(matrices.mean(0))
    found = extremes(split, vectors[:, [-1, 0]], np.zeros(2))
    without = [torch.linalg.eigvalsh((matrices.sum(0) - A) / 7)[-1] for A in matrices]
    d = 7 / 8 * (float(values[-1]) - torch.stack(without).numpy())
    exact = math.sqrt(8 / 7 * float(((d - d.mean()) ** 2).sum()))
    assert found["largest"].sampling == pytest.approx(exact, rel=1e-6)  # six rows: the basis is everything
    assert found["smallest"].value == pytest.approx(float(values[0]), rel=1e-10)


def test_the_norm_of_a_part_of_the_data_is_larger():
    split = split_of(pool(16, 5, seed=2, spread=8.0))
    found = norm_of(split, split.grams(torch.eye(5, dtype=WIDE)) * 5)
    exact = float(torch.linalg.matrix_norm(split.op.to_dense()))
    assert found.value == pytest.approx(exact, rel=1e-10)
    assert found.trend[0] > found.trend[1] > found.trend[2]
    assert found.remaining > 0.1
    assert not found.settled()
    assert "falling" in found.verdict()


def test_one_sequence_says_nothing_about_others():
    H = cs.Hessian(problem((6,)))
    for quantity in ("trace", "largest"):
        found = cs.sampling_error(H, quantity, num_probes=4)
        assert math.isnan(found.sampling)
        assert math.isnan(found.low)
        assert not found.settled()
        assert found.headline.startswith("about")


def test_the_first_order_error_of_an_eigenvalue_is_near_the_one_without_each_group():
    H = cs.GGN(problem((6,) * 16))
    pairs = cs.eigsh(H, 1)
    assert pairs.vectors is not None
    fast = eigenvalue_error(H, 3 * pairs.vectors[:, 0], value=float(pairs.values[0]))
    full = cs.sampling_error(H, "largest")
    assert fast.value == pytest.approx(full.value, rel=1e-6)
    assert fast.sampling == pytest.approx(full.sampling, rel=0.3)
    assert math.isnan(fast.per_doubling)


@pytest.mark.parametrize(("first", "second"), [("trace", "trace"), ("norm", "norm")])
def test_the_ratio_of_proportional_numbers_has_no_sampling_error(first, second):
    split = split_of(pool(8, 5, seed=4))
    V = torch.eye(5, dtype=WIDE) * math.sqrt(5)
    forms, grams = split.forms_and_grams(V)
    one = {"trace": trace_of(split, forms, psd=True), "norm": norm_of(split, grams)}
    two = {"trace": trace_of(split, 2 * forms, psd=True), "norm": norm_of(split, 4 * grams)}
    value, low, high = log_ratio(replace(two[first], numerical=0.0), replace(one[second], numerical=0.0))
    assert value == pytest.approx(math.log(2.0))
    assert low == pytest.approx(value, abs=1e-9)
    assert high == pytest.approx(value, abs=1e-9)


def test_a_first_place_is_certain_only_if_no_other_number_may_be_first():
    split = split_of(pool(12, 5, seed=6, spread=1.0))
    _values, vectors = torch.linalg.eigh(split.op.to_dense())
    top = extremes(split, vectors[:, -1:], np.zeros(1), ("largest",))["largest"]
    noise = np.random.default_rng(0).normal(size=12)
    rival = replace(top, value=0.99 * top.value, influences=top.influences + 0.1 * top.value * noise / 12)
    far = replace(top, value=0.2 * top.value, influences=0.2 * top.influences)
    assert rank({"a": far, "b": top}).names == ["b", "a"]
    assert rank({"a": far, "b": top}).certain
    assert rank({"b": top, "c": rival}).rivals == ["c"]
    assert not rank({"b": top, "c": rival}).certain
    assert rank({}).words == ""


def test_a_ceiling_has_the_interval_of_its_eigenvalue():
    split = split_of(pool(8, 5, seed=1))
    _values, vectors = torch.linalg.eigh(split.op.to_dense())
    top = extremes(split, vectors[:, -1:], np.zeros(1), ("largest",))["largest"]
    rate = top.inverse(2.0, "2/λ_max")
    assert (rate.low, rate.value, rate.high) == pytest.approx((2 / top.high, 2 / top.value, 2 / top.low))
    assert rate.sampling / rate.value == pytest.approx(top.sampling / top.value)


def test_probes_and_sequences_are_told_apart():
    rng = np.random.default_rng(0)
    sequences, both = rng.normal(size=12), rng.normal(size=(400, 12))
    forms = 100 + 3 * sequences + 5 * rng.normal(size=(400, 1)) + 0.1 * both
    found = trace_of(split_of(pool(12, 2, 0)), forms, psd=True)
    assert found.numerical == pytest.approx(5 / math.sqrt(400), rel=0.1)
    assert found.sampling == pytest.approx(3 * sequences.std(ddof=1) / math.sqrt(12), rel=0.05)


@pytest.mark.parametrize("count", [6, 24])
@pytest.mark.parametrize("what", ["trace", "norm", "largest"])
def test_intervals_hold_the_mean_over_samples_95_times_in_100(what, count):
    n, repeats = 6, 300
    matrices = pool(4000, n, seed=5, spread=1.0)
    rng = np.random.default_rng(3)

    def exact(A):
        if what == "trace":
            return float(A.trace())
        return float(torch.linalg.matrix_norm(A)) if what == "norm" else float(torch.linalg.eigvalsh(A)[-1])

    def measured(chosen):
        split = split_of(chosen)
        if what == "largest":
            _values, vectors = torch.linalg.eigh(chosen.mean(0))
            return extremes(split, vectors[:, -1:], np.zeros(1), ("largest",))["largest"]
        V = torch.as_tensor(rng.choice([-1.0, 1.0], size=(n, 8)))
        return trace_of(split, split.forms(V)) if what == "trace" else norm_of(split, split.grams(V))

    draws = [matrices[rng.integers(4000, size=count)] for _ in range(2000)]
    truth = np.mean([exact(chosen.mean(0)) for chosen in draws])
    found = [measured(matrices[rng.integers(4000, size=count)]) for _ in range(repeats)]
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert 0.91 <= held <= 0.99


def test_a_number_is_settled_if_neither_other_nor_more_data_change_it():
    def number(trend, low, high):
        value = trend[-1]
        return Sampled("λ_max", value, 0.0, 1.0, low, high, 8, 1, 512.0, np.array(trend), np.zeros(8))

    settled = number([10.4, 10.2, 10.1], 9.6, 10.6)
    falling = number([40.0, 20.0, 10.0], 9.6, 10.6)
    noisy = number([10.4, 10.2, 10.1], 7.0, 15.0)
    assert settled.settled()
    assert settled.headline == "10.1 ± 1.0"
    assert falling.per_doubling == 0.5
    assert "falling" in falling.verdict()
    assert falling.headline == "about 10"
    assert not noisy.settled()
    assert "falling" not in noisy.verdict()
    assert noisy.settled(0.6)


def test_an_interval_of_what_is_positive_is_positive():
    low, high = interval(1.0, 0.0, 0.8, 0, 5, positive=True)
    assert low > 0
    assert low * high > 1  # samples without rare large values give a number and an error that are too small


def test_the_interval_of_a_smallest_eigenvalue_may_hold_zero():
    rng = np.random.default_rng(3)
    A = torch.diag_embed(torch.as_tensor(rng.normal(0.0, 1.0, size=(8, 5)) + np.array([0.0, 3, 4, 5, 6])))
    A = A - torch.diag(torch.tensor([float(A[:, 0, 0].mean()) + 0.01, 0, 0, 0, 0]))  # λ_min is -0.01
    split = split_of(A)
    _values, vectors = torch.linalg.eigh(split.op.to_dense())
    least = extremes(split, vectors[:, :1], np.zeros(1), ("smallest",))["smallest"]
    assert least.value == pytest.approx(-0.01)
    assert least.low < least.value < 0 < least.high


def test_an_error_that_one_group_dominates_has_fewer_degrees_of_freedom():
    even, one = np.array([1.0, -1, 1, -1, 1, -1, 1, -1]), np.array([8.0, 0, 0, 0, 0, 0, 0, 0])
    assert degrees_of(even) == 7
    assert degrees_of(one) < 4
    assert (
        interval(1.0, 0.0, 0.1, 0, degrees_of(one), positive=False)[1]
        > interval(1.0, 0.0, 0.1, 0, degrees_of(even), positive=False)[1]
    )


def test_one_sequence_with_almost_all_weight_does_not_make_a_number_sure():
    p = problem((6,) * 16)
    inputs, targets = (torch.cat([getattr(b, name) for b in p.batches]) for name in ("inputs", "targets"))
    weights = torch.ones(16, 6, dtype=WIDE)
    weights[3] = 1000.0
    heavy = cs.Problem(p.model, cs.Batches.from_tensors(inputs, targets, weights, batch_size=3))
    found = cs.sampling_error(cs.GGN(heavy, "L0.b_2"), "largest")
    assert found.sampling > 0.1 * found.value
    assert not found.settled()


@pytest.mark.parametrize("spread", [1.0, 2.0])
@pytest.mark.parametrize("count", [4, 8, 16])
def test_intervals_of_sequences_of_very_unequal_weight_hold_the_mean(count, spread):
    rng = np.random.default_rng(count)

    def draw():
        return 3 + rng.normal(size=count), np.exp(spread * rng.normal(size=count))

    truth, held = 3.0, 0  # values and weights are independent
    for _ in range(300):
        values, weights = draw()
        split = split_of(torch.as_tensor(values)[:, None, None], weights)
        found = trace_of(split, values[None], measured=Measured(float(values @ split.weights), 0.0, 0))
        held += found.low <= truth <= found.high
    assert held >= 0.92 * 300


def test_the_interval_of_a_zero_eigenvalue_of_a_positive_semi_definite_operator_holds_zero():
    G = cs.GGN(problem((6, 6, 6)), "U")
    found = cs.sampling_error(G, "smallest")
    assert abs(found.value) < 1e-12  # the softmax does not see one number added to all logits
    assert found.low <= 0.0 <= found.high < 1e-10
    assert not found.settled()


def test_what_has_no_sample_is_refused():
    H = cs.Hessian(problem())
    with pytest.raises(UsageError, match="unit"):
        cs.sampling_error(H, unit=0)
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        cs.sampling_error(H, "form", vector=torch.ones(3, dtype=WIDE))
    with pytest.raises(UsageError, match="MonteCarloFisher"):
        cs.sampling_error(cs.MonteCarloFisher(problem()))

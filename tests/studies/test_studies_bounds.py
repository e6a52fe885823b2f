"""The study `bounds`: its table is what direct calls give, corrected bounds hold, printed ones fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian as autodiff_hessian

import curvescope as cs
from curvescope.closed_form.bounds.block import theorem6_corrected
from curvescope.closed_form.printed.bounds import (
    precursor_as_printed,
    theorem1_as_printed,
    theorem6_as_printed,
)
from curvescope.studies import bounds, find
from curvescope.studies.bounds import analysis
from curvescope.studies.bounds.analysis import BoundRow, slack, tagged

SMALL = bounds.Config(
    num_seeds=2,
    weight_scales=(0.1, 2.0),
    data_scales=(3.0,),
    query_scales=(1.0, 1000.0),
    output_scales=(0.0,),
    depths=(2,),
    num_layers=(1, 2),
    num_tokens=4,
    width=3,
    head_size=2,
    hidden=3,
)


@pytest.fixture(scope="module")
def state() -> dict:
    """The pieces of the run whose result the tests look at."""
    return {}


@pytest.fixture(scope="module")
def result(state: dict) -> bounds.Bounds:
    return bounds.run(SMALL, state=state)


def dense_norm(loss, *weights):
    H, sizes = autodiff_hessian(loss, weights), [W.numel() for W in weights]
    rows = [[H[i][j].reshape(sizes[i], -1) for j in range(len(weights))] for i in range(len(weights))]
    return float(torch.linalg.matrix_norm(torch.cat([torch.cat(row, 1) for row in rows]), ord=2))


def normalized(R):
    R = R - R.mean(1, keepdim=True)
    return R / R.square().mean(1, keepdim=True).sqrt()


def through(X, W_Q, W_K, W_V, W_1, W_2):
    Y = normalized(X + torch.softmax(X @ W_Q @ (X @ W_K).mT / W_Q.shape[1] ** 0.5, 1) @ X @ W_V)
    return normalized(Y + torch.relu(Y @ W_1) @ W_2)


def the_row(found: bounds.Comparisons, scale: float, seed: int) -> tuple[float, float]:
    (index,) = np.flatnonzero((found.scale == scale) & (found.seed == seed))
    return found.true[index], found.value[index]


def test_no_corrected_bound_is_violated(result: bounds.Bounds):
    for found in (result.bounds, result.estimates):
        corrected = found.chosen(bound=[*analysis.CORRECTED, "repaired", "lemma, σ of its proof"])
        assert len(corrected.true) > 50
        assert not corrected.violated.any()
        assert np.isfinite(corrected.value).all()


def test_printed_bounds_are_violated_where_they_should(result: bounds.Bounds):
    def fails(found: bounds.Comparisons, **columns: str) -> np.ndarray:
        chosen = found.chosen(**columns)
        assert len(chosen.true)
        return chosen.violated

    keyless = result.bounds.chosen(instance=analysis.KEYLESS)
    for bound in (analysis.THEOREM_1, analysis.APPENDIX):
        assert not fails(result.bounds, instance=analysis.HEAD, bound=bound).any()
        chosen = keyless.chosen(bound=bound)
        assert np.array_equal(chosen.violated, chosen.scale == 1000)
        assert fails(result.estimates, instance=analysis.KEYLESS, quantity="‖H_KK‖", bound=bound).any()
    sharp = result.estimates.chosen(instance=analysis.CLUSTERS, bound=analysis.THEOREM_1)
    for quantity in ("‖∂A/∂T‖", "‖Z_1‖"):
        one = sharp.chosen(quantity=quantity)
        assert one.ratio.min() < 1 / 7
    assert not fails(result.bounds, bound=analysis.THEOREM_6).any()
    assert fails(
        result.estimates, instance=analysis.CLOSING, quantity="‖ξ_21‖", bound=analysis.THEOREM_6
    ).all()
    assert fails(result.estimates, instance=analysis.ROW, bound="lemma, literal σ").any()
    one, two = (result.bounds.chosen(instance=analysis.network(n), bound=analysis.PRECURSOR) for n in (1, 2))
    assert one.violated[one.scale == 0.1].all()
    active = (two.scale == 0.1) & (two.true > 0)
    assert two.violated[active & (np.array(two.quantity) == "‖H‖")].all()


def test_the_table_is_what_direct_calls_give(result: bounds.Bounds):
    head = analysis.random_head(SMALL.sizes, 1, weight_scale=2.0)

    def head_loss(W_Q, W_K, W_V):
        return ((head._replace(W_Q=W_Q, W_K=W_K, W_V=W_V).output - head.target) ** 2).mean()

    found = result.bounds.chosen(instance=analysis.HEAD, varied=analysis.WEIGHTS, bound=analysis.THEOREM_1)
    expected = dense_norm(head_loss, *head[1:4]), theorem1_as_printed(*head).value
    np.testing.assert_allclose(the_row(found, 2.0, 1), expected, rtol=1e-9)

    block = analysis.random_block(SMALL.sizes, 0, data_scale=3.0)
    true = dense_norm(lambda *W: ((through(block.X, *W) - block.target) ** 2).mean(), *block[1:6])
    found = result.bounds.chosen(instance=analysis.BLOCK, varied=analysis.DATA)
    for bound, value in (
        (analysis.THEOREM_6, theorem6_as_printed(*block).value),
        (analysis.MEASURED, theorem6_corrected(*block[:6], target=block.target).whole),
    ):
        np.testing.assert_allclose(the_row(found.chosen(bound=bound), 3.0, 0), (true, value), rtol=1e-9)

    network = analysis.random_network(SMALL.sizes, 1, num_layers=2, weight_scale=2.0)
    found = result.bounds.chosen(instance=analysis.network(2), quantity="‖H‖", bound=analysis.PRECURSOR)
    assert the_row(found, 2.0, 1)[1] == precursor_as_printed(network.x, network.weights)


def test_a_stack_is_measured_and_each_of_its_blocks_bounded(result: bounds.Bounds):
    first, second = analysis.random_stack(SMALL.sizes, 0, depth=2)

    def loss(*W):
        return ((through(through(first.X, *W[:5]), *W[5:]) - first.target) ** 2).mean()

    weights = [*first[1:6], *second[1:6]]
    stack = result.bounds.chosen(instance=analysis.STACK)
    whole = stack.chosen(bound=analysis.NONE)
    assert np.isnan(whole.value).all()
    assert not whole.violated.any()
    np.testing.assert_allclose(the_row(whole, 2.0, 0)[0], dense_norm(loss, *weights), rtol=1e-9)
    alone = dense_norm(lambda *W: loss(*W, *weights[5:]), *weights[:5])
    found = stack.chosen(quantity="‖H_00‖")
    np.testing.assert_allclose(the_row(found, 2.0, 0)[0], alone, rtol=1e-9)
    assert found.chosen(bound=analysis.MEASURED).ratio.min() > 1


def test_slack_counts_violations_and_leaves_zeros_out():
    rows = {
        0: [BoundRow("q", "b", 2.0, 1.0)],
        1: [BoundRow("q", "b", 1.0, 3.0)],
        2: [BoundRow("q", "b", 0.0, 3.0)],
    }
    table = slack(tagged("i", "v", 1.0, rows | {3: [BoundRow("q", "none", 1.0, np.nan)]}))
    (line,) = table.to_dict("records")
    assert (line["instances"], line["violated"], line["median_ratio"]) == (3, 1, 1.75)
    assert (line["least_ratio"], line["largest_ratio"]) == (0.5, 3.0)


def test_tables_figures_and_words_belong_together(result: bounds.Bounds, tmp_path):
    import matplotlib.pyplot as plt

    drawn, tables = result.figures(), result.tables()
    assert set(result.captions()) >= {*tables, *drawn}
    for figure in drawn.values():
        plt.close(figure)
    assert {"instance", "scale", "seed", "true", "value", "ratio", "violated", "bound"} <= set(
        tables["bounds"]
    )
    lines = {label: value for label, value, _ in result.summary()}
    assert lines["certified"].startswith("violated 0 of")
    assert lines[analysis.THEOREM_1].startswith("violated 2 of")
    again = bounds.Bounds.load(result.save(tmp_path))
    assert again.tables()["slack"].equals(tables["slack"])


def test_a_stopped_run_goes_on_with_the_same_numbers(result: bounds.Bounds, state: dict):
    kept, calls = dict(list(state.items())[:-3]), []

    def stop(what: str, number: int, total: int) -> None:
        calls.append(what)
        if number == total - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bounds.run(SMALL, progress=stop, state=kept)
    again = bounds.run(SMALL, progress=lambda what, *_: calls.append(what), state=kept)
    last = list(state)[-3:]
    assert calls == [last[0], last[1], last[1], last[2]]  # the piece that was begun is begun again
    np.testing.assert_array_equal(again.bounds.true, result.bounds.true)
    np.testing.assert_array_equal(again.bounds.value, result.bounds.value)


def test_the_study_is_found_and_refuses_bad_settings():
    assert find("bounds").Config is bounds.Config
    assert bounds.Config.from_dict({"depths": 2}).depths == (2,)
    for wrong, words_ in (
        ({"num_seeds": 0}, "num_seeds: expected at least 1"),
        ({"weight_scales": (0.0,)}, "weight_scales: expected positive"),
        ({"depths": ()}, "depths: expected at least one"),
        ({"depths": (0,)}, "depths: expected numbers from 1"),
        ({"width": 40}, "at most 2000 parameters"),
        ({"num_tokens": 50}, "at most 4096 rows"),
    ):
        with pytest.raises(cs.UsageError, match=words_):
            bounds.Config.from_dict(wrong)

"""The study `quantize`: exact on a quadratic at its minimum, weights on grids, verdicts from numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.algorithms.surgery.grids import grid
from curvescope.core.errors import UsageError
from curvescope.studies import find, quantize
from curvescope.studies.common.weight_changes import Effects, Halves, weights
from curvescope.studies.quantize.study import Quantized, by_ggn, by_inputs, measured, nearest, relative_error


def layer() -> Halves:
    """A linear layer with squared error, at its minimum: its GGN is E[x xᵀ] ⊗ I, up to a factor."""
    source = torch.Generator().manual_seed(0)
    X = torch.randn(40, 6, generator=source, dtype=torch.float64)
    X[:, 1] += 2 * X[:, 0]
    y = X @ torch.randn(6, 3, generator=source, dtype=torch.float64)
    net = cs.MLP(cs.MLPConfig(d_in=6, d_out=3, depth=1)).double()
    model = cs.load(net)
    (block,) = model.blocks.values()
    with torch.no_grad():
        block.put(torch.linalg.lstsq(X, y).solution, net.get_parameter(block.parameter))
    problem = cs.Problem(model, [(X, y)], loss="mse")
    return Halves(problem, problem)


def test_on_a_quadratic_at_its_minimum_what_is_predicted_comes_out():
    halves = layer()
    problem = halves.problem
    (block,) = problem.model.blocks.values()
    bits, op = (4, 3), cs.GGN(problem, block.name)
    ways = {
        "nearest": [nearest(problem, block, b, "column") for b in bits],
        "inputs": by_inputs(problem, block, bits, "column", 1e-9),
        "ggn": by_ggn(op, block, bits, "column", 1e-9),
    }
    for one, other in zip(ways["inputs"], ways["ggn"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)  # one matrix, up to a factor
    found = measured(halves, block.name, ways, bits)
    np.testing.assert_allclose(found.effects.predicted, found.effects.measured, rtol=1e-7, atol=1e-12)
    assert (found.at("inputs").measured.mean(1) < found.at("nearest").measured.mean(1)).all()
    W = weights(problem, block.name).view(block.shape)
    for i, b in enumerate(bits):
        for deltas in ways.values():
            moved = W + deltas[i].view(block.shape)
            torch.testing.assert_close(grid(W, b).rounded(moved), moved)


def planted(sign: float) -> Quantized:
    """Twelve blocks whose prediction is right, or the wrong way round, and whose error says nothing."""
    source = np.random.default_rng(0)

    def roundings(value: float, error: float, methods: list[str]) -> quantize.Roundings:
        come = np.array([[v * 0.999, v, v * 1.001] for v in np.repeat([1.0, 0.8, 0.7][: len(methods)], 2)])
        come = come * (value if sign > 0 else 1 / value)
        effects = Effects(0 * come, come * value / (value if sign > 0 else 1 / value), come, sign * come)
        size = np.full((len(methods), 2), error)
        return quantize.Roundings(np.array([4, 3]), methods, 10, size, 1.0, effects)

    values = np.exp(source.normal(size=12))
    two, three = ["nearest", "inputs"], ["nearest", "inputs", "ggn"]
    blocks = {f"B{i}": roundings(v, float(source.uniform()), two) for i, v in enumerate(values)}
    common = {"model": "m", "data": "d", "loss": 1.0, "held_out_loss": 1.0, "steps": "column", "damping": 0.1}
    together, exact = roundings(2.0, 1.0, two), {"B0": roundings(1.0, 1.0, three)}
    parts = {"blocks": blocks, "together": together, "exact": exact}
    return Quantized(**common, **parts, draws=100, seed=0, notes=["a note"])


def test_verdicts_follow_the_numbers():
    right, wrong = ([claim.verdict for claim in planted(s).claims()] for s in (1.0, -1.0))
    assert right == ["holds"] * 10
    assert wrong[0] == "fails"  # the ranks
    assert wrong[3] == "fails"  # the size
    assert wrong[4:] == ["fails"] * 6  # on other data


def test_blocks_that_rounding_does_not_change_are_left_out_and_counted():
    result = planted(1.0)
    come = np.zeros((4, 3))
    still = quantize.Roundings(
        np.array([4, 3]), ["nearest", "inputs"], 10, np.zeros((2, 2)), 1.0, Effects(come, come, come, come)
    )
    more = replace(result, blocks=result.blocks | {"still": still})
    found = relative_error(more, 0)
    assert found == relative_error(result, 0)
    assert found.count == 12
    (said,) = [claim for claim in more.claims() if claim.published.startswith("at most")]
    assert said.verdict == "holds"
    assert "(1 of 13 " in said.measured
    few = replace(result, blocks=dict(list(result.blocks.items())[:5]))
    assert np.isnan(relative_error(few, 0).low)  # an interval of the median has six values
    assert np.isnan(relative_error(replace(result, blocks={"still": still}), 0).value)


@pytest.mark.usefixtures("unrendered")
def test_words_tables_and_figures_are_complete():
    result = planted(1.0)
    tables = result.tables()
    assert set(result.captions()) == {*tables, *result.figures()}
    assert len(tables["sensitivity"]) == 13 * 2 * 2
    assert {"predicted", "predicted_low", "measured", "held_out_high"} <= set(tables["sensitivity"])
    assert ("note", "", "a note") in result.summary()
    assert find("quantize").Config is quantize.Config


@pytest.mark.usefixtures("undrawn")
def test_a_run_goes_on_where_it_stopped(tmp_path):
    asked = {"tokens": 24, "seq_len": 8, "held_out": 0.5, "blocks": ("L3.W_O", "L3.b_O"), "bits": (4,)}
    cfg = quantize.Config(**asked, max_dense=0, draws=50)
    state: dict = {}
    first = quantize.run(cfg, state=state)
    assert list(first.blocks) == ["L3.W_O"]  # a bias is no matrix
    del state["all"]
    begun = []
    again = quantize.run(cfg, state=state, progress=lambda words, number, total: begun.append(words))
    assert begun == ["rounding of all blocks"]
    np.testing.assert_allclose(again.together.effects.measured, first.blocks["L3.W_O"].effects.measured)
    assert first.blocks["L3.W_O"].trace > 0
    first.save(tmp_path)
    assert quantize.Quantized.load(tmp_path).loss == first.loss


def test_settings_are_checked_before_the_work():
    for wrong in ({"bits": (1,)}, {"steps": "row"}, {"damping": 0.0}, {"bits": ()}):
        with pytest.raises(UsageError):
            replace(quantize.Config(), **wrong)
    for wrong in ({"exact_blocks": ("L3.W_2",)}, {"blocks": ("L3.b_O",)}):
        cfg = replace(quantize.Config(tokens=16, seq_len=8), **wrong)
        with pytest.raises(UsageError, match="expected"):
            quantize.run(cfg)


@pytest.mark.usefixtures("unrendered")
def test_bars_have_the_intervals_of_the_table():
    result = planted(1.0)
    ax = result.figures()["sensitivity"].axes[0]
    (bars,) = [one for one in ax.collections if len(one.get_segments()) == 12][:1]
    table = result.tables()["sensitivity"]
    rows = table[(table["bits"] == 4) & (table["method"] == "nearest") & (table["block"] != "all")]
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    np.testing.assert_allclose(ends, rows[["measured_low", "measured_high"]].to_numpy())

"""The study `scaling`: planted laws are found and false ones refused, cells are dense truths, runs go on."""

from __future__ import annotations

import math

import numpy as np
import pytest

import curvescope as cs
from curvescope.studies import find, scaling
from curvescope.studies.common.statistics import variance_interval
from curvescope.studies.scaling.analysis import (
    CellPosition,
    differences,
    fit_law,
    measure_cell,
    plan_data,
)

TINY = {"widths": (2, 4), "sequences": (2, 4), "seeds": 1, "steps": 3, "held_out": 8, "fresh": 64}
TINY |= {"num_probes": 2, "num_steps": 2, "draws": 50, "measured": 4, "tolerance": 0.2}


def planted(form: str, *, noise: float, seed: int) -> scaling.PowerLaw:
    """A grid of 4 × 4 cells and 3 seeds with q = f(x, z) · noise."""
    source = np.random.default_rng(seed)
    x, z = (v.ravel() for v in np.meshgrid(2.0 ** np.arange(4, 12, 2), 2.0 ** np.arange(3, 7), indexing="ij"))
    x, z = np.repeat(x, 3), np.repeat(z, 3)
    forms = {
        "law": 3 * x**-0.5 * z**0.2,
        "constant": 2 * z**0.2,
        "bent": x**-0.5 + 0.1,
        "depends": x ** (-0.2 * np.log(z)),
    }
    q = forms[form] * np.exp(noise * source.standard_normal(len(x)))
    return fit_law("q", "D", x, z, q, draws=200, seed=seed)


def test_a_planted_law_is_found_with_its_exponent():
    found = [planted("law", noise=0.1, seed=seed) for seed in range(40)]
    held = sum(law.low <= -0.5 <= law.high for law in found)
    assert held >= 33  # of 40 intervals that hold 95 times in 100
    assert sum(law.supported for law in found) >= 32  # two tests with an error of 5 % each
    assert math.isclose(np.mean([law.exponent for law in found]), -0.5, abs_tol=0.01)


@pytest.mark.parametrize(
    ("form", "why"), [("constant", "constant"), ("bent", "bent"), ("depends", "other variable")]
)
def test_what_is_no_law_is_not_supported(form: str, why: str):
    found = [planted(form, noise=0.02, seed=seed) for seed in range(20)]
    assert sum(law.supported for law in found) <= 3
    assert sum(why in law.words for law in found) >= 17


def test_scatter_and_two_sizes_and_signs_are_no_law():
    assert "scatter of a factor" in planted("law", noise=0.5, seed=0).words
    x = np.repeat([1.0, 4.0], 6)
    z, q = np.tile(np.repeat([1.0, 2.0], 3), 2), x**-0.5 * (1 + 1e-3 * np.arange(12) % 3)
    two = fit_law("q", "D", x, z, q, draws=50)
    assert not two.supported
    assert "only 2 values of D" in two.words
    negative = fit_law("q", "D", x, z, q - q.mean(), draws=50)
    assert not negative.supported
    assert math.isnan(negative.exponent)


def test_data_budgeting_is_right_on_fresh_samples():
    source = np.random.default_rng(0)
    held_out, fresh = source.exponential(2.0, 2000), source.exponential(2.0, 60_000)
    variance, low, high = variance_interval(held_out)
    assert low <= 4.0 <= high
    needed = plan_data(held_out, fresh, tolerance=0.1)
    assert needed.k_low <= 20 <= needed.k_high  # 4 / (20 · 21) ≤ 0.01
    assert needed.right
    assert needed.rms_low <= math.sqrt(variance / (needed.k * (needed.k + 1))) <= needed.rms_high
    wrong = plan_data(held_out / 10, fresh, tolerance=0.1)
    assert wrong.right is False
    assert plan_data(held_out, fresh[:50], tolerance=0.1).right is None
    group = np.array([1.0, 2.0, 6.0])
    assert np.allclose(differences(group, 2), 3.0 - 1.5)


@pytest.fixture(scope="module")
def small() -> scaling.Scaling:
    """A run that was stopped in its third cell, and went on."""
    state, calls = {}, []

    def stop(what: str, number: int, total: int) -> None:
        calls.append(what)
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scaling.run(scaling.Config(**TINY), progress=stop, state=state)
    assert len(state) == 2
    found = scaling.run(scaling.Config(**TINY), progress=lambda what, *_: calls.append(what), state=state)
    assert calls[2:] == [f"width 4, {count} sequences, seed 0" for count in (2, 2, 4)]
    return found


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_numbers(small: scaling.Scaling):
    cell = small.cells[2]
    fresh = measure_cell(scaling.Config(**TINY), CellPosition(cell.width, cell.sequences, cell.seed))
    assert fresh.ends() == cell.ends()
    assert fresh.held_out_loss == cell.held_out_loss
    assert fresh.functional.norm == cell.functional.norm


def test_a_cell_is_its_dense_truth():
    one = {"widths": (2,), "sequences": (4,), "max_exact": 1000}
    (cell,) = scaling.run(scaling.Config(**{**TINY, **one})).cells
    assert cell.hessian.exact
    assert cell.hessian.trace == pytest.approx(cell.ggn.trace + cell.functional.trace, rel=1e-4)
    estimated = {**TINY, **one, "max_exact": 0, "num_probes": 40, "num_steps": 12}
    (other,) = scaling.run(scaling.Config(**estimated)).cells
    assert other.train_loss == cell.train_loss  # the same model
    for part in ("hessian", "ggn", "functional"):
        truth, found = getattr(cell, part), getattr(other, part)
        slack = 1e-4 * truth.norm
        assert found.trace_low - slack <= truth.trace <= found.trace_high + slack
        assert found.norm_low - slack <= truth.norm <= found.norm_high + slack
    top, error, low, low_error = other.ends()
    assert abs(top - cell.ends()[0]) <= error + 1e-4 * abs(top)
    assert low + low_error + 1e-3 >= cell.ends()[2]
    assert other.gap()[0] == pytest.approx(cell.gap()[0], rel=0.1)
    assert 1 <= cell.rank()[0] <= cell.num_parameters


def test_tables_claims_and_captions(small: scaling.Scaling):
    tables = small.tables()
    assert len(tables["scaling"]) == 4
    assert {"lambda_max", "lambda_min", "trace", "frobenius", "effective_rank", "gap", "k"} <= set(
        tables["scaling"]
    )
    wanted = ["quantity", "variable", "exponent", "low", "high", "supported", "words"]
    assert list(tables["laws"])[:7] == wanted
    claims = small.claims()
    assert len(claims) >= 5
    assert {claim.verdict for claim in claims} <= {"holds", "fails", "not decided", "in part"}
    assert set(small.captions()) == {*tables, "exponents", "data_needed"}
    assert any("one seed" in words for label, _, words in small.summary() if label == "note")


def test_the_study_is_found_and_refuses_bad_settings():
    assert find("scaling").Config is scaling.Config
    assert len(scaling.Config().places()) == 48
    assert len(scaling.Config(grid="large").places()) == 150
    with pytest.raises(cs.UsageError, match="widths: expected"):
        scaling.Config(widths=(5,))
    with pytest.raises(cs.UsageError, match="positive tolerance"):
        scaling.Config(tolerance=0.0)


def test_the_figure_of_the_paper_asks_the_study():
    from curvescope.papers.petrov2025.figures import ScalingConfig as Config

    assert Config().of_study() == scaling.Config(seeds=2)
    assert Config(profile="full").of_study() == scaling.Config(seeds=5)
    assert Config(profile="full", device="cuda").of_study().grid == "large"

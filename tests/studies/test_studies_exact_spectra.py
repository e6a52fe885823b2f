"""The study `exact_spectra`: closed forms against dense Hessians, its measures, its tables, going on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd.functional import hessian as autodiff_hessian

import curvescope as cs
from curvescope.core.seeds import generator
from curvescope.studies import exact_spectra, find
from curvescope.studies.exact_spectra import analysis, study
from curvescope.studies.exact_spectra.analysis import (
    attend,
    both_parts,
    compare,
    condition_number,
    exactly_paired,
    hessians,
    outliers,
    pairing,
    squared_error,
)
from oracles import normal

SMALL = exact_spectra.Config(
    head_size=3, num_seeds=2, num_draws=3, num_rung_draws=2, bundled_tokens=0, seed=1
)
LONG = ("+ norms", "+ feed-forward", "+ depth 2", "+ tokens, cross-entropy")


@pytest.fixture(scope="module")
def state() -> dict:
    """The pieces of the run whose result the tests look at."""
    return {}


@pytest.fixture(scope="module")
def result(state: dict) -> exact_spectra.ExactSpectra:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "SCALES", (1.0,))
        patch.delitem(analysis.MATCHES, "block")
        kept = {name: draw for name, draw in study.rungs().items() if name not in LONG}
        patch.setattr(study, "rungs", lambda: kept)
        patch.setattr(study, "VALUES", {name: values[::6] for name, values in study.VALUES.items()})
        return exact_spectra.run(SMALL, state=state)


@pytest.mark.parametrize("seed", [0, 1])
def test_closed_forms_agree_with_dense_hessians(seed: int):
    found = compare(seed, d_K=4, num_tokens=5)
    errors = found.errors()
    assert max(errors.values()) < 1e-12
    assert len(errors) == 37
    for name in ("w_Q = 0", "w_K = 0", "w_V = 0", "one token", "equal tokens", "cross-entropy"):
        assert f"1-D attention, {name}" in errors


def test_hessians_of_many_instances_are_those_of_each():
    source = generator(3)
    theta, x, y = normal(source, 2, 7), normal(source, 2, 5), normal(source, 2, 5)
    H, ggn = both_parts(lambda t: attend(t, x), lambda f: squared_error(f, y), theta)
    for r in range(2):
        f = lambda t, r=r: attend(t[None], x[r])[0]  # noqa: E731
        expected = autodiff_hessian(lambda t, r=r, f=f: ((f(t) - y[r]) ** 2).mean(), theta[r])
        torch.testing.assert_close(H[r], expected)
        J = torch.autograd.functional.jacobian(f, theta[r])
        torch.testing.assert_close(ggn[r], 2 / 5 * J.T @ J)
    assert not hessians(lambda t: t.sum(1), theta).any()


def test_measures_of_pairing():
    assert pairing(np.array([-3.0, -1.0, 0.0, 1.0, 3.0])) == 1
    assert pairing(np.array([0.0, 1.0, 2.0])) == 0
    assert pairing(np.array([-1.0, 3.0])) == pytest.approx(0.5)
    assert pairing(np.array([-1.0, 0.1, 0.2, 1.0]), ends=1) == 1
    assert np.isnan(pairing(np.zeros(3)))
    assert exactly_paired(np.array([-2.0, -1.0, 0.0, 1.0, 3.0])) == pytest.approx(0.5)
    assert exactly_paired(np.array([1.0, 1.0, -1.0])) == pytest.approx(2 / 3)
    assert np.isnan(exactly_paired(np.zeros(2)))
    assert outliers(np.array([-1.0, -1.0, 0.5, 1.0, 1.0 + 1e-12, 4.0])).tolist() == [0.5, 4.0]
    assert len(outliers(np.zeros(0))) == 0
    assert condition_number(np.array([-4.0, 0.0, 1e-20, 2.0])) == 2
    assert np.isnan(condition_number(np.zeros(2)))


def test_what_is_compared_has_as_many_parameters():
    for attention, mlp in analysis.MATCHES.values():
        assert attention.num_parameters == mlp.num_parameters
        assert (attention.kind, mlp.kind) == (analysis.GAUSS_NEWTON_ATTENTION, analysis.MLP)


def test_pairs_are_exact_where_they_must_be_and_nowhere_else(result: exact_spectra.ExactSpectra):
    found = result.pairings
    for rung in ("linear network", "ReLU network"):
        np.testing.assert_allclose(found.of(rung, study.FUNCTIONAL), 1, atol=1e-9)
    m = study.NUM_UNITS
    np.testing.assert_allclose(found.of("1-D attention", study.EXACT), 2 * (m - 1) / (2 * m + 1))
    np.testing.assert_allclose(found.of("1-D attention", study.EXACT_QUERY_KEY), (m - 1) / m)
    # ±σ_i(Γ), i = 1, 2, each d_K − 2d + 1 times, of queries and keys and of values and outputs
    np.testing.assert_allclose(found.of("d = 2, d_K = 8, W_O", study.EXACT), 2 * 4 * (m - 4 + 1) / (8 * m))
    assert not found.of("d = d_K = 4", study.EXACT).any()
    assert (found.of("d = d_K = 4", study.FUNCTIONAL) > 0.5).all()
    assert not found.of(study.CONTROL, study.EXACT).any()
    skipped, plain = (found.of(rung, study.ALL) for rung in ("+ skip", "d = 4, two heads"))
    np.testing.assert_allclose(skipped, plain)  # a skip around one layer is no function of its weights


def test_the_last_rung_reads_tokens_and_has_cross_entropy():
    drawn = study.rungs()["+ tokens, cross-entropy"](3, 0)
    f, losses = drawn.outputs(drawn.theta), drawn.loss(drawn.outputs(drawn.theta))
    assert f.shape == (3, study.LADDER_NUM_TOKENS * study.VOCABULARY)
    alone = drawn.outputs(drawn.theta[[1, 1, 1]])[1]
    torch.testing.assert_close(alone, f[1])
    uniform = drawn.loss(torch.zeros_like(f))
    np.testing.assert_allclose(uniform, np.log(study.VOCABULARY))
    assert losses.shape == (3,)
    assert int(drawn.query_key.sum()) == 2 * 2 * 16


def test_sweeps_are_exact_spectra_of_what_they_say(result: exact_spectra.ExactSpectra):
    queries, keys = (result.sweeps.of(name) for name in (study.NORM_Q, study.NORM_K))
    np.testing.assert_allclose(queries.condition, keys.condition)
    zero = result.sweeps.of(study.BIAS)
    start = zero.value == 0
    both = result.sweeps.of(study.TARGET)
    np.testing.assert_allclose(zero.outlier_high[start], both.outlier_high[both.value == 1])
    assert (zero.first_mass[~start] > zero.first_mass[start].max()).all()
    one = study.SweepPoint(norm_Q=3.0, norm_K=0.5, angle=40.0)
    w_Q, w_K, _ = study._sweep_weights(one, 4)
    assert float(w_Q @ w_K) == pytest.approx(1.5 * np.cos(np.radians(40)))
    assert (float(w_Q.norm()), float(w_K.norm())) == pytest.approx((3.0, 0.5))


def test_it_can_be_shown_and_saved(result: exact_spectra.ExactSpectra, tmp_path, undrawn):
    tables = result.tables()
    assert list(tables["spectra"]) == ["case", "index", "closed_form", "numerical"]
    assert set(result.captions()) >= set(tables)
    assert {"varied", "value", "condition", "bulk"} <= set(tables["sweeps"])
    assert len(tables["ggn_gap"]) == 6
    lines = {label: value for label, value, _ in result.summary()}
    assert float(lines["closed form against dense"]) < 1e-12
    again = exact_spectra.ExactSpectra.load(result.save(tmp_path))
    assert again.tables()["pairing"].equals(tables["pairing"])


def test_a_stopped_run_goes_on_with_the_same_numbers(result: exact_spectra.ExactSpectra, state: dict):
    missing, calls = ["spectra", "pairing, 1-D attention"], []
    done = {f"pairing, {name}": state["pairing, + skip"] for name in LONG}
    done["λ_max of the GGN, block"] = state["λ_max of the GGN, scalars"]
    kept = {name: piece for name, piece in (state | done).items() if name not in missing}
    again = exact_spectra.run(SMALL, progress=lambda what, *_: calls.append(what), state=kept)
    assert calls == missing
    np.testing.assert_array_equal(again.spectra.numerical, result.spectra.numerical)
    for quantity in (study.ALL, study.EXACT):
        found = (one.pairings.of("1-D attention", quantity) for one in (again, result))
        np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_a_part_of_the_bundled_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(study.PARTS, "one head's W_Q, W_K", "L1.h0.b_[QV]")
    found = study.climb_bundled("initial", "one head's W_Q, W_K", num_tokens=32, seed=0)
    H = cs.Hessian(cs.Problem(*study.bundled("initial", 32)), "L1.h0.b_[QV]")
    expected = pairing(torch.linalg.eigvalsh(H.to_dense().double()).numpy(), ends=3)
    assert found.value[0] == pytest.approx(expected, abs=0.01)


def test_the_study_is_found_and_refuses_bad_settings():
    assert find("exact_spectra").Config is exact_spectra.Config
    for wrong, words in (
        ({"head_size": 1}, "head_size: expected at least 2"),
        ({"head_size": 500}, "head_size: expected at most 200"),
        ({"bundled_tokens": 5}, "0 or at least 32"),
        ({"num_draws": 1}, "num_draws: expected at least 2"),
    ):
        with pytest.raises(cs.UsageError, match=words):
            exact_spectra.Config.from_dict(wrong)

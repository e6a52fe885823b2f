"""The study `landscape`: its numbers against dense Hessians of single samples, its laws, its run folder."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

import curvescope as cs
from curvescope.closed_form.landscape import three_terms
from curvescope.core.errors import UsageError
from curvescope.runs.disk.atomic_files import write_tables
from curvescope.studies import landscape
from curvescope.studies.landscape import analysis, view
from curvescope.studies.problem_config import make_problem

TOML = """
n_layers = 1
d_model = 4
n_heads = 2
d_ff = 4
vocab_size = 3
n_ctx = 11
init = "scaled"
"""


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small.toml"
    path.write_text(TOML, encoding="utf-8")
    return landscape.Config.from_dict(
        {
            "model": str(path),
            "data": "task:sorting",
            "dtype": "float64",
            "batch_size": 64,
            "blocks": ["L0.ln*", "L0.b_*"],
            "num_orders": 60,
            "num_curved": 10,
            "num_probes": 60,
            "radii": [0.0, 0.03],
            "num_pairs": 3,
            "num_subsets": 6,
            "num_norms": 2,
            "num_steps": 10,
            "dimension": 2,
            "tolerances": [0.1, 0.0001],
        }
    )


@pytest.fixture(scope="module")
def measured(cfg):
    """The result, and losses, gradients and dense Hessians of the samples it looked at."""
    state = {}
    result = landscape.run(cfg, state=state)
    problem = make_problem(cfg)
    chosen = np.random.default_rng([cfg.seed, 0]).permutation(problem.batches.num_sequences)[: cfg.num_curved]
    samples = cs.per_sample(analysis.subset(problem, np.sort(chosen)), *cfg.blocks)
    n = samples.space.size
    H = samples.products(torch.eye(n, dtype=torch.float64)).numpy()
    return result, state, samples.losses(), samples.gradients().numpy(), H


def test_small_is_exact(measured):
    result, _, losses, g, H = measured
    assert result.curvature.hessians.exact
    np.testing.assert_allclose(result.curvature.losses, losses, rtol=1e-12)
    t = np.trace(H, axis1=1, axis2=2)
    for i, s in enumerate(result.laws.s):
        expected = three_terms(
            s,
            loss_variance=losses.var(ddof=1),
            loss_trace_covariance=float(np.cov(losses, t)[0, 1]),
            trace_variance=t.var(ddof=1),
            gradient_covariance=g.var(0, ddof=1).sum(),
            fluctuation=H.var(0, ddof=1).sum(),
        )
        np.testing.assert_allclose(result.laws.terms[i], expected, rtol=1e-10, atol=1e-18)
    assert not result.laws.errors.any()


def test_the_law_meets_the_simulation(measured):
    rows = view.three_terms(measured[0])
    assert all(row["within error"] for row in rows)
    assert rows[0]["z"] == 0
    assert rows[-1]["± direct"] > 0
    for row in rows:
        assert abs(row["simulated"] - row["law"]) < 5 * row["± simulated"] + 0.5 * row["law"]


def test_probes_agree_with_the_exact_law_within_their_error(measured, cfg):
    _, _, losses, g, H = measured
    exact = analysis.Hessians(np.diagonal(H, axis1=1, axis2=2), (H**2).sum(1), (H.mean(0) ** 2).sum(0), True)
    gradients = analysis.Gradients(
        np.linalg.norm(g, axis=1), float((g.mean(0) ** 2).sum()), np.array([]), g[:0]
    )
    V = np.random.default_rng(5).choice([-1.0, 1.0], size=(H.shape[1], 40))
    HV = H @ V
    probed = analysis.Hessians((HV * V).sum(1), (HV**2).sum(1), (HV.mean(0) ** 2).sum(0), False)
    s = 1.0  # where all terms count
    truth, found = (analysis.law(s, losses, gradients, h) for h in (exact, probed))
    for a, b, error in zip(truth.terms, found.terms, found.errors, strict=True):
        assert abs(a - b) <= 4 * error + 1e-12
    assert abs(truth.terms.total - found.terms.total) <= 4 * found.total_error
    assert found.errors.hessian < 0.3 * found.terms.hessian


def test_gradients_of_subsets_and_spectral_norms(measured):
    result, _, losses, g, H = measured
    np.testing.assert_allclose(result.gradients.covariance, g.var(0).sum(), rtol=1e-10)
    assert all(abs(row["z"]) < 6 for row in view.assumption1(result))  # of six subsets
    norms = np.abs(np.linalg.eigvalsh(H)).max(1)
    found = result.curvature.norms
    assert (found.here <= norms[found.samples] * (1 + 1e-9)).all()
    assert (found.here >= 0.9 * norms[found.samples]).all()
    assert found.ball == pytest.approx(np.sqrt(2 * losses.max() / found.here.max()))
    for row in view.theorem7(result):
        assert row["violations rigorous"] == 0
        assert row["slack printed"] >= 1


def test_the_subspace_has_the_samples_own_coefficients(measured):
    result, _, losses, _, H = measured
    sub = result.subspace
    assert sub.hessians.shape == (len(losses), 2, 2)
    top = np.linalg.eigvalsh(H.mean(0))[-2:][::-1]
    np.testing.assert_allclose(np.sort(sub.eigenvalues)[::-1], top, rtol=1e-4)
    np.testing.assert_allclose(np.trace(sub.hessians.mean(0)), top.sum(), rtol=1e-4)
    exact, (mean, stderr) = sub.closed_form(), sub.simulated()
    assert np.median(np.abs(mean - exact) / stderr) < 4
    assert (sub.bound() >= exact).all()


def test_growth_is_that_of_any_numbers():
    losses = np.random.default_rng(0).exponential(size=300) + 0.5
    found = analysis.growth(losses, num_orders=150, seed=1)
    np.testing.assert_allclose(found.law, np.sqrt(losses.var(ddof=1) / (found.k * (found.k + 1))))
    for curve in (found.model, found.control):
        assert abs(curve.slope[0] - found.law_slope) < 0.05
        assert curve.early[0] > -0.3, "smoothing makes a plateau of both"
        assert curve.late[0] < -1.5, "and a cliff behind it"
    assert view.overlap(found.model.slope, found.control.slope)
    value, low, high = found.model.ratio
    assert abs(value - 1) < (high - low)
    steps = analysis.increments(losses)
    assert (steps**2 * found.k * (found.k + 1)).mean() == pytest.approx(losses.var(ddof=1))  # in any order


def test_a_budget_is_right_where_the_halves_are_alike_and_says_when_it_cannot_be_checked():
    losses = np.random.default_rng(1).normal(3.0, 1.0, size=400)
    found = analysis.budget(losses, (0.05, 0.0001), seed=0)
    assert found.low[0] <= 20 <= found.high[0]  # √1/0.05
    assert found.held_low[0] <= found.held_out[0] <= found.held_high[0]
    assert found.verdicts == ["met", "not checked: too few samples"]


def test_claims_have_verdicts_that_follow_from_numbers(measured):
    result = measured[0]
    found = {claim.claim: claim for claim in result.claims()}
    assert len(found) == len(result.claims()) >= 12
    assert found["Assumption 1: ∇L_k(w*) = 0 for all k"].verdict == view.FAILS
    assert found["the Hessian determines the plotted convergence at w*"].verdict == view.FAILS
    assert found["around w* the law has three terms"].verdict == view.HOLDS
    wrong = result.laws.terms * np.array([1.0, 1.0, 1.0]) + 1.0
    broken = replace(result, laws=replace(result.laws, terms=wrong))
    changed = {claim.claim: claim.verdict for claim in broken.claims()}
    assert changed["around w* the law has three terms"] == view.FAILS
    captions = result.captions()
    assert set(result.tables()) | set(result.figures()) <= set(captions)
    plt.close("all")


def test_a_run_goes_on_where_it_stopped_and_its_folder_reads_back(measured, cfg, tmp_path):
    result, state, *_ = measured
    rest = {name: found for name, found in state.items() if not name.startswith(("radius", "subspace"))}
    again = landscape.run(cfg, state=rest)
    np.testing.assert_array_equal(again.subspace.direct, result.subspace.direct)
    np.testing.assert_array_equal(again.direct[1].variance, result.direct[1].variance)
    result.save(tmp_path)
    loaded = landscape.Landscape.load(tmp_path)
    assert loaded.summary() == result.summary()


def test_the_table_has_the_columns_that_are_promised(measured, tmp_path):
    write_tables(measured[0], tmp_path)
    table = pd.read_csv(tmp_path / "landscape.csv")
    assert list(table.columns[:4]) == ["k", "model", "control", "law"]
    assert len(table) == len(measured[0].growth.k)


def test_settings_that_cannot_be():
    with pytest.raises(UsageError, match="num_probes"):
        landscape.Config(num_probes=2)
    with pytest.raises(UsageError, match="radii"):
        landscape.Config(radii=(-0.1,))
    with pytest.raises(UsageError, match="tolerances"):
        landscape.Config(tolerances=(0.0,))
